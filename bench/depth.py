"""`make bench-depth`: what a push and a pull of 20 KB groups cost with 1,000 and with 1,000,000 groups queued.

For every order of the queue a store of its own is filled with small groups. (The index does not see a payload's size,
and a million of 20 KB do not fit into memory.) Then, at both depths, batches of 20 KB groups are pushed and as many
groups pulled, committed and freed, so that the depth stays. That is done both ways: relayed, with the payloads in the
pushes and read for the pulls, and directly, with keys alone; clients write and read what lies under these, at a cost
that knows no depth and is not counted. Cost is CPU of the store and of its client, without gRPC, which would dilute the
ratio. Script times are the server's own (SLOWLOG): wall time, so whoever else gets the core is
in them. Calls that took less than 0.2 ms are counted and stand for 0.2 ms: a threshold of 0 would also log every
command inside of a script, a seventh of a push's time. As a control a script that only counts, for about 2 ms, runs as
often as batches are pulled: what the machine does to it, it does to the others.

With `lifo` the pulled groups are the 20 KB ones; with the other orders they are the oldest, small ones, at both depths
alike.
"""

import argparse
import json
import os
import platform
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis
import uvloop

from bench.measure import cpu_s, median
from buffer_service import commands
from buffer_service.domain import ops
from buffer_service.domain.policy import EnvironmentRule, Order, OverflowAction, RunPolicy
from buffer_service.settings import Durability
from buffer_service.store.embedded.server import EmbeddedStore
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.payloads.keys import new_nonce, payload_key

SHALLOW, DEEP = 1_000, 1_000_000
BATCH = 256
GROUP_BYTES, FILLER_BYTES = 20_000, 64
FILL_CALL, PUSH_CALL = 64, 50
"""Groups of a store call; 50 of 20 KB are a bundle of 1 MB."""
SLOW_US = 5_000
SEEN_US = 200
"""Time of a call from which on SLOWLOG keeps it."""
CONTROL = "local x = 0 for i = 1, tonumber(ARGV[1]) do x = x + i end return x"
CONTROL_US = 2_000
ENVIRONMENTS = 8
WAYS = ("relayed", "direct")
UNPUSHED_S = 600
"""Time after which a payload that no push has named expires."""
_RESULTS = Path(__file__).parent / "results" / "depth.json"

_LENGTHS, _REWARDS = struct.pack("<8I", *[270] * 8), struct.pack("<8f", *[1.0] * 8)

CASES: dict[str, RunPolicy] = {
    order.value: RunPolicy(
        batch_groups=BATCH,
        max_queued_groups=2 * DEEP,
        max_queued_bytes=1 << 40,
        overflow_action=OverflowAction.BLOCK,
        max_staleness=1_000,
        order=order,
    )
    for order in Order
}
CASES["shares of 8 environments"] = replace(
    CASES["fifo"],
    environments=tuple(EnvironmentRule(environment=f"env{i}", share=1 + i) for i in range(ENVIRONMENTS)),
)


@dataclass(slots=True)
class Deep:
    """One run at a depth, and the pids whose CPU counts."""

    store: RedisRunStore
    run_id: str
    store_pid: int
    environments: int
    pushed: int = 0
    step: int = 0

    def _group(self, body: bytes, nonce: bytes) -> ops.NewGroup:
        """A group of this body, which is written under a key already where it has a nonce."""
        number = self.pushed
        self.pushed += 1
        version = ops.WeightVersion(1, 0)
        facts = ops.GroupFacts(
            task_id=f"t{number}",
            incarnation=0,
            lease_id="",
            environment=f"env{number % self.environments}",
            samples=8,
            tokens=2_200,
            loss_tokens=2_000,
            size_bytes=len(body),
            head=version,
            tail=version,
            spans_versions=False,
            mean_milli=0,
            equal_rewards=False,
            mean_reward_milli=1_000,
            response_lengths=_LENGTHS,
            rewards=_REWARDS,
            min_response_tokens=270,
            max_response_tokens=270,
            response_tokens=8 * 270,
            reward_milli=8_000,
            turns=8,
            truncated_samples=1,
        )
        return ops.NewGroup(facts, b"" if nonce else body, nonce=nonce)

    def write(self, client: "redis.Redis", count: int, body: bytes) -> list[bytes]:
        """Write `count` payloads of this body, as a worker does; their nonces."""
        nonces = [new_nonce() for _ in range(count)]
        with client.pipeline(transaction=False) as pipeline:
            for nonce in nonces:
                pipeline.set(payload_key(self.run_id, nonce, 0, len(body)), body, nx=True, ex=UNPUSHED_S)
            pipeline.execute()
        return nonces

    async def push(self, nonces: Sequence[bytes], body: bytes, call: int) -> None:
        """Push a group of this body for each nonce; those that are empty have no payload in the store yet."""
        for first in range(0, len(nonces), call):
            groups = [self._group(body, nonce) for nonce in nonces[first : first + call]]
            result = await self.store.push(self.run_id, groups)
            if any(outcome.kind is not ops.PushKind.QUEUED for outcome in result.outcomes):
                raise RuntimeError(f"a group was not queued: {result.outcomes[0]}")

    async def fill(self, depth: int) -> None:
        """Queue small groups up to a depth."""
        body = os.urandom(FILLER_BYTES)
        part = max(FILL_CALL, depth // 20)
        while self.pushed < depth:
            await self.push([b""] * min(part, depth - self.pushed), body, FILL_CALL)
            if sys.stderr.isatty():
                print(f"\r    filled {self.pushed:,}", end="\r", file=sys.stderr, flush=True)

    async def turn(self, body: bytes, nonces: Sequence[bytes]) -> None:
        """Push a batch, pull a batch, commit and free it. With nonces payloads are neither pushed nor read."""
        await self.push(nonces or [b""] * BATCH, body, PUSH_CALL)
        result = await self.store.call(commands.pull(self.run_id, ops.Pull(1, self.step, 0, 1, None)))
        if not isinstance(result, ops.Batch) or len(result.shard) != BATCH:
            raise RuntimeError(f"no batch: {result}")
        if not nonces:
            await self.store.fetch(self.run_id, [group.payload_key for group in result.shard])
        await self.store.call(commands.commit(self.run_id, 1, self.step))
        await self.store.call(commands.checkpoint(self.run_id, 1, self.step))
        self.step += 1

    def cpu(self) -> float:
        """CPU seconds so far, of the store and of this process."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return cpu_s([self.store_pid]) + own.ru_utime + own.ru_stime


@dataclass(slots=True)
class Costs:
    """Costs of one way at one depth, a number for each run, and the times of all its scripts."""

    cpu_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    scripts_us: list[int] = field(default_factory=list)


async def measure(name: str, policy: RunPolicy, turns: int, runs: int) -> dict[str, Any]:
    """One order at both depths, both ways: µs of CPU a group, their ratio, and the longest scripts."""
    sides: list[Deep] = []
    costs = {way: [Costs(), Costs()] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-depth-") as scratch:
        embedded = EmbeddedStore(Path(scratch), durability=Durability.MEMORY)
        await embedded.start()
        control = redis.Redis(unix_socket_path=str(embedded.socket_path))
        try:
            store = await RedisRunStore.connect(embedded.url)
            environments = ENVIRONMENTS if policy.environments else 1
            for depth in (SHALLOW, DEEP):
                side = Deep(store, f"depth-{depth}", embedded.pid or 0, environments)
                await store.create_run(side.run_id, policy)
                await side.fill(depth)
                sides.append(side)
            control.config_set("slowlog-log-slower-than", SEEN_US)
            control.config_set("slowlog-max-len", 100_000)
            counts, control_us = _calibrate(control), list[int]()
            for run in range(runs + 1):
                # The ways and depths in turn: the machine's noise falls on all.
                for way, its in costs.items():
                    for side, cost in zip(sides, its, strict=True):
                        await _turns(side, way, turns, control, cost if run else Costs())
                        control_us += _control_us(control, counts, turns) if run else []
            await store.close()
        finally:
            control.close()
            await embedded.stop()
    rows = {way: _row(name if way == WAYS[0] else "", way, its, control_us) for way, its in costs.items()}
    return {**rows, "control_script_us": _spread(control_us)}


async def _turns(side: Deep, way: str, turns: int, control: "redis.Redis", cost: Costs) -> None:
    body = os.urandom(GROUP_BYTES)
    nonces = [side.write(control, BATCH, body) if way == "direct" else [] for _ in range(turns)]
    control.slowlog_reset()
    calls = _script_calls(control)
    cpu, began = side.cpu(), time.perf_counter()
    for its in nonces:
        await side.turn(body, its)
    wall, cpu = time.perf_counter() - began, side.cpu() - cpu
    cost.cpu_us.append(cpu * 1e6 / (turns * BATCH))
    cost.wall_us.append(wall * 1e6 / (turns * BATCH))
    cost.scripts_us += _script_us(control, _script_calls(control) - calls)


def _row(name: str, way: str, costs: Sequence[Costs], control_us: list[int]) -> dict[str, Any]:
    """Figures of one way; printed too."""
    shallow, deep = costs
    row: dict[str, Any] = {
        "cpu_ratio": median([b / a for a, b in zip(shallow.cpu_us, deep.cpu_us, strict=True)]),
        "wall_ratio": median([b / a for a, b in zip(shallow.wall_us, deep.wall_us, strict=True)]),
        "cpu_us_per_group": {"1,000": median(shallow.cpu_us), "1,000,000": median(deep.cpu_us)},
        "script_us": {"1,000": _spread(shallow.scripts_us), "1,000,000": _spread(deep.scripts_us)},
    }
    cpu_text = f"{row['cpu_us_per_group']['1,000']:>8} {row['cpu_us_per_group']['1,000,000']:>10}"
    print(
        f"{name:26}{way:9}{cpu_text}{row['cpu_ratio']:>8}{row['wall_ratio']:>7}   "
        + "   ".join(map(_told, (*row["script_us"].values(), _spread(control_us)))),
        flush=True,
    )
    return row


def _script_calls(control: "redis.Redis") -> int:
    return int(control.info("commandstats")["cmdstat_evalsha"]["calls"])


def _script_us(control: "redis.Redis", calls: int) -> list[int]:
    """Times of the last `calls` scripts."""
    seen = _durations(control, b"EVALSHA ")
    return [SEEN_US] * (calls - len(seen)) + seen


def _durations(control: "redis.Redis", command: bytes) -> list[int]:
    return [int(entry["duration"]) for entry in control.slowlog_get(100_000) if entry["command"].startswith(command)]


def _calibrate(control: "redis.Redis") -> int:
    """Number to which the control script has to count for CONTROL_US."""
    control.slowlog_reset()
    for _ in range(20):
        control.eval(CONTROL, 0, "100000")
    took = sorted(_durations(control, b"EVAL "))
    return 100_000 * CONTROL_US // max(1, took[len(took) // 2])


def _control_us(control: "redis.Redis", counts: int, times: int) -> list[int]:
    control.slowlog_reset()
    for _ in range(times):
        control.eval(CONTROL, 0, str(counts))
    return _durations(control, b"EVAL ")


def _spread(took_us: list[int]) -> dict[str, int]:
    ordered = sorted(took_us)
    return {
        "calls": len(ordered),
        "median": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "longest": ordered[-1],
        "over_5_ms": sum(us > SLOW_US for us in ordered),
    }


def _told(spread: dict[str, int]) -> str:
    over = f"{spread['over_5_ms']}/{spread['calls']}"
    return f"{spread['median']:>5}{spread['p99']:>6}{spread['longest']:>6} {over:>7}"


def main() -> None:
    """Measure every order, print a table, write bench/results/depth.json; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.depth", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="counted runs at each depth (default 5)")
    parser.add_argument(
        "--turns", type=int, default=10, help=f"batches of {BATCH} pushed and pulled in a run (default 10)"
    )
    parser.add_argument("--case", choices=list(CASES), action="append", help="only these orders; repeatable")
    parser.add_argument("--out", type=Path, help="default: bench/results/depth.json; with --case, none")
    options = parser.parse_args()
    print(
        f"{'':35}{'CPU µs a group':>18}{'ratio':>8}{'wall':>7}   scripts, µs: median, 99%, longest, over 5 ms\n"
        f"{'order':26}{'way':9}{'at 1,000':>8}{'1,000,000':>11}{'':>15}   "
        f"{'at 1,000':24}   {'at 1,000,000':24}   control",
        flush=True,
    )

    async def measure_all() -> dict[str, Any]:
        return {name: await measure(name, CASES[name], options.turns, options.runs) for name in options.case or CASES}

    results = uvloop.run(measure_all())
    report = {
        "goal": {"cpu_ratio": 1.5, "longest_script_us": SLOW_US},
        "orders": results,
        "batch_groups": BATCH,
        "group_bytes": GROUP_BYTES,
        "runs": options.runs,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    out = options.out or (None if options.case else _RESULTS)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nwritten to {out}")
    missed = [
        f"{name}, {way}"
        for name, ways in results.items()
        for way, row in ((way, ways[way]) for way in WAYS)
        if row["cpu_ratio"] > 1.5 or any(part["over_5_ms"] for part in row["script_us"].values())
    ]
    if missed:
        sys.exit(f"goal missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
