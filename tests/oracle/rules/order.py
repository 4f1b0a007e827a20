"""Order and mixture: which environment comes next, and which of its things.

An environment's rule may give it a share and a priority. Shares are in force as soon as any rule has one; an
environment without a share then has 1, and share 0 means: only when no other environment has anything.
Invariant: everything here follows from the policy alone, so a change of policy takes effect with the next pick.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from buffer_service.domain.policy import UNSET, Order, RunPolicy
from tests.oracle.rules.stride import Stride

DEFAULT_SHARE = 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """Rules of a policy for environments, ready to be looked up."""

    order: Order
    shares: dict[str, int]
    """Shares of the environments whose rule sets one."""
    priorities: dict[str, int]
    """Priorities of the environments whose rule sets one."""

    @classmethod
    def of(cls, policy: RunPolicy) -> "Mixture":
        """The mixture of a policy."""
        return cls(
            policy.order,
            {rule.environment: rule.share for rule in policy.environments if rule.share != UNSET},
            {rule.environment: rule.priority for rule in policy.environments if rule.priority != UNSET},
        )

    @property
    def has_shares(self) -> bool:
        """Tell whether work is divided by shares at all."""
        return bool(self.shares)

    def share(self, environment: str) -> int:
        """Weight of an environment while shares are in force."""
        return self.shares.get(environment, DEFAULT_SHARE)

    def priority(self, environment: str, own: int) -> int:
        """The priority that counts between environments, for a thing with that priority of its own."""
        return self.priorities.get(environment, own)

    def turn(self, environments: Iterable[str], stride: Stride) -> str | None:
        """Tell whose turn it is by shares; None when only environments of share 0 have something, or no
        shares are set.
        """
        if not self.has_shares:
            return None
        return stride.choose(name for name in environments if self.share(name) > 0)
