"""One choice of each option, and the policy, the trainer and the environments that come of it."""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from buffer_service.domain.policy import UNSET, RunPolicy, StaleAction
from tests.liveness import options
from tests.liveness.options import N
from tests.liveness.simulation import Habits

PLAIN = {
    "shape": "whole",
    "queue": "as small as may be",
    "pace": "1 per publish",
    "quota": "no quota",
    "mixture": "one environment",
    "attempts": "3 attempts",
    "trainer": "commits with the publish",
}

SAMPLED: dict[str, list[str]] = {
    "shape": list(options.SHAPES),
    "queue": list(options.QUEUES),
    "pace": list(options.PACES),
    "quota": list(options.QUOTAS),
    "mixture": list(options.MIXTURES),
    "attempts": list(options.ATTEMPTS),
    "trainer": list(options.TRAINERS),
}


class Decks:
    """Draws one of every other option, each as often as any."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._decks: dict[str, list[str]] = {kind: [] for kind in SAMPLED}

    def draw(self) -> dict[str, str]:
        """Draw one of each kind."""
        for kind, deck in self._decks.items():
            if not deck:
                deck.extend(self._chance.sample(SAMPLED[kind], len(SAMPLED[kind])))
        return {kind: deck.pop() for kind, deck in self._decks.items()}


@dataclass(frozen=True)
class Pairing:
    """Names of options by what they are options of."""

    admission: str
    overflow: str
    gate: str
    filter: str
    others: tuple[tuple[str, str], ...]

    @classmethod
    def plain(cls, admission: str, overflow: str, gate: str, filter_: str) -> "Pairing":
        """Make one with nothing out of the ordinary besides."""
        return cls(admission, overflow, gate, filter_, tuple(PLAIN.items()))

    def with_others(self, others: Mapping[str, str]) -> "Pairing":
        """Make the same with these other options."""
        return dataclasses.replace(self, others=tuple(others.items()))

    @property
    def environments(self) -> tuple[str, ...]:
        """Environments of its tasks."""
        return options.MIXTURES[dict(self.others)["mixture"]][1]

    @property
    def habits(self) -> Habits:
        """Habits of its trainer."""
        chosen = dict(self.others)
        trainer = options.TRAINERS[chosen["trainer"]]
        return dataclasses.replace(
            options.SHAPES[chosen["shape"]][1],
            publishing=trainer.publishing,
            crashes=trainer.crashes,
            gives_back=trainer.gives_back,
        )

    def policy(self) -> RunPolicy:
        """Raises InvalidPolicy, InvalidField."""
        chosen = dict(self.others)
        values: dict[str, Any] = {"batch_groups": N, "lease_ttl_ms": 1_000, "retry_backoff_ms": 50}
        for fields in (
            options.ADMISSIONS[self.admission],
            options.OVERFLOWS[self.overflow],
            options.GATES[self.gate],
            options.FILTERS[self.filter],
            options.SHAPES[chosen["shape"]][0],
            options.QUEUES[chosen["queue"]],
            options.PACES[chosen["pace"]],
            options.QUOTAS[chosen["quota"]],
            options.MIXTURES[chosen["mixture"]][0],
            options.ATTEMPTS[chosen["attempts"]],
        ):
            values |= fields
        return RunPolicy(**self._exact(values))

    def _exact(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what is said relative to the least that is not refused."""
        prefetch, per_publish = values.get("prefetch_batches", 0), values.get("batches_per_publish", 1)
        if values.get("max_staleness", UNSET) != UNSET:
            values["max_staleness"] += (prefetch + per_publish - 1) // per_publish
            if not values["max_staleness"]:
                # A target is above 0.
                values.pop("target_staleness_milli", None)
        n, micro = values["batch_groups"], values.get("micro_batch_groups", 0)
        values["max_queued_groups"] += micro * self.habits.world_size or n
        if values.get("stale_action") is StaleAction.WAIT:
            values |= _with_turns_in_time(values)
        if values.get("stale_action") is StaleAction.WAIT:
            values.pop("stages", None)
        if values.get("order_window_groups"):
            values |= _with_room_for_what_is_admitted(values)
        queues = (prefetch + per_publish + 1) * (-(-n // micro) if micro else 1)
        if "quota_groups" in values:
            values["quota_groups"] += (prefetch + per_publish + 1) * n
            if values.get("order_window_groups"):
                values["quota_groups"] += values["max_queued_groups"]
        if "quota_tokens" in values:
            values["quota_tokens"] += queues * values["max_queued_tokens"]
        if "quota_bytes" in values:
            values["quota_bytes"] += queues * values["max_queued_bytes"]
        return values


def _with_turns_in_time(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what waiting for groups in flight needs beside a gate."""
    ahead = min(values.get("max_lookahead", values["max_staleness"]), values["max_staleness"])
    admitted = (ahead + 1) * values.get("batches_per_publish", 1) * values["batch_groups"]
    room = max(values["max_queued_groups"], admitted)
    return {"max_lookahead": ahead, "max_queued_groups": room, "batch_tokens": 0}


def _with_room_for_what_is_admitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a window needs beside its order."""
    if values.get("reserve_queue_space"):
        return {"batch_tokens": 0}
    prefetch, per_publish = values.get("prefetch_batches", 0), values.get("batches_per_publish", 1)
    ahead = values.get("max_lookahead", (prefetch + per_publish - 1) // per_publish)
    admitted = (ahead + 1) * per_publish * values["batch_groups"]
    return {
        "max_lookahead": ahead,
        "max_queued_groups": max(values["max_queued_groups"], admitted),
        "batch_tokens": 0,
    }
