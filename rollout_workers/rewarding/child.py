"""A process that computes rewards: `python -m rollout_workers.rewarding.child FD PARENT`, started by processes.py.

It answers on the socket FD until that is closed, one sample at a time. It ends with its parent, whatever ends that.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, BinaryIO, cast

FRAME = struct.Struct("<IQ")
"""Frame header: lengths of the JSON object, and of the bytes behind it, in bytes. Those of a request are token ids,
those of an answer columns."""

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve; returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return 1
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        cast("BinaryIO", connection.makefile("rwb")) as stream,
    ):
        start = json.loads(_receive(stream)[0])
        sys.path[:] = start["path"]
        # Heavy, and only found on the parent's path.
        from buffer_wire.errors import RolloutBufferError  # noqa: PLC0415
        from rollout_workers.counters import describe  # noqa: PLC0415
        from rollout_workers.errors import PolicyError, retry_after_s_of  # noqa: PLC0415
        from rollout_workers.functions import load  # noqa: PLC0415
        from rollout_workers.generation.columns.given import returned, to_message  # noqa: PLC0415
        from rollout_workers.reward_inputs import from_message  # noqa: PLC0415

        try:
            function = load("reward", start["function"])
        except RolloutBufferError as error:
            _send(stream, {"error": str(error)})
            return 1
        _send(stream, {})
        while True:
            try:
                head, ids = _receive(stream)
            except EOFError:
                return 0
            data = b""
            try:
                sample = from_message(head, ids)
                try:
                    value = function(sample)
                except PolicyError as wrong:
                    value = wrong
                given = returned(value, prompt=len(sample.prompt_ids), response=len(sample.response_ids))
                answer, data = to_message(given)
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything
                answer = {"error": describe(error), "retry_after_s": retry_after_s_of(error)}
            _send(stream, answer, data)


def _receive(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Receive a request. Raises EOFError when the other end is gone."""
    head, ids = FRAME.unpack(_exactly(stream, FRAME.size))
    return _exactly(stream, head), _exactly(stream, ids)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _send(stream: BinaryIO, answer: dict[str, Any], data: bytes = b"") -> None:
    head = json.dumps(answer).encode()
    stream.write(FRAME.pack(len(head), len(data)) + head)
    stream.write(data)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
