"""Process that asks a store all the time: `python -m tests.large.pings SOCKET`.

It prints its latencies in ms as JSON once its standard input ends. A process of its own: whoever moves large groups is
held up by that itself.
"""

import contextlib
import json
import os
import select
import socket
import sys
import time


def main() -> None:
    """Ask until standard input ends."""
    # Where the system lets it, its own turn does not count.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    took: list[float] = []
    with socket.socket(socket.AF_UNIX) as store:
        store.connect(sys.argv[1])
        print("asking", flush=True)
        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            began = time.perf_counter()
            store.sendall(b"PING\r\n")
            store.recv(16)
            took.append(1_000 * (time.perf_counter() - began))
    print(json.dumps(took))


if __name__ == "__main__":
    main()
