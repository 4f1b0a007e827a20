"""`make bench-memory`: what an rpc process holds for clients that make it hold as much as they can.

Each case meets a service of its own, as `rollout-buffer serve` starts it, with one rpc process, whose clients have a
connection each:

    unary     300 PushGroup of 4 MB into a full queue, repeated half a second after every refusal
    streams   150 push streams into a full queue, each with 4 MB bundles for as long as the service reads them
    readers   120 pulls of one step of 36 MB, each of which reads a message a second

Reported is the peak of the process's memory (VmHWM) above what it had idle, over the budget (`--blocked-bytes`). So is
what it still has 10 s after the clients have gone. With `--check` the exit status is 1 where a peak is above 1.5
budgets, or what is kept above half of one.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench import workload
from bench.measure import resident_bytes
from bench.ours import service
from bench.roles import Handler, Role
from buffer_wire import layout
from buffer_wire.codec import join_group, join_push
from buffer_wire.connection.channel import client_options
from rollout_buffer.v1 import batches_pb2, common_pb2, groups_pb2
from trainer_client import BufferClient
from trainer_client.policy import Policy

_RESULTS = Path(__file__).parent / "results" / "memory.json"
_BUDGET = 256 << 20
_PEAK_BUDGETS, _KEPT_BUDGETS = 1.5, 0.5
_RUN = common_pb2.RunRef(run_id="memory")
_PUSH_ONE = "/rollout_buffer.v1.GroupService/PushGroup"
_PUSHED = workload.Size("4mb", 4_000_000, 1, 1)
_STEP = workload.Size("1200kb", 1_200_000, 30, 30)
_RETRY_S, _READ_EVERY_S, _AFTER_S = 0.5, 1.0, 10.0

Client = Callable[[Any, int], Coroutine[Any, Any, None]]
"""Client on a channel, with a number; it runs until it is cancelled."""


def clients(address: str) -> dict[str, Handler]:
    """Commands by the names of the cases (how many, for how many seconds), and `queue` (how many groups, of a size)."""

    async def all_at_once(client: Client, count: int, seconds: float) -> None:
        channels: list[Any] = [grpc.aio.insecure_channel(address, options=client_options()) for _ in range(count)]
        tasks = [asyncio.create_task(client(channel, i)) for i, channel in enumerate(channels)]
        _, at_work = await asyncio.wait(tasks, timeout=seconds)
        for task in at_work:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def queue(size: workload.Size) -> None:
        with grpc.insecure_channel(address, client_options()) as channel:
            call: Any = channel.unary_unary(_PUSH_ONE)  # type: ignore[call-arg]  # raw bytes
            for number in range(size.groups):
                call(_one(size, f"q{number}"), timeout=60.0)

    commands: dict[str, Handler] = {"queue": queue}
    for name, client in (("unary", _push), ("streams", _stream), ("readers", _read)):
        commands[name] = lambda count, seconds, client=client: asyncio.run(all_at_once(client, count, seconds))
    return commands


async def _push(channel: Any, number: int) -> None:  # noqa: ANN401 - the stubs would not have it make raw calls
    call, message = channel.unary_unary(_PUSH_ONE), _one(_PUSHED, f"u{number}")
    while True:
        with _refusals():
            await call(message, timeout=60.0)
        await asyncio.sleep(_RETRY_S)


async def _stream(channel: Any, number: int) -> None:  # noqa: ANN401
    call = channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups")

    async def bundles() -> AsyncIterator[bytes]:
        for sequence in count(1):
            yield join_push(_RUN, sequence, [[_body(_PUSHED, f"s{number}-{sequence}")]])

    while True:
        with _refusals():
            async for _ in call(bundles()):
                pass
        await asyncio.sleep(_RETRY_S)


async def _read(channel: Any, _: int) -> None:  # noqa: ANN401
    call = channel.unary_stream("/rollout_buffer.v1.BatchService/PullBatch")
    request = batches_pb2.PullBatchRequest(run=_RUN, term=1, step=0, rank=0, world_size=1, wait_ms=60_000)
    while True:
        with _refusals():
            async for _message in call(request.SerializeToString()):
                await asyncio.sleep(_READ_EVERY_S)
        await asyncio.sleep(_RETRY_S)


@contextmanager
def _refusals() -> Iterator[None]:
    """Being told to come again is what the clients are there for."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise RuntimeError(f"{error.code().name}: {error.details()}") from None


@cache
def _payload(size: workload.Size) -> bytes:
    return layout.write_payload(workload.arrays(size))


def _body(size: workload.Size, task_id: str) -> bytes:
    return b"".join(join_group(workload.header(size, task_id, 0), _payload(size)))


def _one(size: workload.Size, task_id: str) -> bytes:
    group = groups_pb2.Group.FromString(_body(size, task_id))
    return groups_pb2.PushGroupRequest(run=_RUN, group=group).SerializeToString()


def _rpc_process(pids: Sequence[int]) -> int:
    return next(pid for pid in pids if b"buffer_service.app" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


def measure(case: str, how_many: int, queued: workload.Size, seconds: float) -> dict[str, float]:
    """One case against a service of its own."""
    with tempfile.TemporaryDirectory(prefix="bench_memory_") as directory:
        flags = ("--rpc-processes", "1", "--blocked-bytes", str(_BUDGET))
        with service(Path(directory), "process", *flags) as own, Role(clients, own.address) as role:
            with BufferClient(own.address) as trainer:
                policy = Policy(batch_groups=queued.groups, max_queued_groups=queued.groups, overflow_action="block")
                trainer.create_run(_RUN.run_id, policy)
            role.call("queue", queued)
            pid = _rpc_process(own.pids)
            idle = resident_bytes(pid)
            role.call(case, how_many, seconds)
            peak = resident_bytes(pid, "VmHWM")
            time.sleep(_AFTER_S)
            if _rpc_process(own.pids) != pid:
                raise RuntimeError("the rpc process was started again")
            kept = resident_bytes(pid)
    return {
        "clients": how_many,
        "idle_mb": round(idle / 1e6),
        "peak_mb": round(peak / 1e6),
        "kept_mb": round(kept / 1e6),
        "peak_over_budget": round((peak - idle) / _BUDGET, 2),
        "kept_over_budget": round((kept - idle) / _BUDGET, 2),
    }


def main() -> int:
    """Run the cases; print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit status 1 where a bound is not held")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the clients of a case are there")
    parser.add_argument("--cases", nargs="+", default=["unary", "streams", "readers"])
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    cases = {
        "unary": (300, _PUSHED),
        "streams": (150, _PUSHED),
        "readers": (120, _STEP),
    }
    report: dict[str, dict[str, float]] = {}
    print(
        f"{'':>10} {'idle':>7} {'peak':>7} {'kept':>7}   MB; (peak - idle) and (kept - idle) over {_BUDGET >> 20} MiB"
    )
    for case in options.cases:
        how_many, queued = cases[case]
        row = report[case] = measure(case, how_many, queued, options.seconds)
        print(
            f"{case:>10} {row['idle_mb']:>7} {row['peak_mb']:>7} {row['kept_mb']:>7}   "
            f"{row['peak_over_budget']:.2f} {row['kept_over_budget']:.2f}",
            flush=True,
        )
    met = all(
        row["peak_over_budget"] <= _PEAK_BUDGETS and row["kept_over_budget"] <= _KEPT_BUDGETS for row in report.values()
    )
    print(f"goal: peak within {_PEAK_BUDGETS}, kept within {_KEPT_BUDGETS} budgets: {'met' if met else 'missed'}")
    facts = {
        "budget_bytes": _BUDGET,
        "met": met,
        "seconds": options.seconds,
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**report, **facts}, indent=2) + "\n")
    print(f"written to {options.out}")
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
