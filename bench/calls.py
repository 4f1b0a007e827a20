"""`make bench-calls`: what each call of a run costs the rpc process and the store, in µs of CPU.

A service with one rpc process, as `rollout-buffer serve` starts it, gets one kind of call after the other, 16 at once.
16,384 tasks are submitted, and leased by 2,048 engines, one or eight a call. Their leases are extended, and the
engines report, in two calls and in one heartbeat. Groups of 2 KB are pushed with these leases, one or 32 a call, and
pulled 32 a step, with commit and checkpoint. CPU is that of the processes (/proc): of the store it is all that a call
takes, not its script alone. Memory is what the store says that it uses, before and after. `rollout-buffer size`
computes with these figures.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import redis

from bench import workload
from bench.measure import measured, median
from bench.ours import Service, service
from buffer_wire import layout
from buffer_wire.codec import Buffer, join_group, join_push
from buffer_wire.connection.channel import client_options
from rollout_buffer.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    common_pb2,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

ENGINES, LEASES = 2_048, 8
TASKS = ENGINES * LEASES
TASKS_OF_SUBMIT, BUNDLE, BATCH = 64, 32, 32
ALONE = TASKS // 4
"""Groups that are pushed one a call; the others go in bundles."""
AT_ONCE = 16
_SIZE = workload.Size("2kb", 2_000, TASKS, BATCH)
_BODY = layout.payload_pieces(workload.arrays(_SIZE))
_VERSION = common_pb2.WeightVersion(term=1, version=0)
_RESULTS = Path(__file__).parent / "results" / "calls.json"


Call = Callable[[], Awaitable[Any]]


@dataclass(slots=True)
class Costs:
    """Costs of one run: µs of CPU a call of the rpc process and of the store, and bytes that the store grew by."""

    us: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_each: dict[str, float] = field(default_factory=dict)


class Bench:
    """One run of the measurement."""

    def __init__(self, channel: grpc.aio.Channel, served: Service, run_id: str) -> None:
        self._run = common_pb2.RunRef(run_id=run_id)
        self._runs = runs_pb2_grpc.RunServiceStub(channel)
        self._tasks = tasks_pb2_grpc.TaskServiceStub(channel)
        self._weights = weights_pb2_grpc.WeightServiceStub(channel)
        self._batches = batches_pb2_grpc.BatchServiceStub(channel)
        self._streams = [_Pushing(channel, self._run) for _ in range(AT_ONCE)]
        self._store = redis.Redis(unix_socket_path=served.unix_socket)
        self._pids: dict[str, Sequence[int]] = {
            "rpc": _pids(served, b"buffer_service.app"),
            "store": _pids(served, b"-server"),
        }
        self._costs = Costs()

    async def run(self) -> Costs:
        """Make every call."""
        policy = runs_pb2.RunPolicy(
            batch_groups=BATCH,
            max_queued_groups=TASKS,
            max_pending_tasks=TASKS,
            overflow_action=runs_pb2.OVERFLOW_ACTION_BLOCK,
            lease_ttl_ms=3_600_000,
        )
        await self._runs.CreateRun(runs_pb2.CreateRunRequest(run_id=self._run.run_id, policy=policy))
        with self._growth("task"):
            await self._counted("submit 64", [self._submit(i) for i in range(TASKS // TASKS_OF_SUBMIT)], at_once=1)
        with self._growth("lease"):
            half = ENGINES // 2
            leased = await self._counted("lease 8", [self._lease(i, LEASES) for i in range(half)])
            asked = [(i, request) for request in range(LEASES) for i in range(half, ENGINES)]
            singly = await self._counted("lease 1", [self._lease(i, 1, request) for i, request in asked])
        leases = [list(reply.leases) for reply in leased]
        leases += [[lease for reply in singly[i::half] for lease in reply.leases] for i in range(half)]
        if {len(each) for each in leases} != {LEASES}:
            raise RuntimeError("not every engine was given its leases")
        await self._counted("extend 8", [self._extend(i, each) for i, each in enumerate(leases)])
        await self._counted("report", [self._report(i) for i in range(ENGINES)])
        await self._counted("heartbeat 8", [self._heartbeat(i, each) for i, each in enumerate(leases)])
        groups = [_group(lease, f"w{i}") for i, each in enumerate(leases) for lease in each]
        with self._growth("group", beside=sum(map(len, _BODY))):
            await self._counted("push 1", [self._push([group]) for group in groups[:ALONE]])
            bundles = [groups[first : first + BUNDLE] for first in range(ALONE, TASKS, BUNDLE)]
            await self._counted("push 32", [self._push(bundle) for bundle in bundles])
        await self._counted("pull 32", [self._pull(step) for step in range(TASKS // BATCH)], at_once=1)
        return self._costs

    async def _counted(self, name: str, calls: Sequence[Call], at_once: int = AT_ONCE) -> list[Any]:
        """Make the calls, `at_once` of them together; their replies."""
        replies: list[Any] = [None] * len(calls)
        left = iter(enumerate(calls))

        async def one_after_the_other() -> None:
            for number, call in left:
                replies[number] = await call()

        with measured(self._pids) as cost:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_once):
                    tasks.create_task(one_after_the_other())
        self._costs.us[name] = {side: cpu_s * 1e6 / len(calls) for side, cpu_s in cost.cpu.items()}
        return replies

    @contextmanager
    def _growth(self, of: str, beside: int = 0) -> Iterator[None]:
        """Note by how much the store grows for each of the tasks, `beside` the bytes of a payload."""
        before = self._store.info("memory")["used_memory"]
        yield
        self._costs.bytes_each[of] = (self._store.info("memory")["used_memory"] - before) / TASKS - beside

    # ── calls ────────────────────────────────────────────────────────────────

    def _submit(self, number: int) -> Call:
        cursor = number * TASKS_OF_SUBMIT
        task = tasks_pb2.Task(
            prompt_token_ids=range(200), group_size=8, sampling=tasks_pb2.SamplingParams(max_new_tokens=16)
        )
        request = tasks_pb2.SubmitTasksRequest(
            run=self._run,
            term=1,
            request_id=f"s{number}",
            expected_cursor=cursor,
            cursor=cursor + TASKS_OF_SUBMIT,
            tasks=[task] * TASKS_OF_SUBMIT,
        )
        return lambda: self._tasks.SubmitTasks(request)

    def _lease(self, number: int, tasks: int, request: int = 0) -> Call:
        ask = tasks_pb2.LeaseTasksRequest(
            run=self._run,
            worker_id=f"w{number}",
            engine_id=f"w{number}",
            instance_id="i",
            request_id=f"l{request}",
            loaded=_VERSION,
            max_tasks=tasks,
        )
        return lambda: self._tasks.LeaseTasks(ask)

    def _extend(self, number: int, leases: Sequence[tasks_pb2.Lease]) -> Call:
        request = self._extension(number, leases)
        return lambda: self._tasks.ExtendLeases(request)

    def _report(self, number: int) -> Call:
        request = self._report_of(number)
        return lambda: self._weights.ReportEngine(request)

    def _heartbeat(self, number: int, leases: Sequence[tasks_pb2.Lease]) -> Call:
        request = tasks_pb2.HeartbeatRequest(
            run=self._run, extensions=[self._extension(number, leases)], reports=[self._report_of(number)]
        )
        return lambda: self._tasks.Heartbeat(request)

    def _extension(self, number: int, leases: Sequence[tasks_pb2.Lease]) -> tasks_pb2.ExtendLeasesRequest:
        lease_ids = [lease.lease_id for lease in leases]
        return tasks_pb2.ExtendLeasesRequest(
            run=self._run, worker_id=f"w{number}", instance_id="i", lease_ids=lease_ids
        )

    def _report_of(self, number: int) -> weights_pb2.ReportEngineRequest:
        report = weights_pb2.EngineReport(
            engine_id=f"w{number}", worker_id=f"w{number}", state=weights_pb2.ENGINE_STATE_READY, loaded=_VERSION
        )
        return weights_pb2.ReportEngineRequest(run=self._run, report=report)

    def _push(self, groups: Sequence[Sequence[Buffer]]) -> Call:
        async def push() -> None:
            # Streams stay open, as a worker's does, and each has one bundle under way.
            stream = self._streams.pop()
            await stream.push(groups)
            self._streams.append(stream)

        return push

    def _pull(self, step: int) -> Call:
        request = batches_pb2.PullBatchRequest(run=self._run, term=1, step=step, world_size=1, wait_ms=5_000)
        if step:
            request.commit_through_step = request.checkpoint_through_step = step - 1

        async def pull() -> None:
            async for _ in self._batches.PullBatch(request):
                pass

        return pull


class _Pushing:
    """Push stream of the client, opened with its first bundle: one that is silent may have to give way."""

    def __init__(self, channel: Any, run: common_pb2.RunRef) -> None:  # noqa: ANN401 - the stubs know no raw calls
        self._open = channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups")
        self._call: Any = None
        self._run = run
        self._sequence = 0

    async def push(self, groups: Sequence[Sequence[Buffer]]) -> None:
        """Push a bundle and wait for its acknowledgement."""
        self._call = self._call or self._open()
        self._sequence += 1
        await self._call.write(join_push(self._run, self._sequence, groups))
        if await self._call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise RuntimeError(f"the push stream ended: {await self._call.details()}")


def _group(lease: tasks_pb2.Lease, worker_id: str) -> Sequence[Buffer]:
    header = workload.header(_SIZE, lease.task.task_id, 0)
    header.lease_id, header.incarnation, header.worker_id = lease.lease_id, lease.incarnation, worker_id
    return join_group(header, *_BODY)


def _pids(served: Service, of: bytes) -> list[int]:
    return [pid for pid in served.pids if of in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def _measure(served: Service, runs: int) -> list[Costs]:
    async with grpc.aio.insecure_channel(served.address, options=client_options()) as channel:
        # The first warms up.
        return [await Bench(channel, served, f"calls-{number}").run() for number in range(runs + 1)][1:]


def main() -> None:
    """Measure, print a table, write bench/results/calls.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default 5)")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rollout-buffer-calls-") as scratch,
        service(Path(scratch), "memory", "--rpc-processes", "1") as served,
    ):
        costs = asyncio.run(_measure(served, options.runs))
    us = {
        name: {side: median([cost.us[name][side] for cost in costs]) for side in ("rpc", "store")}
        for name in costs[0].us
    }
    bytes_each = {of: round(median([cost.bytes_each[of] for cost in costs])) for of in costs[0].bytes_each}
    print(f"{'CPU, µs a call':16}{'rpc':>8}{'store':>8}")
    for name, sides in us.items():
        print(f"{name:16}{sides['rpc']:>8}{sides['store']:>8}")
    print("bytes of the store for each: " + ", ".join(f"{of} {size:,}" for of, size in bytes_each.items()))
    facts = {
        "runs": options.runs,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.write_text(json.dumps({"us": us, "bytes": bytes_each, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
