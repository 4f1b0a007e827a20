"""Estimate of a live run's staleness: what it is, what is predicted, and what to change.

Pure: from a view of the run to an `Estimate`. Before MIN_PUBLISHES nothing is predicted and no verdict given. Who
simulates, is handed in: it may take its time.
"""

from collections.abc import Callable
from dataclasses import replace

from buffer_service.domain.gate import MILLI
from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import UNSET
from buffer_service.domain.steering.knobs import lookahead_milli
from buffer_service.observability.estimate.advice import advice
from buffer_service.observability.estimate.bias import bias
from buffer_service.observability.estimate.measured import measured
from buffer_service.observability.estimate.prediction import Setting, predicted, setting_of
from buffer_service.observability.estimate.quantities import (
    FEW_PUBLISHES,
    MIN_PUBLISHES,
    UNEVEN_BATCHES,
    quantities,
    uneven,
)
from buffer_service.observability.estimate.questions import Played, Question, question
from buffer_service.observability.estimate.verdict import publishes_nothing, verdict
from buffer_wire.estimate import Estimate, Predicted, Quantities, Unknown

__all__ = ["Estimate", "Play", "estimate"]

Play = Callable[[str, Question], tuple[Played | None, bool]]
"""The simulation of a run, by its id: what is known of it, and whether a newer answer is under way."""


def _plays_nothing(_run_id: str, _asked: Question) -> tuple[Played | None, bool]:
    return None, False


def estimate(view: RunView, play: Play = _plays_nothing) -> Estimate:
    """Estimate of a run's staleness, with all that can be told of it; the policy is that in effect."""
    view = replace(view, policy=view.in_effect)
    known, unknown = quantities(view)
    window, seen, compared = view.window, measured(view), bias(view)
    setting = _setting(view, known)
    asked = question(view, known, setting) if setting else None
    played, pending = play(view.run_id, asked) if asked else (None, False)
    forecast = predicted(view, known, setting, played.prediction if played else None, pending=pending)
    if forecast.staleness is None:
        unknown = (*unknown, Unknown("predicted", _why_not(view, known, unknown, forecast)))
    return Estimate(
        publishes=window.publishes if window else 0,
        window_s=window.seconds if window else 0.0,
        quantities=known,
        unknown=unknown,
        predicted=forecast,
        measured=seen,
        bias=compared,
        verdict=verdict(view, known, setting, forecast, seen, compared, played.effects if played else ()),
        advice=advice(setting, known, view)
        if setting and forecast.staleness is not None and not publishes_nothing(view)
        else (),
        response_lengths=tuple(view.response_lengths),
    )


def _setting(view: RunView, known: Quantities) -> Setting | None:
    window = view.window
    if window is None or window.publishes < MIN_PUBLISHES or uneven(window, known):
        return None
    versions = (window.last.version - window.first.version) / window.publishes
    ahead = lookahead_milli(view.policy, view.decision.knobs)
    return setting_of(view.policy, view.world_size, known, versions, None if ahead == UNSET else ahead / MILLI)


def _why_not(view: RunView, known: Quantities, unknown: tuple[Unknown, ...], forecast: Predicted) -> str:
    if forecast.notes:
        return forecast.notes[0]
    if view.window is not None and view.window.publishes < MIN_PUBLISHES:
        return FEW_PUBLISHES
    if view.window is not None and uneven(view.window, known):
        return UNEVEN_BATCHES
    return next((one.reason for one in unknown), "a quantity that the closed form needs is 0")
