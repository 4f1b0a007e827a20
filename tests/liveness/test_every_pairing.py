"""Either a policy is refused with a reason, or the trainer gets its batches, whatever the workers do."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest

from buffer_service.domain.admission import capacity as least_room
from buffer_service.domain.liveness import most_batch_groups
from buffer_service.domain.ops import Publish, Published
from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_wire.errors import InvalidPolicy
from tests.liveness import options
from tests.liveness import trainer as trainers
from tests.liveness.options import N
from tests.liveness.pairing import PLAIN, SAMPLED, Decks, Pairing
from tests.liveness.simulation import Habits, Simulation, Stuck
from tests.liveness.stages import StageWorker
from tests.liveness.trainer import SimulatedTrainer
from tests.liveness.workers import LARGEST_GROUP, TEMPERS, SimulatedWorker
from tests.oracle import leasing, micro_batches, progress
from tests.oracle.state import RunState

STEPS = 6
LIMIT_MS = 120_000
"""A step takes about a second; the slowest worker alone would take ten."""


def plain_pairings(admission: str) -> Iterator[Pairing]:
    """List all of overflow, gate and filter with this admission."""
    for overflow, gate, filter_ in itertools.product(options.OVERFLOWS, options.GATES, options.FILTERS):
        yield Pairing.plain(admission, overflow, gate, filter_)


def pairings(admission: str) -> Iterator[tuple[Pairing, RunPolicy, str]]:
    """The same, each with one of every other option, the policy, and the field for which it was refused, empty where it
    was not. What is refused comes with the plain pace instead.
    """
    decks = Decks(admission)
    for plain in plain_pairings(admission):
        drawn = decks.draw()
        try:
            yield (pairing := plain.with_others(drawn)), pairing.policy(), ""
        except InvalidPolicy as refused:
            pairing = plain.with_others(drawn | {"pace": PLAIN["pace"]})
            yield pairing, pairing.policy(), refused.attributes["field"]


def train(policy: RunPolicy, seed: int, pairing: Pairing | None = None, habits: Habits | None = None) -> Simulation:
    pairing = pairing or Pairing.plain("no admission", "block", "no gate", "no filter")
    simulation = Simulation(policy, habits or pairing.habits, seed, pairing.environments)
    for name, temper in TEMPERS.items():
        SimulatedWorker(simulation, name, temper)
    for stage in policy.stages:
        StageWorker(simulation, stage)
    trainer = SimulatedTrainer(simulation)
    try:
        simulation.run(lambda: trainer.trained_in_all >= STEPS, LIMIT_MS)
    except Exception as error:
        error.add_note(f"seed {seed} of {pairing}")
        raise
    return simulation


@pytest.mark.parametrize("admission", options.ADMISSIONS)
def test_every_admission_overflow_gate_and_filter_trains(admission: str) -> None:
    for seed, pairing in enumerate(plain_pairings(admission)):
        train(pairing.policy(), seed, pairing)


@pytest.mark.parametrize("admission", options.ADMISSIONS)
def test_with_anything_else_it_trains_or_is_refused_with_a_reason(admission: str) -> None:
    for seed, (pairing, policy, refused_for) in enumerate(pairings(admission)):
        assert refused_for in {"", "max_lookahead"}
        train(policy, seed, pairing)


@pytest.mark.parametrize("admission", options.ADMISSIONS)
def test_a_window_of_the_order_needs_no_bound_in_time(admission: str) -> None:
    for seed, (overflow, mixture) in enumerate(itertools.product(options.OVERFLOWS, ("in order", "in order, shares"))):
        plain = Pairing.plain(admission, overflow, "no gate", "rewards")
        pairing = plain.with_others(PLAIN | {"mixture": mixture, "shape": "micro-batches of 2", "quota": "groups"})
        train(dataclasses.replace(pairing.policy(), stale_wait_ms=3_600_000), seed, pairing)


def test_every_option_meets_every_other_but_where_one_refuses_the_other() -> None:
    met: set[tuple[str, str]] = set()
    for pairing, _, _ in itertools.chain.from_iterable(pairings(admission) for admission in options.ADMISSIONS):
        chosen = (pairing.admission, pairing.overflow, pairing.gate, pairing.filter)
        met.update(itertools.product(chosen, (f"{kind}: {name}" for kind, name in pairing.others)))
    axes = [*options.ADMISSIONS, *options.OVERFLOWS, *options.GATES, *options.FILTERS]
    others = [f"{kind}: {name}" for kind, names in SAMPLED.items() for name in names]
    assert set(itertools.product(axes, others)) - met == {
        ("lookahead 0", "pace: 2 ahead"),
        ("lookahead 0", "pace: 1 ahead, 2 per publish"),
        ("lookahead 1", "pace: 2 ahead"),
        ("in flight N, lookahead 1", "pace: 2 ahead"),
    }


# ── the simulation finds what cannot progress ────────────────────────────────


def test_a_batch_that_the_queues_tokens_cannot_hold_is_found() -> None:
    starving = RunPolicy(batch_groups=2 * N, max_queued_tokens=LARGEST_GROUP, overflow_action=OverflowAction.BLOCK)
    with pytest.raises(Stuck, match="not finished"):
        train(starving, seed=1)


def test_a_lookahead_that_takes_a_publish_without_a_commit_for_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    publish: Callable[[RunState, Publish], Published] = progress.publish

    def forgetful(run: RunState, request: Publish) -> Published:
        published = publish(run, request)
        run.published_steps = run.committed_steps
        return published

    policy = RunPolicy(batch_groups=N, max_staleness=0, max_lookahead=0)
    habits = Habits(publishing="publish first")
    train(policy, seed=1, habits=habits)
    monkeypatch.setattr(progress, "publish", forgetful)
    with pytest.raises(Stuck):
        train(policy, seed=1, habits=habits)


def test_a_step_that_may_be_larger_than_the_lookahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RunPolicy(batch_groups=N, max_queued_groups=2 * N, max_lookahead=0)
    habits = Habits(own_sizes=True)
    simulation = train(policy, seed=1, habits=habits)
    assert simulation.model.view("run").statistics["assembled_groups"] < STEPS * N, "sizes differ"
    assert most_batch_groups(policy, 2 * N) == N
    for module in (micro_batches, trainers):
        monkeypatch.setattr(module, "most_batch_groups", lambda _policy, most: most)
    with pytest.raises(Stuck):
        train(policy, seed=1, habits=habits)


def test_a_lookahead_without_room_for_what_a_step_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, habits = RunPolicy(batch_groups=N, max_staleness=0, max_lookahead=0), Habits(gives_back=True)
    simulation = train(policy, seed=1, habits=habits)
    assert simulation.model.view("run").groups["rejected"].groups > 0
    capacity: Callable[..., int | None] = least_room
    monkeypatch.setattr(leasing, "capacity", lambda policy, **counts: capacity(policy, **{**counts, "missing": 0}))
    with pytest.raises(Stuck):
        train(policy, seed=1, habits=habits)
