"""Engine slot, an engine as the worker's parts share it: its state, its meters, and the report of both.

Invariants: the state changes by `move` alone, along the table of engine_state.py; an engine gets leases only when it is
reachable and at a published version since it was last connected, and neither quarantined nor unfit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, Unpack

import structlog

from buffer_wire.limits import MAX_ERROR_CHARS
from rollout_buffer.v1 import weights_pb2
from rollout_workers.changes import Changes
from rollout_workers.counters import describe
from rollout_workers.engine.errors import EngineError, EngineUnfit
from rollout_workers.engine.types import Engine, EngineInfo, GeneratedSample, SampleRequest
from rollout_workers.slots.breaker import Breaker, counts
from rollout_workers.slots.decoding import DecodeMeter
from rollout_workers.slots.engine_state import (
    EngineState,
    Event,
    Facts,
    Fitness,
    Link,
    Pause,
    Reported,
    Supply,
    Trust,
    Weights,
)
from rollout_workers.slots.loads import LoadView
from rollout_workers.slots.reload_phases import PhaseMeter
from rollout_workers.versions import BASE, Version

_log = structlog.get_logger()


class SwapHold(Protocol):
    """Part that can ask an engine to keep its weights for a while."""

    @property
    def active(self) -> bool:
        """True while the weights have to stay."""
        ...

    async def released(self) -> None:
        """Return when they may go, or when the longest time for it has passed."""
        ...


class SampleLimit(Protocol):
    """Limit of the samples that run on an engine."""

    @property
    def samples(self) -> int:
        """Samples that may run at once; 0 before it is known."""
        ...


class EngineSlot:
    """State of one engine."""

    def __init__(
        self,
        engine_id: str,
        engine: Engine,
        info: EngineInfo,
        *,
        base_model: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = engine_id
        self.info = info
        self.base_model = base_model
        """Model that holds version 0, as the engine would load it; None when nobody knows."""
        self.changes = Changes()
        self.room = Changes()
        """Changes of what runs on the engine: there may be room for more."""
        self._at = EngineState()
        self._said = set[str]()
        self._own_label = ""
        """Label of the weights that the engine started with, where no worker gave it."""
        self.hold: SwapHold | None = None
        """Hold on the weights, which is waited for before the engine is paused for new ones."""
        self.limit: SampleLimit | None = None
        """Limit of the training's samples on it."""
        self.weights_url = ""
        """Base URL at which this worker serves the weights that it has fetched."""
        self.weights_from = ""
        """Source of the files of the last version that was fetched for it, and why, in words."""
        self.reloads, self.last_reload_ms = 0, 0
        self.errors, self.last_error = 0, ""
        self.breaker = Breaker()
        """Circuit breaker, open after failed calls in a row: no new work until a trial has succeeded."""
        self.evaluating = 0.0
        """Groups of evaluations on the engine, each by the share of its samples that still run: the training leaves
        them room."""
        self.in_flight = 0
        """Requests of this worker that the engine has not ended."""
        self.moved_samples = self.surplus_samples = self.surplus_tokens = 0
        """Samples of its leases that other engines took over; those cut off beyond a group's size; tokens of these."""
        self.ended = 0
        """Requests of this worker that the engine has ended."""
        self.phases = PhaseMeter(clock)
        self.decoding = DecodeMeter(lambda: self.engine.tokens_in_hand, clock=clock)
        self.engine = engine
        self.load = LoadView()
        self.doubts = 0
        """Number of answers that broke the engine's contract: the guard looks whether the engine is still the same."""

    @property
    def engine(self) -> Engine:
        """Engine of the slot: another one once a dead engine was started anew; what both decode is counted together."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine
        engine.on_decoding = self.decoding.changed

    # ── where it is ──────────────────────────────────────────────────────────

    def move(self, event: Event, **facts: Unpack[Facts]) -> None:
        """Take the engine to the state that the event leads to; the only way to another."""
        self._at = self._at.after(event, **facts)
        self.changes.notify()

    @property
    def state(self) -> "Reported.ValueType":
        """State as it is reported to the service."""
        return self._at.reported(works=self.leasable)

    @property
    def leasable(self) -> bool:
        """True when the engine may be given new work."""
        return self._at.is_sound and not self.breaker.is_open

    @property
    def reachable(self) -> bool:
        """True until the engine is lost."""
        return self._at.link is not Link.LOST

    @property
    def suspect(self) -> bool:
        """True from an error that may mean that the engine is gone until the guard has heard from it."""
        return self._at.link is Link.SUSPECT

    @property
    def current(self) -> bool:
        """True once this worker has seen the engine at a published version, until the engine is lost."""
        return self._at.is_published

    @property
    def pristine(self) -> bool:
        """True while the engine holds the weights it started with, and no adapter on them."""
        return self._at.weights in {Weights.OWN, Weights.BASE}

    @property
    def can_adapt(self) -> bool:
        """True while the engine holds the weights it started with, which adapters go onto."""
        return self.pristine or self._at.weights is Weights.ADAPTED

    @property
    def loading(self) -> bool:
        """True from before the pause until after the resume."""
        return self._at.pause is not Pause.RUNS

    @property
    def broken(self) -> bool:
        """True while the engine is paused because what it holds cannot be trusted."""
        return self._at.pause is Pause.SPOILED

    @property
    def awaits_plan(self) -> bool:
        """True while the published weights are not to be had for this engine, other than by a collective update."""
        return self._at.supply is Supply.BROADCAST_ONLY

    @property
    def quarantined(self) -> bool:
        """True from when it took no new weights in time until it rejoins."""
        return self._at.trust is Trust.QUARANTINED

    @property
    def unfit(self) -> bool:
        """True when the engine cannot generate what the run asks for, until it is started anew."""
        return self._at.fitness is Fitness.UNFIT

    @property
    def loaded(self) -> Version:
        """Version that the engine itself last confirmed."""
        return self._at.loaded

    @property
    def base(self) -> Version:
        """The version 0 that the weights it started with count as."""
        return self._at.base

    @property
    def membership(self) -> int:
        """The process group that the engine belongs to; 0: none."""
        return self._at.membership

    @property
    def prepared(self) -> Version | None:
        """The planned version for which the engine is paused and ready to receive."""
        return self._at.prepared

    def version_of(self, label: str) -> Version:
        """The version of an engine's label; a label that no worker gave means the weights it started with."""
        return Version.parse(label) or self.base

    def label_of(self, version: Version) -> str:
        """The engine's label of a version: the inverse of `version_of`."""
        return self._own_label if self._own_label and version == self.base else version.label

    def failed(self, error: BaseException, *, suspect: bool = False, doubted: bool = False) -> None:
        """Note an error; `suspect` when the engine may be gone, `doubted` when it may be another."""
        self.errors += 1
        failures = self.breaker.failures
        cut_off = f"no work after {failures} failed calls in a row, the last: " if self.breaker.is_open else ""
        self.last_error = cut_off + describe(error)
        self.doubts += doubted
        if suspect:
            self.move(Event.SUSPECTED)
        self.changes.notify()

    def take_out(self, why: str) -> None:
        """Have no more work done here: every task like the present one would fail."""
        if not self.unfit:
            _log.error("engine unfit", engine=self.engine_id, address=self.info.address, why=why)
            self.move(Event.UNFIT)
            self.failed(EngineUnfit(self.info.address, why))

    def say_once(self, what: str) -> None:
        """Log a warning about the engine that many tasks would repeat."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("engine", engine=self.engine_id, address=self.info.address, notice=what)

    async def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        deadline_s: float,
        on_end: Callable[[int], None] = lambda _index: None,
    ) -> list[GeneratedSample]:
        """The engine's `generate`, with its outcome noted for the circuit breaker. Raises EngineError, InvalidField.

        `on_end` is told the index of a sample that ends while others of the call go on.
        """
        running = {request.rid for request in requests}
        self.in_flight += len(running)

        def ended(request: SampleRequest) -> None:
            if request.rid in running:
                running.discard(request.rid)
                self.in_flight -= 1
                self.ended += 1
                on_end(request.sample_index)

        told = [replace(request, on_end=partial(ended, request)) for request in requests]
        try:
            done = await self.engine.generate(told, deadline_s=deadline_s)
        except EngineError as error:
            self._received(error.partial)
            if counts(error) and self.breaker.failed():
                _log.error("circuit open", engine=self.engine_id, failures=self.breaker.failures, error=str(error))
                self.changes.notify()
            raise
        else:
            self._received(done)
            if self.breaker.succeeded():
                _log.info("circuit closed", engine=self.engine_id)
                self.changes.notify()
            return done
        finally:
            self.in_flight -= len(running)
            self.ended += len(running)
            running.clear()

    def take_cut_off(self) -> int:
        """Tokens that had arrived of calls that were cancelled since this was asked last; they are lost."""
        tokens = self.engine.take_cut_off()
        self.decoding.received(tokens)
        return tokens

    def _received(self, samples: Sequence[GeneratedSample]) -> None:
        self.decoding.received(sum(len(sample.output_ids) + sample.unusable_tokens for sample in samples))

    async def refresh(self) -> None:
        """Ask the engine what it has loaded, after it was connected (anew). Raises EngineError."""
        label = await self.engine.loaded_version()
        known = Version.parse(label)
        self._own_label = label if known is None else ""
        # A label in our form says that somebody updated the engine, not from which run: it is loaded once more.
        event = Event.CONNECTED_OWN if known is None else Event.CONNECTED_OTHER
        self.move(event, loaded=known or BASE, base=BASE, membership=0, prepared=None)
        for notice in self.info.notices:
            _log.warning("engine connected", engine=self.engine_id, address=self.info.address, notice=notice)

    def adopt(self, version: Version) -> None:
        """Note that the engine holds this published version."""
        self.move(Event.ADOPTED, loaded=version, base=version if self.pristine else self.base)

    def reloaded(self, began: float) -> None:
        """Count a load that succeeded, of which the part out of service `began` then."""
        self.reloads += 1
        self.last_reload_ms = round((time.monotonic() - began) * 1000)

    def report(self, worker_id: str) -> weights_pb2.EngineReport:
        """The engine as a message, without what it has decoded."""
        return weights_pb2.EngineReport(
            engine_id=self.engine_id,
            worker_id=worker_id,
            state=self.state,
            loaded=self.loaded.wire(),
            reloads=self.reloads,
            last_reload_ms=self.last_reload_ms,
            last_error=self.last_error[:MAX_ERROR_CHARS],
            errors=self.errors,
            membership=self.membership,
            prepared=self.prepared.wire() if self.prepared is not None else None,
            weights_url=self.weights_url,
            weights_from=self.weights_from,
        )

    def full_report(self, worker_id: str) -> weights_pb2.EngineReport:
        """Report with the engine's decoding totals and reload times added; a change of those alone is no reason for a
        report.
        """
        report, decoded = self.report(worker_id), self.decoding.show()
        report.decoded_tokens = decoded.tokens
        report.decode_busy_ms, report.decode_request_ms = decoded.busy_ms, decoded.request_ms
        report.reload_phases.extend(self.phases.show())
        report.running_samples = self.in_flight
        report.max_running_samples = self.limit.samples if self.limit is not None else 0
        report.kv_usage_milli = round(1_000 * self.load.token_usage)
        report.moved_samples = self.moved_samples
        report.surplus_samples, report.surplus_tokens = self.surplus_samples, self.surplus_tokens
        report.takes_buckets = self.info.takes_buckets
        return report
