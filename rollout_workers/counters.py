"""Counters of a worker since its start: every part adds to them, and the progress line reads them."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

BUNDLE_BOUNDS = (*(4.0**power * 1024 for power in range(8)), float("inf"))
"""Bounds of the sizes of push bundles, in bytes: 1 KiB to 16 MiB."""


@dataclass(slots=True)
class Counters:
    """Sums since the start. Only the event loop's thread writes."""

    pushed: Counter[str] = field(default_factory=Counter)
    """Answers to pushes: queued, duplicate, closed, filtered, invalid, refused, and for each attempt rejected_full and
    payload_missing."""
    pushed_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of groups with a final answer, by the way of their payloads: direct, relayed."""
    bundles: Counter[float] = field(default_factory=Counter)
    """Push bundles that were sent, by the least of BUNDLE_BOUNDS that holds them."""
    bundled_bytes: int = 0
    returned: Counter[str] = field(default_factory=Counter)
    """Leases handed back by kind: interrupted, failed."""
    samples: int = 0
    """Samples generated to the end."""
    samples_again: int = 0
    """Samples that failed and were tried again, alone."""
    infrastructure_errors: Counter[str] = field(default_factory=Counter)
    """Attempts of samples that failed in generation or reward, by environment; never trained."""
    policy_errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Samples whose function named what is wrong with the answer, by environment and that name; trained."""
    surplus_samples: int = 0
    """Samples beyond their group's size that were cut off when it was complete."""
    samples_moved: int = 0
    """Samples that began or went on at another engine than their lease's, which could end them sooner."""
    tokens: int = 0
    """Tokens received from engines, those of interrupted samples included."""
    tokens_cached: int = 0
    """Input tokens that engines took from their prefix caches, as far as they say so."""
    tokens_resumed: int = 0
    """Generated tokens that came with the partial rollouts of leases."""
    tokens_pushed: int = 0
    """Generated tokens of groups with a final answer that was no refusal."""
    tokens_returned: int = 0
    """Generated tokens of partial rollouts that the service took back."""
    tokens_discarded: Counter[str] = field(default_factory=Counter)
    """Generated tokens that nobody will train on, by reason. When no work is open, tokens + tokens_resumed =
    tokens_pushed + tokens_returned + the sum of these."""
    leases: int = 0
    leases_lost: int = 0
    """Leases that ended under work on them: expired, released, or with another's result."""
    leases_cancelled: int = 0
    """Leases taken back because their group could no longer be fresh."""
    partial_rollouts: int = 0
    """Leases that came with the work of an earlier attempt."""
    rewarded: int = 0
    """Times that the rewards of a group were asked for."""
    reward_s: float = 0.0
    """Time spent in reward functions, summed over groups."""
    last_error: str = ""
    last_error_at: float = 0.0
    """Time of the last error, on the monotonic clock."""

    def token_account(self) -> dict[str, object]:
        """Account of every token received, by field name, for a line of the log."""
        return {
            "tokens": self.tokens,
            "tokens_resumed": self.tokens_resumed,
            "tokens_pushed": self.tokens_pushed,
            "tokens_returned": self.tokens_returned,
            "tokens_discarded": dict(self.tokens_discarded),
        }

    def bundled(self, size: int) -> None:
        """Count a push bundle of so many bytes."""
        self.bundles[next(bound for bound in BUNDLE_BOUNDS if size <= bound)] += 1
        self.bundled_bytes += size

    def failed_samples(self, environment: str, attempts: int) -> None:
        """Count failed attempts of samples."""
        if attempts:
            self.infrastructure_errors[environment] += attempts

    def named_failures(self, environment: str, names: Iterable[str]) -> None:
        """Count the names of what is wrong with a group's samples; empty ones are none."""
        for name in names:
            if name:
                self.policy_errors[environment, name] += 1

    def failed(self, error: BaseException) -> str:
        """Note an error; returns its text, at most 2,048 characters."""
        self.last_error = describe(error)
        self.last_error_at = time.monotonic()
        return self.last_error


def describe(error: BaseException) -> str:
    """The error in one line, with its class where it is not one of ours, at most 2,048 characters."""
    text = str(error) or type(error).__name__
    if not hasattr(error, "reason"):
        text = f"{type(error).__name__}: {text}"
    return text[:2_048]
