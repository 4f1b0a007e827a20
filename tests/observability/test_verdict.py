"""Each verdict on a view that deserves it, and not on its neighbour."""

from typing import Any

import pytest

from buffer_service.domain.ops import Amount, RunView, WeightVersion
from buffer_service.domain.policy import OverflowAction, RunPolicy, StaleAction
from buffer_service.observability.estimate import estimate
from tests.support.views import make_loop


def said(view: RunView) -> str:
    return " | ".join(estimate(view).verdict.sentences)


@pytest.mark.parametrize(
    ("rho", "bound", "words"),
    [
        (0.5, "rollout", "rollout-bound: engines make 50% of what the trainer can take; the trainer waits 50% of its"),
        (0.89, "rollout", "rollout-bound: engines make 89%"),
        (0.91, "balanced", "balanced: engines make 91%"),
        (1.09, "balanced", "balanced: engines make 109%"),
        (1.11, "train", "train-bound: engines make 11% more"),
        (1.6, "train", "train-bound: engines make 60% more than the trainer can take; the trainer waits 0%"),
    ],
)
def test_the_bottleneck(rho: float, bound: str, words: str) -> None:
    found = estimate(make_loop(rho=rho)).verdict
    assert found.bound == bound
    assert found.sentences[0].startswith(words)


def test_engines_that_stand_idle_beside_a_trainer_that_waits() -> None:
    busy = make_loop(rho=0.5)
    assert busy.window is not None
    full = busy.window.grown("decode_busy_ms")
    idle = {
        name: round(0.8 * busy.window.grown(name)) for name in ("decode_busy_ms", "decode_request_ms", "decoded_tokens")
    }
    assert "engines stand idle 20% of the time" in said(make_loop(rho=0.5, grown=idle))
    nearly = {"decode_busy_ms": round(0.95 * full)}
    assert "stand idle" not in said(make_loop(rho=0.5, grown=nearly))
    assert "stand idle" not in said(make_loop(rho=1.5, grown=idle))
    held = RunPolicy(
        batch_groups=16, max_lookahead=1, max_staleness=1, max_queued_groups=32, overflow_action=OverflowAction.BLOCK
    )
    assert "max_lookahead 1 may hold the engines back" in said(make_loop(held, rho=0.5, grown=idle))
    for fields in ({"max_inflight_groups": 24}, {"reserve_queue_space": True}):
        few = said(make_loop(RunPolicy(batch_groups=16, **fields), rho=0.5))
        assert f"{next(iter(fields))} may hold the engines back" in few


@pytest.mark.parametrize(
    ("fields", "source", "words"),
    [
        ({"tailness": 3.0}, "pre_queue", "1.5 of 2.2 versions pass while groups are generated: above all long tails"),
        ({"concurrency": 512, "pre_queue": 6.0}, "pre_queue", "above all many requests at once (C/B 4.00, M 1.50)"),
        (
            {"pre_queue": 0.5},
            "in_queue",
            "0.7 of 1.2 versions pass in the queue: groups wait until the trainer takes a",
        ),
        ({"rho": 1.5, "pre_queue": 0.5}, "in_queue", "training is the bottleneck, so the queue is full"),
    ],
)
def test_the_larger_part_and_its_reason(fields: dict[str, Any], source: str, words: str) -> None:
    found = estimate(make_loop(**fields)).verdict
    assert found.source == source
    assert words in found.sentences[1]


def test_a_long_queue_is_named_only_where_it_is_full() -> None:
    long = RunPolicy(batch_groups=16, max_queued_groups=48)
    assert "the queue holds 3.0 batches" in said(make_loop(long, rho=1.5, in_queue=2.0))
    assert "the queue holds" not in said(make_loop(long, rho=0.7, in_queue=2.0))


def test_hardly_any_staleness_has_no_source() -> None:
    assert estimate(make_loop(pre_queue=0.1, in_queue=0.1)).verdict.source == ""
    assert estimate(make_loop(pre_queue=0.2, in_queue=0.1)).verdict.source == "pre_queue"


def test_generation_that_decoding_does_not_explain_is_named() -> None:
    """Decoding the longest response takes 15 s, and a period 10."""
    assert "they take about 30 s, 15 s of it to decode" in said(make_loop(pre_queue=3.0))
    assert "to decode the longest" not in said(make_loop(pre_queue=2.2))


def test_a_wait_in_the_queue_is_put_down_to_what_accounts_for_it() -> None:
    """The closed form says 0.7 versions."""
    assert "groups wait until the trainer takes a whole batch" in said(make_loop(pre_queue=0.5, in_queue=1.3))
    assert "versions pass in the queue |" in said(make_loop(pre_queue=0.5, in_queue=1.5)) + " |"


@pytest.mark.parametrize(
    ("state", "policy", "words"),
    [
        ("dropped_overflow", RunPolicy(batch_groups=16), "dropped from a full queue: they come in bursts"),
        (
            "dropped_stale",
            RunPolicy(batch_groups=16, max_staleness=3),
            "dropped for max_staleness 3, which prefers short",
        ),
        (
            "recycled",
            RunPolicy(batch_groups=16, max_staleness=3, stale_action=StaleAction.RECYCLE),
            "started anew for max_staleness 3",
        ),
        ("discarded", RunPolicy(batch_groups=16), "discarded by resumes"),
        ("lost", RunPolicy(batch_groups=16), "lost by the store"),
    ],
)
def test_losses_are_named_when_they_are_large(state: str, policy: RunPolicy, words: str) -> None:
    def view(lost: int) -> RunView:
        return make_loop(policy, groups={state: Amount(groups=lost), "trained": Amount(groups=100 - lost)})

    assert f"10% of all groups so far are {words}" in said(view(10))
    assert "so far" not in said(view(9))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ({"next_step": 3, "committed_steps": 3}, "no weights are published: 3 steps are committed so far"),
        ({"next_step": 3, "committed_steps": 2}, ""),
        ({"next_step": 19, "committed_steps": 0}, "no weights are published: 19 steps are assembled so far"),
        ({"next_step": 18, "committed_steps": 0}, ""),
        ({"next_step": 53, "committed_steps": 53, "published_steps": 50, "version": 40}, "3 steps are committed since"),
        ({"next_step": 50, "committed_steps": 50, "published_steps": 50}, ""),
        ({"next_step": 6, "committed_steps": 6, "per_publish": 3}, ""),
        ({"next_step": 7, "committed_steps": 7, "per_publish": 3}, "batches_per_publish, now 3, to the steps"),
    ],
    ids=str,
)
def test_a_trainer_that_never_publishes_is_told_so_and_nothing_else_is_blamed(steps: dict[str, Any], told: str) -> None:
    """Long tails, a gate that drops much and staleness from before it stopped: none of it is the reason."""
    policy = RunPolicy(batch_groups=16, max_staleness=3, batches_per_publish=steps.pop("per_publish", 1))
    published = WeightVersion(1, steps.pop("version", 0))
    groups = {"dropped_stale": Amount(groups=30), "trained": Amount(groups=70)}
    found = estimate(
        make_loop(policy, tailness=3.0, groups=groups, published=published, **{"published_steps": 0, **steps})
    )
    text = " | ".join(found.verdict.sentences)
    if told:
        assert told in found.verdict.sentences[0]
        assert "call session.publish" in found.verdict.sentences[0]
        assert found.advice == ()
        assert (found.verdict.bound, found.verdict.source) == ("", "")
        assert "30% of all groups so far are dropped for max_staleness 3" in text
        assert not any(word in text for word in ("short responses", "tails", "bottleneck"))
    else:
        assert "session.publish" not in text
        assert "prefers short responses" in text
        assert "long tails" in text
        assert found.advice


def test_overflow_is_put_down_to_training_where_that_is_the_bottleneck() -> None:
    groups = {"dropped_overflow": Amount(groups=30), "trained": Amount(groups=70)}
    assert "30% of all groups so far are dropped from a full queue: training is" in said(
        make_loop(rho=1.5, groups=groups)
    )


def test_the_filters_reasons_are_told() -> None:
    groups = {"filtered": Amount(groups=50), "trained": Amount(groups=50)}
    found = said(make_loop(groups=groups, statistics={"filtered_equal_rewards": 48, "filtered_mean_reward": 2}))
    assert "50% of all groups so far are filtered, 48 for equal_rewards, 2 for mean_reward" in found


def test_a_bias_is_part_of_the_verdict() -> None:
    view = make_loop()
    assert view.window is not None
    short = {"assembled_response_tokens": round(0.7 * view.window.grown("assembled_response_tokens"))}
    assert "beyond chance: mean length -30%" in said(make_loop(grown=short))
    assert "beyond chance" not in said(view)
