"""The weights of one simulated engine: how new ones get in, and which it holds. There is no model: time passes, and a
label changes.

Invariant: weights that were refused leave the label as it was.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from rollout_workers.engine.errors import EngineLoadFailed
from rollout_workers.engine.simulated.clock import Clock
from rollout_workers.engine.types import ProcessGroup


class SimulatedWeights:
    """Weights that one simulated engine holds.

    `reach` returns if the engine answers calls, and raises otherwise; `at_rest` waits until it generates nothing.
    """

    def __init__(
        self,
        address: str,
        clock: Clock,
        *,
        label: str,
        load_s: float,
        reach: Callable[[str], Awaitable[None]],
        at_rest: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._address = address
        self._clock = clock
        self._first_label = label
        self._load_s = load_s
        self._reach = reach
        self._at_rest = at_rest
        self._group_name = ""  # empty: a member of none
        self._loads_to_fail = 0
        self._joins_to_fail = 0
        self.label = label
        """Label of the weights that the engine generates with."""
        self.adapter = ""
        """Label of the adapter under which new requests run; empty: none."""

    @property
    def in_force(self) -> str:
        """Label of what new requests run under."""
        return self.adapter or self.label

    async def load_adapter(self, source: str, version_label: str) -> None:
        """Load the adapter that `source` stands for, while requests run."""
        await self._reach(f"loading {version_label}")
        await self._clock.sleep(self._load_s)
        await self._reach(f"loading {version_label}")
        self._may_fail(source, version_label)
        self.adapter = version_label

    async def load(self, source: str, version_label: str) -> None:
        """Load what `source` stands for."""
        await self._reach(f"loading {version_label}")
        async with self._at_rest():
            await self._clock.sleep(self._load_s)
            await self._reach(f"loading {version_label}")
            self._may_fail(source, version_label)
            self.label, self.adapter = version_label, ""

    def _may_fail(self, source: str, version_label: str) -> None:
        if self._loads_to_fail:
            self._loads_to_fail -= 1
            raise self._injected(source, version_label)

    # --- through a process group ------------------------------------------------------------------------------

    async def join_group(self, process_group: ProcessGroup, *, deadline_s: float) -> None:
        """See Engine. Nobody is met: the group comes about, or fails as it was told to."""
        await self._reach(f"joining process group {process_group.group_name}")
        await self._clock.sleep(min(self._load_s, deadline_s))
        if self._joins_to_fail:
            self._joins_to_fail -= 1
            raise self._injected(f"process group {process_group.group_name}", "to come")
        self._group_name = process_group.group_name

    async def leave_group(self, group_name: str) -> None:
        await self._reach(f"leaving process group {group_name}")
        if group_name == self._group_name:
            self._group_name = ""

    async def receive(self, group_name: str, version_label: str) -> None:
        """See Engine. Nothing is received."""
        source = f"process group {group_name}"
        if group_name != self._group_name:
            cause = f"it is no member of it, but of {self._group_name!r}"
            raise EngineLoadFailed(self._address, source, version_label, cause=cause, weights="kept")
        await self.load(source, version_label)

    # --- faults -----------------------------------------------------------------------------------------------

    def fail_next_loads(self, count: int) -> None:
        """Refuse the next `count` loads, with the old weights kept."""
        self._loads_to_fail = count

    def fail_next_joins(self, count: int) -> None:
        """Let the next `count` process groups fail to come about."""
        self._joins_to_fail = count

    def start_anew(self) -> None:
        """Hold what a fresh process would: the weights of the start, and no process group."""
        self.label, self.adapter = self._first_label, ""
        self._group_name = ""

    def _injected(self, source: str, version_label: str) -> EngineLoadFailed:
        cause = "a fault was injected"
        return EngineLoadFailed(self._address, source, version_label, cause=cause, weights="kept")
