"""Stride scheduling: environments take turns in proportion to their shares.

Every environment has a pass; the least pass is next, and a pick moves it on by STRIDE / share (C. A. Waldspurger and
W. E. Weihl, "Stride Scheduling: Deterministic Proportional-Share Resource Management", 1995). An environment that had
nothing for a while starts from the virtual time, so it cannot claim what it did not use.
Invariants: the virtual time never goes back; no pass is more than STRIDE ahead of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

STRIDE = 1 << 20


@dataclass(slots=True)
class Stride:
    """Passes by environment, and the virtual time: the pass of the last pick."""

    virtual: int = 0
    passes: dict[str, int] = field(default_factory=dict)

    def choose(self, environments: Iterable[str]) -> str | None:
        """The environment with the least pass; ties by the bytes of its name. None of none."""
        return min(environments, key=lambda name: (self._pass(name), name.encode()), default=None)

    def take(self, environment: str, share: int) -> None:
        """The environment was picked, with that share (>= 1)."""
        self.virtual = self._pass(environment)
        self.passes[environment] = self.virtual + STRIDE // share

    def reset(self) -> None:
        """Nobody is ahead of anybody."""
        self.virtual = 0
        self.passes.clear()

    def copy(self) -> "Stride":
        """A state of its own, for picks that may not be kept."""
        return Stride(self.virtual, dict(self.passes))

    def _pass(self, environment: str) -> int:
        return max(self.passes.get(environment, 0), self.virtual)
