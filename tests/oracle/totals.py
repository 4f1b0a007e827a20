"""Measures of a run: totals that only grow, and how they were at the last publishes.

Invariants: a total that grows does not by itself change the run for those who watch its revision; the snapshots are of
one policy and one term.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import EngineReport, GroupFacts, TrainerClock
from buffer_service.domain.window import Snapshot, Window, length_buckets, no_staleness, staleness_bucket
from buffer_service.rules.totals import LENGTH_BUCKETS, MOST, OF_ENVIRONMENT, RELOAD_PHASES, TOTALS, WINDOW_VERSIONS
from tests.oracle.records import Group


@dataclass(slots=True)
class Totals:
    """Totals of one run."""

    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    environments: dict[str, dict[str, int]] = field(default_factory=dict)
    by_length: Counter[int] = field(default_factory=Counter)
    """Accepted samples by bucket."""
    by_staleness: dict[str, list[int]] = field(default_factory=no_staleness)
    """Assembled groups, and their tokens, by bucket."""
    engines: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counters that were reported last."""
    reloads: list[int] = field(default_factory=lambda: [0] * (2 * len(RELOAD_PHASES)))
    """Reloads of all engines."""
    engine_reloads: dict[str, Sequence[int]] = field(default_factory=dict)
    """Reloads as reported last."""
    trainer: dict[str, int] | None = None
    """Times that the trainer of this term said last."""
    snapshots: deque[Snapshot] = field(default_factory=lambda: deque(maxlen=WINDOW_VERSIONS + 1))

    # ── groups ──

    def accept(self, facts: GroupFacts, generation_ms: int | None) -> None:
        """A group is accepted; how long ago its lease was given, where that is known."""
        for name, amount in _amounts(facts).items():
            _add(self.sums, f"accepted_{name}", amount)
        environment = self.environments.setdefault(facts.environment, dict.fromkeys(OF_ENVIRONMENT, 0))
        _add(environment, "accepted_response_tokens", facts.response_tokens)
        self.by_length.update(length_buckets(facts.response_lengths))
        if generation_ms is not None:
            _add(self.sums, "generated_groups", 1)
            _add(self.sums, "generation_ms", generation_ms)

    def reward(self, by_milli: int) -> None:
        """The rewards of an accepted group are others now."""
        _add(self.sums, "accepted_reward_milli", by_milli)

    def assemble(self, group: Group, train_version: int) -> None:
        """A group enters a micro-batch."""
        facts = group.facts
        for name, amount in _amounts(facts).items():
            _add(self.sums, f"assembled_{name}", amount)
        staleness = {
            "staleness_sum": max(0, train_version - group.head),
            "pre_queue_staleness_sum": group.tail - group.head,
            "in_queue_staleness_sum": max(0, train_version - group.tail),
            "token_staleness_milli_sum": facts.response_tokens * max(0, MILLI * train_version - group.mean_milli),
        }
        environment = self.environments[facts.environment]
        _add(environment, "assembled_groups", 1)
        _add(environment, "assembled_response_tokens", facts.response_tokens)
        for name, amount in staleness.items():
            _add(self.sums, name, amount)
            _add(environment, name, amount)
        versions = {
            "total": train_version - group.head,
            "pre_queue": group.tail - group.head,
            "in_queue": train_version - group.tail,
        }
        for name, behind in versions.items():
            self._count(name, behind, 1)
        for behind, tokens in group.tokens_behind(train_version):
            self._count("token", behind, tokens)

    def _count(self, name: str, versions: int, amount: int) -> None:
        counts, bucket = self.by_staleness[name], staleness_bucket(versions)
        counts[bucket] = min(MOST, counts[bucket] + amount)

    # ── counters ──

    def engine(self, report: EngineReport) -> None:
        """An engine's counters as of now; what it did before the run heard of it is none of this run's."""
        counters = {
            "decoded_tokens": report.decoded_tokens,
            "decode_busy_ms": report.decode_busy_ms,
            "decode_request_ms": report.decode_request_ms,
        }
        self._grow(self.engines.get(report.engine_id, counters), counters)
        self.engines[report.engine_id] = counters
        if reloads := report.reload_counters:
            self._reload(self.engine_reloads.get(report.engine_id, reloads), reloads)
            self.engine_reloads[report.engine_id] = reloads

    def _reload(self, before: Sequence[int], counters: Sequence[int]) -> None:
        """Count as `_grow` does."""
        is_new = any(now < then for now, then in zip(counters, before, strict=True))
        for place, count in enumerate(counters):
            self.reloads[place] = min(MOST, self.reloads[place] + count - (0 if is_new else before[place]))

    def forget_engine(self, engine_id: str) -> None:
        """It is silent; what it has counted stays."""
        del self.engines[engine_id]
        self.engine_reloads.pop(engine_id, None)

    def trainer_says(self, clock: TrainerClock) -> None:
        """The trainer's time as of now."""
        said = {"trainer_busy_ms": clock.busy_ms, "trainer_wait_ms": clock.wait_ms}
        self._grow(self.trainer, said)
        self.trainer = said

    def _grow(self, before: Mapping[str, int] | None, counters: Mapping[str, int]) -> None:
        """Grow by counters; when one is smaller than it was, whoever counts has begun anew."""
        if before is None or any(counters[name] < before[name] for name in counters):
            before = dict.fromkeys(counters, 0)
        for name, count in counters.items():
            _add(self.sums, name, count - before[name])

    # ── window ──

    def publish(self, now: int, version: int) -> None:
        """A new version is published."""
        self.snapshots.append(Snapshot(now, version, dict(self.sums)))

    @property
    def window(self) -> Window | None:
        """See RunView."""
        kept = self.snapshots
        return Window(kept[0], kept[-1], len(kept) - 1) if len(kept) > 1 else None

    @property
    def response_lengths(self) -> list[int]:
        """See RunView."""
        return [self.by_length[bucket] for bucket in range(LENGTH_BUCKETS)]

    @property
    def staleness_counts(self) -> dict[str, list[int]]:
        """See RunView."""
        return {name: list(counts) for name, counts in self.by_staleness.items()}


def _add(sums: dict[str, int], name: str, by: int) -> None:
    sums[name] = max(-MOST, min(MOST, sums[name] + by))


def _amounts(facts: GroupFacts) -> dict[str, int]:
    return {
        "groups": 1,
        "samples": facts.samples,
        "response_tokens": facts.response_tokens,
        "longest_tokens": facts.max_response_tokens,
        "reward_milli": facts.reward_milli,
        "turns": facts.turns,
        "truncated_samples": facts.truncated_samples,
    }
