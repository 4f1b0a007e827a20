"""The quantities that staleness depends on, from what a run counted between two publishes.

R and T are taken from busy time: with backpressure the observed rates of both sides tend to each other, and ρ to 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from buffer_service.domain.ops import RunView
from buffer_service.domain.window import Window
from buffer_service.observability.diagnosis import SILENT_MS
from buffer_service.observability.filters import filters, recent_acceptance
from buffer_wire.estimate import Quantities, Unknown

MIN_PUBLISHES = 4
"""Smallest number of publishes that is a steady state; with fewer there is no prediction and no verdict."""

EDGE = 0.2
"""Tolerance, in batches, when testing whether batches per publish is a whole number.

Batches at the edges of the window can make it miss one by that much.
"""

UNEVEN_BATCHES = "steps take batches of other sizes than batch_groups"

FEW_PUBLISHES = f"fewer than {MIN_PUBLISHES} publishes since the first one of the window"

IN_SERVICE = frozenset({"ready", "loading"})

_ENGINES = ("no_engine", "no_counters", "idle_engines")
_TRAINER = ("no_trainer_times",)
_BATCHES = ("nothing_assembled",)
_LENGTHS = ("nothing_accepted",)
_CLOCK = ("no_time",)

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "concurrency": _ENGINES,
    "rollout_tokens_per_s": _ENGINES,
    "slot_tokens_per_s": _ENGINES,
    "engine_busy_share": (*_ENGINES, *_CLOCK),
    "decoded_tokens_per_s": (*_ENGINES, *_CLOCK),
    "train_tokens_per_s": (*_TRAINER, *_BATCHES),
    "trainer_idle_share": _TRAINER,
    "rho": (*_ENGINES, *_TRAINER, *_BATCHES, "nothing_passes"),
    "mean_length": _LENGTHS,
    "tailness": _LENGTHS,
    "group_size": _LENGTHS,
    "groups_per_batch": _BATCHES,
    "batches_per_publish": _BATCHES,
    "concurrency_ratio": (*_ENGINES, *_LENGTHS, *_BATCHES, "nothing_passes"),
    "queue_factor": _BATCHES,
    "train_period_s": (*_BATCHES, *_CLOCK),
    "publish_period_s": _CLOCK,
    "group_generation_s": ("nothing_leased",),
    "expected_generation_s": (*_ENGINES, *_LENGTHS),
    "trained_tokens_per_s": _CLOCK,
}
"""Keys of missing data, by quantity: without that data the quantity is unknown."""


def quantities(view: RunView) -> tuple[Quantities, tuple[Unknown, ...]]:
    """Quantities of the run that are known, and the reasons why the rest is not."""
    engines = sum(one.state in IN_SERVICE and one.silent_ms < SILENT_MS for one in view.engines)
    known = Quantities(engines=engines, pass_share=recent_acceptance(view) if filters(view.policy) else 1.0)
    if view.window is not None:
        known = _of_trainer(view.window, _of_engines(view.window, known))
        known = _combined(_of_groups(view, view.window, known))
    return known, tuple(_unknown(view.window, known))


def uneven(window: Window, known: Quantities) -> bool:
    """True when batches per publish, counted as batch_groups each, is no whole number: steps have sizes of their own.

    In a short window one batch at an edge is more than EDGE.
    """
    batches = known.batches_per_publish or 0.0
    return batches > 1 and abs(batches - round(batches)) > max(EDGE, 1 / window.publishes)


def _of_engines(window: Window, known: Quantities) -> Quantities:
    """An engine's mean while it decodes, times the engines."""
    tokens, busy_ms = window.grown("decoded_tokens"), window.grown("decode_busy_ms")
    request_ms = window.grown("decode_request_ms")
    if not (tokens and busy_ms and request_ms and known.engines):
        return known
    known = replace(
        known,
        concurrency=known.engines * request_ms / busy_ms,
        rollout_tokens_per_s=known.engines * tokens / busy_ms * 1000,
    )
    if window.seconds:
        known = replace(
            known,
            decoded_tokens_per_s=tokens / window.seconds,
            engine_busy_share=min(1.0, busy_ms / 1000 / (known.engines * window.seconds)),
        )
    return known


def _of_trainer(window: Window, known: Quantities) -> Quantities:
    busy_ms, wait_ms = window.grown("trainer_busy_ms"), window.grown("trainer_wait_ms")
    tokens = window.grown("assembled_response_tokens")
    if window.seconds:
        known = replace(
            known,
            publish_period_s=window.seconds / window.publishes,
            trained_tokens_per_s=tokens / window.seconds,
        )
    if not busy_ms:
        return known
    return replace(
        known,
        trainer_idle_share=wait_ms / (busy_ms + wait_ms),
        train_tokens_per_s=tokens / busy_ms * 1000 if tokens else None,
    )


def _of_groups(view: RunView, window: Window, known: Quantities) -> Quantities:
    policy, assembled = view.policy, window.grown("assembled_groups")
    groups, samples, tokens = (window.grown(f"accepted_{name}") for name in ("groups", "samples", "response_tokens"))
    if groups and samples and tokens:
        mean = tokens / samples
        longest = window.grown("accepted_longest_tokens") / groups
        known = replace(known, mean_length=mean, tailness=max(1.0, longest / mean), group_size=samples / groups)
    leased = window.grown("generated_groups")
    if leased:
        known = replace(known, group_generation_s=window.grown("generation_ms") / leased / 1000)
    if not (assembled and window.grown("assembled_response_tokens")):
        return known
    # A batch of so many tokens has no fixed number of groups: then the declared batches tell it.
    by_tokens = policy.batch_tokens > 0
    batches = policy.batches_per_publish if by_tokens else assembled / (window.publishes * policy.batch_groups)
    groups_per_batch = assembled / (window.publishes * batches)
    cap, room = _room(view)
    return replace(
        known,
        batches_per_publish=batches,
        groups_per_batch=groups_per_batch,
        queue_factor=room / groups_per_batch,
        queue_cap=cap,
        train_period_s=window.seconds / (window.publishes * batches) if window.seconds else None,
    )


def _combined(known: Quantities) -> Quantities:
    """Quantities with those added that combine the trainer's, the engines' and the groups'."""
    rollout, passing, concurrency = known.rollout_tokens_per_s, known.pass_share, known.concurrency
    if rollout and concurrency:
        known = replace(known, slot_tokens_per_s=rollout / concurrency)
        if known.tailness and known.mean_length:
            known = replace(known, expected_generation_s=known.tailness * known.mean_length * concurrency / rollout)
    if rollout and known.train_tokens_per_s and passing:
        known = replace(known, rho=rollout * passing / known.train_tokens_per_s)
    if concurrency and known.groups_per_batch and known.group_size and known.batches_per_publish and passing:
        batch = known.groups_per_batch * known.group_size * known.batches_per_publish
        known = replace(known, concurrency_ratio=concurrency * passing / batch)
    return known


def _room(view: RunView) -> tuple[str, float]:
    """The cap that allows the fewest groups, and how many; caps in tokens and bytes by the mean accepted group."""
    policy, accepted = view.policy, view.groups["accepted"]
    rooms = {"max_queued_groups": float(policy.max_queued_groups)}
    for unit in ("tokens", "bytes"):
        cap, size = getattr(policy, f"max_queued_{unit}"), getattr(accepted, unit)
        if cap and size:
            rooms[f"max_queued_{unit}"] = cap * accepted.groups / size
    return min(rooms.items(), key=lambda room: room[1])


def _unknown(window: Window | None, known: Quantities) -> Iterator[Unknown]:
    """A reason for each quantity that is missing."""
    missing = [name for name in _NEEDS if getattr(known, name) is None]
    if window is None:
        reason = "fewer than 2 publishes since the start, the last resume and the last change of the policy"
        yield from (Unknown(name, reason) for name in missing)
        return
    causes = dict(_causes(window, known))
    for name in missing:
        yield Unknown(name, next(causes[need] for need in _NEEDS[name] if need in causes))


def _causes(window: Window, known: Quantities) -> Iterator[tuple[str, str]]:
    if not known.engines:
        yield "no_engine", "no ready engine is heard of"
    if not window.grown("decode_busy_ms"):
        yield "no_counters", "no worker reports counters of its engines, or none of them decoded anything"
    if not (window.grown("decoded_tokens") and window.grown("decode_request_ms")):
        yield "idle_engines", "no engine decoded a token in the window"
    if not window.grown("trainer_busy_ms"):
        yield "no_trainer_times", "the trainer does not report its times"
    if not all(window.grown(f"accepted_{name}") for name in ("groups", "samples", "response_tokens")):
        yield "nothing_accepted", "no group was accepted in the window"
    if not all(window.grown(f"assembled_{name}") for name in ("groups", "response_tokens")):
        yield "nothing_assembled", "no group was assembled in the window"
    if not window.grown("generated_groups"):
        yield "nothing_leased", "no group of a lease was accepted in the window"
    if not known.pass_share:
        yield "nothing_passes", "no recent group passes the filter"
    if not window.seconds:
        yield "no_time", "the window's publishes came at the same time"
