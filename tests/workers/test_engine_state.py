"""The table of engine states: what every sequence of events can lead to, and that the docs name the same states."""

import enum
from collections import deque
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from rollout_buffer.v1 import weights_pb2
from rollout_workers.slots.engine_state import (
    TRANSITIONS,
    EngineState,
    Event,
    Fitness,
    Link,
    Pause,
    Supply,
    Trust,
    Weights,
)

DOCS = Path(__file__).parents[2] / "docs" / "weights.md"


def reachable_from(start: EngineState) -> dict[EngineState, set[Event]]:
    """Every state that events can lead to, with the events that change it."""
    found: dict[EngineState, set[Event]] = {}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        if state in found:
            continue
        found[state] = {event for event in Event if state.after(event) != state}
        todo.extend(state.after(event) for event in found[state])
    return found


STATES = reachable_from(EngineState())


def name(state: EngineState, *, works: bool) -> str:
    return weights_pb2.EngineState.Name(state.reported(works=works)).removeprefix("ENGINE_STATE_")


def leaving(member: enum.Enum) -> set[Event]:
    """The events that take an engine out of this state of a region."""
    return {event for event, row in TRANSITIONS.items() if row.get(member, member) is not member}


def test_every_event_has_a_row_that_stays_within_regions() -> None:
    assert set(TRANSITIONS) == set(Event)
    assert all(type(old) is type(new) for row in TRANSITIONS.values() for old, new in row.items())


def test_every_state_of_every_region_is_reached() -> None:
    regions = [set(state.regions.values()) for state in STATES]
    assert set(chain.from_iterable(regions)) == set(chain(Link, Weights, Pause, Supply, Trust, Fitness))


def test_documented_states_are_those_reported() -> None:
    section = DOCS.read_text().partition("## States of an engine")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    documented = {state.strip(" `"): leases.strip() for state, _, leases in rows}
    reported = {name(state, works=state.is_sound and closed) for state in STATES for closed in (True, False)}
    assert set(documented) == reported
    without_work = {state for state, leases in documented.items() if leases == "none"}
    assert without_work.isdisjoint(name(state, works=True) for state in STATES if state.is_sound)


@pytest.mark.parametrize("hindrance", [Link.SUSPECT, Link.LOST, Trust.QUARANTINED, Fitness.UNFIT, Fitness.STOPPED])
def test_engine_gets_no_work(hindrance: enum.Enum) -> None:
    hindered = [state for state in STATES if hindrance in state.regions.values()]
    assert hindered
    assert not any(state.is_sound for state in hindered)


def test_engine_gets_no_work_before_it_was_seen_at_a_published_version() -> None:
    assert {state.weights for state in STATES if state.is_sound} == {Weights.BASE, Weights.ADAPTED, Weights.PUBLISHED}
    assert not EngineState().after(Event.CONNECTED_OWN).is_sound
    assert EngineState().after(Event.CONNECTED_OWN).after(Event.ADOPTED).is_sound
    lost = EngineState().after(Event.ADOPTED).after(Event.LOST)
    assert not lost.after(Event.BACK).is_sound


def test_lost_engine_comes_back_by_the_guard_alone() -> None:
    assert leaving(Link.LOST) == {Event.BACK}


def test_engine_that_may_hold_a_mixture_goes_on_when_it_confirms_weights_or_was_started_anew() -> None:
    assert leaving(Pause.SPOILED) == {Event.WHOLE, Event.BACK}
    state = EngineState().after(Event.ADOPTED).after(Event.PAUSING).after(Event.SPOILED)
    assert name(state.after(Event.RESUMED), works=True) == "LOADING"
    assert name(state.after(Event.WHOLE).after(Event.RESUMED), works=True) == "READY"


def test_stopped_engine_stays_stopped() -> None:
    assert leaving(Fitness.STOPPED) == set()


def test_every_engine_that_is_not_stopped_can_be_ready_again() -> None:
    before: dict[EngineState, set[EngineState]] = {state: set() for state in STATES}
    for state, events in STATES.items():
        for event in events:
            before[state.after(event)].add(state)
    found = {state for state in STATES if name(state, works=state.is_sound) == "READY"}
    todo = deque(found)
    while todo:
        new = before[todo.popleft()] - found
        found |= new
        todo.extend(new)
    assert set(STATES) - found == {state for state in STATES if state.fitness is Fitness.STOPPED}


def pristine(state: EngineState) -> bool:
    """True for the weights that it started with, under an adapter or not."""
    return state.weights in {Weights.OWN, Weights.BASE, Weights.ADAPTED}


def published_as(was: EngineState, now: EngineState) -> bool:
    return was.is_published == now.is_published


@pytest.mark.parametrize(
    ("event", "holds"),
    [
        (Event.CONNECTED_OWN, lambda _, s: s.weights is Weights.OWN and s.fitness is not Fitness.UNFIT),
        (Event.CONNECTED_OTHER, lambda _, s: s.weights is Weights.OTHER and s.fitness is not Fitness.UNFIT),
        (Event.ANSWERED, lambda _, s: s.link is not Link.SUSPECT),
        (Event.LOST, lambda was, s: s.link is Link.LOST and not s.is_published and pristine(s) == pristine(was)),
        (Event.BACK, lambda _, s: (s.link, s.pause) == (Link.ANSWERS, Pause.RUNS)),
        (Event.PAUSING, lambda _, s: s.pause is not Pause.RUNS),
        (Event.RESUMED, lambda _, s: s.pause is not Pause.PAUSED),
        (Event.SPOILED, lambda was, s: s.pause is Pause.SPOILED and not pristine(s) and published_as(was, s)),
        (Event.OVERWRITTEN, lambda was, s: not pristine(s) and published_as(was, s)),
        (Event.ADOPTED, lambda was, s: s.is_published and pristine(s) == pristine(was)),
        (Event.DISOWNED, lambda was, s: not s.is_published and pristine(s) == pristine(was)),
        (Event.BROADCAST_ONLY, lambda _, s: s.supply is Supply.BROADCAST_ONLY),
        (Event.SUPPLIED, lambda _, s: s.supply is Supply.OPEN),
        (Event.QUARANTINED, lambda _, s: s.trust is Trust.QUARANTINED),
        (Event.REJOINED, lambda _, s: s.trust is Trust.TRUSTED),
        (Event.STOPPED, lambda _, s: name(s, works=False) == "STOPPED"),
    ],
)
def test_event_has_its_effect_in_every_state(event: Event, holds: Callable[[EngineState, EngineState], bool]) -> None:
    assert all(holds(state, state.after(event)) for state in STATES)
