"""`make bench-pull`: how long a pull of a batch that is ready takes, beside a raw gRPC transfer of the same bytes.

A batch is 32 groups of 147 KB. The service runs as `rollout-buffer serve` starts it. Before each pull its queue is
filled, and the batch before is committed and freed; only the pull itself is timed: `BufferClient.pull`, from its call
to the batch with every group's header read. The floor is a bare grpc.aio server on uvloop, with the service's channel
and malloc options. It streams random messages of exactly the sizes that the pull had to a blocking channel in the same
process, with the client's options. The two take turns, in changing order; ratios of quantiles inside one run.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc

from bench import workload
from bench.ours import service
from bench.roles import Handler, Role
from buffer_wire.connection.channel import client_options
from trainer_client import BufferClient
from trainer_client.client.call import serialize
from trainer_client.client.pulling import PULL_METHOD, PullSpec
from trainer_client.policy import Policy

_RESULTS = Path(__file__).parent / "results" / "pull.json"
_GOAL = 2.0
_GROUPS = 32
_SIZE = workload.Size("147kb", 147_000, _GROUPS, _GROUPS)
_WARM_UP = 10
_RUN_ID = "pull"
_RAW_METHOD = "/raw.Raw/Pull"
_POOL_BATCHES = 8
"""Random batches that the raw server sends in turn: 38 MB, so that none comes out of a cache of the processor."""
_START_TIMEOUT_S = 30.0
_TRANSFER_S = 60.0


def raw_server() -> dict[str, Handler]:
    """The floor; commands `port` and `prepare` (the sizes of the messages of one batch)."""
    import uvloop

    from buffer_wire.connection.channel import server_options

    ready = threading.Event()
    port = 0
    batches: Iterator[list[bytes]] = iter(())

    async def pull(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        for message in next(batches):
            yield message

    def prepare(sizes: Sequence[int]) -> None:
        nonlocal batches
        batches = cycle([[os.urandom(size) for size in sizes] for _ in range(_POOL_BATCHES)])

    async def serve() -> None:
        nonlocal port
        server = grpc.aio.server(options=server_options())
        handlers = {"Pull": grpc.unary_stream_rpc_method_handler(pull)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Raw", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await server.wait_for_termination()

    threading.Thread(target=lambda: uvloop.run(serve()), daemon=True).start()
    if not ready.wait(_START_TIMEOUT_S):
        raise TimeoutError(f"the raw server did not start within {_START_TIMEOUT_S:.0f} s")
    return {"port": lambda: port, "prepare": prepare}


def producer(address: str) -> dict[str, Handler]:
    """Command `fill`: push `count` groups, numbered from `first`, and return when all are queued."""
    from buffer_wire import layout
    from rollout_workers.counters import Counters
    from rollout_workers.service.client import ServiceClient
    from rollout_workers.service.pusher import Pusher

    payload = layout.write_payload(workload.arrays(_SIZE))
    # One loop for all commands: gRPC's poller stays bound to it.
    loop = asyncio.Runner()
    client: ServiceClient | None = None

    async def fill(first: int, count: int) -> None:
        nonlocal client
        client = client or ServiceClient(address, _RUN_ID, instance_id="bench", timeout_s=60.0)
        pusher = Pusher(client, Counters(), window_bytes=64 << 20)
        runner = asyncio.create_task(pusher.run())
        numbers = range(first, first + count)
        results = await asyncio.gather(*(pusher.push(workload.header(_SIZE, f"t{i:09d}", 0), payload) for i in numbers))
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        if any(result.outcome != "queued" for result in results):
            raise RuntimeError(f"groups {numbers} were answered {results}")

    return {"fill": lambda first, count: loop.run(fill(first, count))}


class Trainer:
    """Pulls the run's batches one after another, and the raw server's."""

    def __init__(self, stack: ExitStack, address: str, raw: Role) -> None:
        self._client = stack.enter_context(BufferClient(address))
        self._client.create_run(
            _RUN_ID, Policy(batch_groups=_GROUPS, max_queued_groups=2 * _GROUPS, overflow_action="block")
        )
        self._term = self._client.resume(_RUN_ID, next_step=0).term
        self._producer = stack.enter_context(Role(producer, address))
        self._raw = raw
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{raw.call('port')}", client_options()))
        self._raw_pull: Any = channel.unary_stream(_RAW_METHOD)  # type: ignore[call-arg]  # raw bytes
        self.step = 0

    def fill(self) -> None:
        """Have the next batch ready."""
        self._producer.call("fill", self.step * _GROUPS, _GROUPS)

    def pull(self) -> float:
        """Seconds of one pull; the batch is then committed and freed."""
        started = time.perf_counter()
        batch = self._client.pull(_RUN_ID, term=self._term, step=self.step)
        took_s = time.perf_counter() - started
        if len(batch.groups) != _GROUPS or batch.received_bytes < _GROUPS * len(batch.groups[0].payload):
            raise RuntimeError(f"step {self.step} is not the batch that was pushed")
        self._client.commit(_RUN_ID, term=self._term, through_step=self.step)
        self._client.checkpoint(_RUN_ID, term=self._term, through_step=self.step)
        self.step += 1
        return took_s

    def pull_raw(self) -> float:
        """Seconds of one transfer of the same bytes."""
        started = time.perf_counter()
        messages = list(self._raw_pull(b"", timeout=_TRANSFER_S))
        took_s = time.perf_counter() - started
        if [len(message) for message in messages] != self.sizes:
            raise RuntimeError("the raw server sent other messages than the service")
        return took_s

    def learn_sizes(self, address: str) -> None:
        """Pull the step in hand once, message by message, and have the raw server send such messages."""
        with grpc.insecure_channel(address, client_options()) as channel:
            method = channel.unary_stream(PULL_METHOD, request_serializer=serialize, response_deserializer=None)
            request = PullSpec(term=self._term, step=self.step).to_wire(self._client.revisions.ref(_RUN_ID), 60.0)
            self.sizes = [len(message) for message in method(request, timeout=_TRANSFER_S)]
        self._raw.call("prepare", self.sizes)


def measure(pulls: int, durability: str) -> tuple[list[float], list[float], list[int]]:
    """Seconds of every pull and of every raw transfer, and the sizes of a batch's messages in bytes."""
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-bench-") as scratch, ExitStack() as stack:
        raw = stack.enter_context(Role(raw_server))
        address = stack.enter_context(service(Path(scratch), durability)).address
        trainer = Trainer(stack, address, raw)
        trainer.fill()
        trainer.learn_sizes(address)
        own: list[float] = []
        floor: list[float] = []
        for i in range(_WARM_UP + pulls):
            if i:
                trainer.fill()
            sides: list[tuple[list[float], Callable[[], float]]] = [(own, trainer.pull), (floor, trainer.pull_raw)]
            for times, side in sides if i % 2 else reversed(sides):
                times.append(side())
        return own[_WARM_UP:], floor[_WARM_UP:], trainer.sizes


def quantiles_ms(times: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {f"p{q}": round(cuts[q - 1] * 1000, 3) for q in (50, 90, 99)}


def main() -> int:
    """Measure, print, write bench/results/pull.json; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.pull", description=__doc__.splitlines()[0])
    parser.add_argument("--pulls", type=int, default=200, help="counted pulls of each side (default 200)")
    parser.add_argument("--durability", choices=["memory", "process", "host"], default="process")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: bench/results/pull.json")
    options = parser.parse_args()
    if options.pulls < 2:
        parser.error("--pulls must be at least 2")

    print(f"bench-pull: {options.pulls} pulls and raw transfers in turn, on {os.cpu_count()} cores", flush=True)
    own, floor, sizes = measure(options.pulls, options.durability)
    pull, raw = quantiles_ms(own), quantiles_ms(floor)
    ratios = {name: round(pull[name] / raw[name], 3) for name in pull}
    met = ratios["p50"] <= _GOAL
    print(f"{'':>14} {'p50':>8} {'p90':>8} {'p99':>8}   of {sum(sizes) / 1e6:.2f} MB in {len(sizes)} messages")
    for name, row, unit in (("pull", pull, "ms"), ("raw gRPC", raw, "ms"), ("ratio", ratios, "")):
        print(f"{name:>14} {row['p50']:>8.2f} {row['p90']:>8.2f} {row['p99']:>8.2f}   {unit}")
    print(f"goal: p50 within {_GOAL} x of the raw transfer: {'met' if met else 'missed'}")
    report = {
        "pull_ms": pull,
        "raw_ms": raw,
        "ratio": ratios,
        "goal_p50_ratio": _GOAL,
        "met": met,
        "groups": _GROUPS,
        "group_bytes": _SIZE.group_bytes,
        "message_bytes": sizes,
        "pulls": options.pulls,
        "durability": options.durability,
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {options.out}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
