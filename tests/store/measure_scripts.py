"""Cost of a group on the store: microseconds of the server's CPU and of this process, for each operation.

usage: python -m tests.store.measure_scripts [SIZE_BYTES BUNDLE BATCHES]
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable
from typing import TypeVar

import uvloop

from buffer_service.domain import ops
from buffer_service.store.redis_store import RedisRunStore
from tests.store.driver import Run
from tests.support.store_server import store_server

T = TypeVar("T")


class Costs:
    """Sums by operation: server time inside commands (its own account), CPU time of this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.server_us: defaultdict[str, float] = defaultdict(float)
        self.client_us: defaultdict[str, float] = defaultdict(float)

    async def of(self, name: str, operation: Awaitable[T]) -> T:
        await self._run.command("CONFIG", "RESETSTAT")
        began = time.process_time()
        result = await operation
        self.client_us[name] += (time.process_time() - began) * 1e6
        self.server_us[name] += await self._server_us()
        return result

    async def _server_us(self) -> float:
        """EXEC's time holds that of its commands, a script's that of what it calls."""
        own = {"exec", "evalsha", "mget", "unlink", "srandmember", "srem"}
        times = {}
        for line in (await self._run.command("INFO", "commandstats")).decode().splitlines():
            if line.startswith("cmdstat_"):
                name, _, fields = line.removeprefix("cmdstat_").partition(":")
                times[name] = float(fields.split("usec=")[1].split(",")[0])
        if "exec" in times:
            return times["exec"]
        if "evalsha" in times:
            own -= {"srem", "srandmember"}
        return sum(times.get(name, 0.0) for name in own)


async def main(size: int, bundle: int, batches: int) -> None:
    body = os.urandom(size)
    with store_server() as server:
        store = await RedisRunStore.connect(server.url)
        run = Run(store)
        await run.create(batch_groups=bundle, max_pending_tasks=1_000_000)
        costs = Costs(run)
        for step in range(batches):
            await costs.of("submit", run.submit(*[""] * bundle))
            leased = await costs.of("lease", run.lease(bundle))
            await costs.of("push", run.push(*(run.group(grant, body) for grant in leased.grants)))
            batch = await costs.of("pull", run.pull(step))
            assert isinstance(batch, ops.Batch)
            await costs.of("fetch", run.bodies(batch))
            await costs.of("publish", run.publish(step + 1, commit_through=step))
            await costs.of("checkpoint", run.checkpoint(step))
            await costs.of("delete", store._calls.delete_trash(run.run_id))
        await store.close()
    groups = bundle * batches
    print(f"{server.binary}: {groups} groups of {size} bytes, {bundle} in a bundle and a batch")
    print(f"{'microseconds per group':24}{'server':>8}{'client':>8}")
    for name, server_us in costs.server_us.items():
        print(f"{name:24}{server_us / groups:8.1f}{costs.client_us[name] / groups:8.1f}")
    print(f"{'sum':24}{sum(costs.server_us.values()) / groups:8.1f}{sum(costs.client_us.values()) / groups:8.1f}")


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    uvloop.run(main(*(given or [20_000, 50, 40])))
