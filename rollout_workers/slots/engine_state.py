"""State table of an engine: its states, the events that move it, and the state that is reported to the service.

An engine's state has six regions that move independently. An engine can be quarantined while it still loads, or be lost
while it waits for a plan. A row of the table says what one event does to the regions. Regions that a row does not name
stay as they are: an event that comes late, as when an engine was lost meanwhile, changes nothing that it should not.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypedDict, Unpack

from rollout_buffer.v1 import weights_pb2
from rollout_workers.versions import BASE, Version

Reported = weights_pb2.EngineState


class Link(enum.Enum):
    """Reachability of the engine, as the guard finds out."""

    ANSWERS = enum.auto()
    SUSPECT = enum.auto()
    """Suspect after an error that may mean that it is gone: no new work until the guard has heard from it."""
    LOST = enum.auto()


class Weights(enum.Enum):
    """Weights of the engine: where they came from, and whether they are known to be a published version."""

    OWN = enum.auto()
    """Weights it started with; no published version is known to be these."""
    BASE = enum.auto()
    """Weights it started with, which were published as version 0."""
    OTHER = enum.auto()
    """Weights that somebody has written; they are not, or not any more, known to be published."""
    ADAPTED = enum.auto()
    """Adapter of a published version, on the weights it started with."""
    PUBLISHED = enum.auto()
    """Weights of a published version; with Pause.SPOILED: those before a load that failed."""


class Pause(enum.Enum):
    """Pause of the engine's generation."""

    RUNS = enum.auto()
    PAUSED = enum.auto()
    """Paused: from before the call that pauses it until after the call that resumes it."""
    SPOILED = enum.auto()
    """Paused because what it holds cannot be trusted."""


class Supply(enum.Enum):
    """Supply of published weights to the engine: open, or by nothing but the next collective update."""

    OPEN = enum.auto()
    BROADCAST_ONLY = enum.auto()


class Trust(enum.Enum):
    """Trust in the engine: lost when it did not take new weights in time, regained when it takes them or answers."""

    TRUSTED = enum.auto()
    QUARANTINED = enum.auto()


class Fitness(enum.Enum):
    """Fitness of the engine for what the run asks for."""

    FIT = enum.auto()
    UNFIT = enum.auto()
    """Unfit until it is started anew."""
    STOPPED = enum.auto()
    """Released by its worker."""


class Event(enum.Enum):
    """Event in the life of an engine."""

    CONNECTED_OWN = "connected (anew), with a label of its own"
    CONNECTED_OTHER = "connected (anew), with a label that a worker gave"
    SUSPECTED = "a call failed as if it were gone"
    ANSWERED = "the guard has heard from it"
    LOST = "it does not answer, or was started anew"
    BACK = "reached again"
    PAUSING = "about to be paused for new weights"
    RESUMED = "the exchange of weights has ended, and with whole weights the pause"
    SPOILED = "may hold a mixture of weights"
    WHOLE = "holds weights that it confirms"
    OVERWRITTEN = "has other weights than those it started with"
    ADOPTED = "holds the published version"
    ADAPTED = "new requests run under a published adapter"
    BARE = "new requests run under the weights it started with alone"
    DISOWNED = "holds weights that were received and are not published"
    BROADCAST_ONLY = "published weights come without files"
    SUPPLIED = "published weights are to be had"
    QUARANTINED = "did not take new weights in time"
    REJOINED = "took new weights, or answers with none to take"
    UNFIT = "every task like the present one would fail"
    STOPPED = "let go by its worker"
    JOINED = "is a member of a process group"
    LEFT = "is in no process group"
    PREPARED = "paused, and ready to receive"
    PLAN_ENDED = "its part in a plan has ended"


_L, _W, _P, _S, _T, _F = Link, Weights, Pause, Supply, Trust, Fitness
_WRITTEN: Mapping[enum.Enum, enum.Enum] = {
    _W.OWN: _W.OTHER,
    _W.BASE: _W.PUBLISHED,
    _W.ADAPTED: _W.PUBLISHED,
}
_UNSEEN: Mapping[enum.Enum, enum.Enum] = {
    _W.BASE: _W.OWN,
    _W.ADAPTED: _W.OWN,
    _W.PUBLISHED: _W.OTHER,
}

TRANSITIONS: Mapping[Event, Mapping[enum.Enum, enum.Enum]] = {
    Event.CONNECTED_OWN: {**dict.fromkeys(_W, _W.OWN), _F.UNFIT: _F.FIT},
    Event.CONNECTED_OTHER: {**dict.fromkeys(_W, _W.OTHER), _F.UNFIT: _F.FIT},
    Event.SUSPECTED: {_L.ANSWERS: _L.SUSPECT},
    Event.ANSWERED: {_L.SUSPECT: _L.ANSWERS},
    Event.LOST: {**dict.fromkeys(_L, _L.LOST), **_UNSEEN},
    Event.BACK: {**dict.fromkeys(_L, _L.ANSWERS), **dict.fromkeys(_P, _P.RUNS)},
    Event.PAUSING: {_P.RUNS: _P.PAUSED},
    Event.RESUMED: {_P.PAUSED: _P.RUNS},
    # A lost engine that was found again meanwhile runs: of a load that still fails it is spoiled all the same.
    Event.SPOILED: {**dict.fromkeys(_P, _P.SPOILED), **_WRITTEN},
    Event.WHOLE: {_P.SPOILED: _P.PAUSED},
    Event.OVERWRITTEN: _WRITTEN,
    Event.ADOPTED: {_W.OWN: _W.BASE, _W.OTHER: _W.PUBLISHED},
    Event.ADAPTED: {_W.OWN: _W.ADAPTED, _W.BASE: _W.ADAPTED},
    Event.BARE: {_W.ADAPTED: _W.OWN},
    Event.DISOWNED: _UNSEEN,
    Event.BROADCAST_ONLY: {_S.OPEN: _S.BROADCAST_ONLY},
    Event.SUPPLIED: {_S.BROADCAST_ONLY: _S.OPEN},
    Event.QUARANTINED: {_T.TRUSTED: _T.QUARANTINED},
    Event.REJOINED: {_T.QUARANTINED: _T.TRUSTED},
    Event.UNFIT: {_F.FIT: _F.UNFIT},
    Event.STOPPED: dict.fromkeys(_F, _F.STOPPED),
    Event.JOINED: {},
    Event.LEFT: {},
    Event.PREPARED: {},
    Event.PLAN_ENDED: {},
}


class Facts(TypedDict, total=False):
    """Facts that an event may bring."""

    loaded: Version
    base: Version
    membership: int
    prepared: Version | None


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine, with the facts that go with it. `after` is the only way to another state."""

    link: Link = Link.ANSWERS
    weights: Weights = Weights.OTHER
    pause: Pause = Pause.RUNS
    supply: Supply = Supply.OPEN
    trust: Trust = Trust.TRUSTED
    fitness: Fitness = Fitness.FIT
    loaded: Version = BASE
    """Version that the engine itself last confirmed; weights that were received and never published do not count."""
    base: Version = BASE
    """The version 0 that the weights it started with count as: of the term that published it last."""
    membership: int = 0
    """The process group that it belongs to; 0: none."""
    prepared: Version | None = None
    """The planned version for which it is paused and ready to receive."""

    def after(self, event: Event, **facts: Unpack[Facts]) -> "EngineState":
        """The state that the event leads to."""
        row = TRANSITIONS[event]
        moved = {name: row.get(value, value) for name, value in self.regions.items()}
        return replace(self, **moved, **facts)  # type: ignore[arg-type]

    @property
    def regions(self) -> dict[str, enum.Enum]:
        """The state without the facts."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, enum.Enum)}

    @property
    def is_published(self) -> bool:
        """True once this worker has seen it at a published version, until it is lost."""
        return self.weights in {Weights.BASE, Weights.ADAPTED, Weights.PUBLISHED}

    @property
    def is_sound(self) -> bool:
        """True when nothing but its circuit breaker can keep new work from it."""
        usable = self.link is Link.ANSWERS and self.trust is Trust.TRUSTED and self.fitness is Fitness.FIT
        return usable and self.is_published

    def reported(self, *, works: bool) -> "Reported.ValueType":
        """State that the service is told. `works`: the engine is sound and may be given new work."""
        if self.fitness is Fitness.STOPPED:
            return weights_pb2.ENGINE_STATE_STOPPED
        if self.trust is Trust.QUARANTINED or self.fitness is Fitness.UNFIT:
            return weights_pb2.ENGINE_STATE_QUARANTINED
        waits = self.supply is Supply.BROADCAST_ONLY and not self.is_published
        if self.link is not Link.LOST and (self.pause is not Pause.RUNS or waits):
            return weights_pb2.ENGINE_STATE_LOADING
        return weights_pb2.ENGINE_STATE_READY if works else weights_pb2.ENGINE_STATE_STARTING
