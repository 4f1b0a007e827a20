"""`make bench-stages`: what a group of 18 KB costs in each stage of its way, and the store's commands that it takes.

One process does in turn what pusher, service and trainer do, without gRPC between them, on a store of its own: 1,024
groups of 8 samples, in bundles and batches of 32. A stage's figure is process CPU, in µs a group, the median of the
runs. Of the store it is what the server says of its calls (INFO commandstats): times of scripts include those of the
commands in them. Last come pushes of single groups by several workers at the same time, which share calls.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import uvloop

from bench import workload
from bench.measure import median
from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.rpc.convert import batches as convert_batches
from buffer_service.rpc.convert import groups as convert
from buffer_service.settings import Durability
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire import codec, layout, validate
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import batches_pb2, common_pb2
from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.client.assembly import PullAssembly

GROUPS, PORTION = 1_024, 32
SIZE = workload.Size("18kb", 18_000, GROUPS, PORTION)
LIMITS = convert.Limits(64 << 20, 64 << 20)
WORKERS = (1, 8, 64)
OPERATIONS = ("push", "pull", "fetch", "commit", "checkpoint")


@dataclass(slots=True)
class Cost:
    """CPU seconds by stage, and calls and µs of the store's commands by operation."""

    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    commands: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the CPU of this process in a stage."""
        began = time.process_time()
        yield
        self.stages[name] += time.process_time() - began


class Bench:
    """One run of the measurement on a store that is there for it alone."""

    def __init__(self, store: RedisRunStore, control: "redis.Redis") -> None:
        self._store = store
        self._control = control
        self._cost = Cost()

    async def run(self, run_id: str) -> Cost:
        """Push, pull, commit and free all groups, one operation after another."""
        policy = RunPolicy(
            batch_groups=PORTION,
            max_queued_groups=GROUPS,
            overflow_action=OverflowAction.BLOCK,
            retained_steps=GROUPS,
        )
        await self._store.create_run(run_id, policy)
        entries = [self.checked(message) for message in self.made(run_id)]
        with self._counted("push"):
            for portion in entries:
                await self._push(run_id, portion)
        steps = range(GROUPS // PORTION)
        batches = []
        with self._counted("pull"):
            for step in steps:
                with self._cost.stage("service: pull, store call"):
                    pull = ops.Pull(1, step, 0, 1, None)
                    batches.append(await self._store.call(commands.pull(run_id, pull)))
        with self._counted("fetch"):
            for batch in batches:
                await self._read(run_id, batch)
        for name, command in (("commit", commands.commit), ("checkpoint", commands.checkpoint)):
            with self._counted(name):
                for step in steps:
                    with self._cost.stage(f"service: {name}"):
                        await self._store.call(command(run_id, 1, step))
        return self._cost

    def made(self, run_id: str) -> Iterator[bytes]:
        """Messages as the pusher makes them."""
        columns = workload.arrays(SIZE)
        for first in range(0, GROUPS, PORTION):
            with self._cost.stage("producer: header"):
                headers = [workload.header(SIZE, f"t{i}", 0) for i in range(first, first + PORTION)]
            with self._cost.stage("producer: columns"):
                payloads = [layout.write_payload(columns) for _ in headers]
            with self._cost.stage("producer: message"):
                groups = [codec.join_group(*parts) for parts in zip(headers, payloads, strict=True)]
                message = codec.join_push(common_pb2.RunRef(run_id=run_id), 1, groups)
            yield message

    def checked(self, message: bytes) -> list[convert.Entry]:
        """Entries of a message, as the service makes them."""
        stage = self._cost.stage
        with stage("service: push, split"):
            bundle = codec.split_push(message)
        # These three are parts of the entry, and measured beside it.
        with stage("  of these: header split and parsed"):
            split = [codec.split_group(body) for body in bundle.groups]
            headers = [pb.GroupHeader.FromString(bytes(head)) for head, _ in split]
        with stage("  of these: checked"):
            for header, (_, payload) in zip(headers, split, strict=True):
                validate.check_group(header, len(payload))
        with stage("service: push, entries"):
            return [convert.entry(body, LIMITS) for body in bundle.groups]

    async def _push(self, run_id: str, entries: list[convert.Entry]) -> None:
        groups = [entry for entry in entries if isinstance(entry, ops.NewGroup)]
        with self._cost.stage("service: push, store call"):
            result = await self._store.push(run_id, groups)
        if any(outcome.kind is not ops.PushKind.QUEUED for outcome in result.outcomes):
            raise RuntimeError(f"a group was not queued: {result.outcomes[0]}")
        with self._cost.stage("service: push, answer"):
            for group, outcome in zip(groups, result.outcomes, strict=True):
                group.outcome = outcome
            acks = [convert.to_ack(entry) for entry in groups]
            convert.to_push_response(result.revision, 1, acks, result.published).SerializeToString()

    async def _read(self, run_id: str, batch: Any) -> None:  # noqa: ANN401 - a batch, or what there is instead
        if not isinstance(batch, ops.Batch) or len(batch.shard) != PORTION:
            raise RuntimeError(f"no batch: {batch}")
        with self._cost.stage("service: fetch"):
            bodies = await self._store.fetch(run_id, [group.payload_key for group in batch.shard])
        with self._cost.stage("service: pull, messages"):
            first = batches_pb2.PullBatchResponse(
                revision=batch.revision, batch=convert_batches.to_batch_info(batch, 0)
            ).SerializeToString()
            delivered = [
                codec.Delivered(body or b"", group.sequence, group.head_version, group.tail_version)
                for group, body in zip(batch.shard, bodies, strict=True)
            ]
            message = codec.join_pull(batch.revision, delivered)
        with self._cost.stage("consumer: batch"):
            assembly = PullAssembly(run_id, Revisions(), time.monotonic())
            assembly.add(first)
            assembly.add(message)
            groups = assembly.finish().groups
        with self._cost.stage("consumer: columns"):
            for group in groups:
                len(group.columns)
        with self._cost.stage("consumer: samples, if asked for"):
            for group in groups:
                len(group.samples)

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        self._control.config_resetstat()
        yield
        told = self._control.info("commandstats")
        own = {"cmdstat_info", "cmdstat_config|resetstat", "cmdstat_ping"}
        self._cost.commands[operation] = {
            name.removeprefix("cmdstat_"): (int(its["calls"]), int(its["usec"]))
            for name, its in told.items()
            if name not in own
        }


async def push_singles(store: RedisRunStore, control: "redis.Redis", workers: int) -> tuple[float, float]:
    """Push all groups one by one by so many at once; µs of scripts, and calls of them, a group."""
    run_id = f"singles-{workers}"
    bench = Bench(store, control)
    await store.create_run(run_id, RunPolicy(batch_groups=PORTION, max_queued_groups=GROUPS))
    entries = [entry for message in bench.made(run_id) for entry in bench.checked(message)]
    groups = [entry for entry in entries if isinstance(entry, ops.NewGroup)]

    async def work(first: int) -> None:
        for group in groups[first::workers]:
            await store.push(run_id, [group])

    control.config_resetstat()
    await asyncio.gather(*(work(first) for first in range(workers)))
    told = control.info("commandstats")["cmdstat_evalsha"]
    return told["usec"] / GROUPS, told["calls"] / GROUPS


async def measure(runs: int) -> tuple[list[Cost], dict[int, tuple[float, float]]]:
    """Costs of so many runs, after one that does not count; and of single groups, by the number of workers."""
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-stages-") as scratch:
        embedded = EmbeddedStore(Path(scratch), durability=Durability.MEMORY)
        await embedded.start()
        control = redis.Redis(unix_socket_path=str(embedded.socket_path))
        try:
            store = await RedisRunStore.connect(embedded.url)
            costs = [await Bench(store, control).run(f"stages-{run}") for run in range(runs + 1)]
            singles = {workers: await push_singles(store, control, workers) for workers in WORKERS}
            await store.close()
        finally:
            control.close()
            await embedded.stop()
    return costs[1:], singles


def show(costs: list[Cost], singles: dict[int, tuple[float, float]]) -> None:
    """Print all tables."""
    print(f"CPU µs a group of {SIZE.group_bytes:,} bytes, median of {len(costs)} runs, on {os.cpu_count()} cores")
    for name in costs[0].stages:
        print(f"  {name:42}{median([cost.stages[name] * 1e6 / GROUPS for cost in costs]):>9.1f}")
    print("Store: commands a group, and µs a group of scripts and of commands outside of them")
    for operation in OPERATIONS:
        told = costs[-1].commands[operation]
        inside = ", ".join(
            f"{name} {calls / GROUPS:.2f}" for name, (calls, _) in sorted(told.items(), key=lambda one: -one[1][0])
        )
        total = sum(calls for calls, _ in told.values()) / GROUPS
        script_us = median([cost.commands[operation].get("evalsha", (0, 0))[1] / GROUPS for cost in costs])
        print(f"  {operation:11}{total:>6.2f} commands  {script_us:>6.1f} µs of scripts: {inside}")
    print("Store: single groups pushed by several workers at the same time, µs and calls of scripts a group")
    for workers, (script_us, calls) in singles.items():
        print(f"  {workers:>3} workers  {script_us:>6.1f} µs  {calls:.2f} calls")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default 5)")
    options = parser.parse_args()
    show(*uvloop.run(measure(options.runs)))


if __name__ == "__main__":
    main()
