"""Tests of what the rules learn of a pushed group, from its header alone."""

from collections.abc import Sequence
from struct import unpack

import pytest

from buffer_service.domain import ops
from buffer_service.rpc.convert.groups import Limits, new_group, to_ack
from buffer_service.rules.filters import NO_REWARD_BOUND
from buffer_service.rules.totals import MOST_BEHIND
from rollout_buffer.v1 import common_pb2
from rollout_buffer.v1 import groups_pb2 as pb
from tests.support.rpc import make_group


def facts(group: pb.Group) -> ops.GroupFacts:
    return new_group(memoryview(group.SerializeToString()), Limits(1 << 30, 1 << 30)).facts


def rewarded(*rewards: float) -> pb.Group:
    group = make_group("t", lengths=[4] * len(rewards))
    for sample, reward in zip(group.header.samples, rewards, strict=True):
        sample.reward = reward
    return group


def spanned(sample: pb.Sample, spans: Sequence[tuple[int, int, int]]) -> None:
    """Tile a sample's response with (version, start, end)."""
    del sample.spans[:]
    for version, start, end in spans:
        sample.spans.add(version=common_pb2.WeightVersion(term=1, version=version), start=start, end=end)


def test_lengths_and_rewards_are_those_of_the_samples() -> None:
    group = make_group("t", lengths=(3, 9, 5))
    for sample, reward in zip(group.header.samples, (0.25, -1.5, 3.0), strict=True):
        sample.reward = reward
    known = facts(group)
    assert unpack("<3I", known.response_lengths) == (2, 8, 4)
    assert unpack("<3f", known.rewards) == (0.25, -1.5, 3.0)
    assert (known.min_response_tokens, known.max_response_tokens) == (2, 8)
    assert (known.samples, known.tokens, known.loss_tokens) == (3, 17, 14)
    assert known.environment == "sums"


def test_the_mean_version_is_taken_over_response_tokens() -> None:
    group = make_group("t", lengths=(5, 4))
    spanned(group.header.samples[0], [(2, 1, 2), (5, 2, 5)])
    spanned(group.header.samples[1], [(4, 1, 4)])
    known = facts(group)
    # 1 token of version 2, 3 of version 5, 3 of version 4.
    assert known.mean_milli == (2 + 15 + 12) * 1_000 // 7
    assert (known.head.version, known.tail.version) == (2, 5)
    assert known.spans_versions
    assert [(made.version, tokens) for made, tokens in known.version_tokens] == [(2, 1), (4, 3)]


def test_a_group_of_one_version_needs_no_tokens_by_version() -> None:
    assert facts(make_group("t", lengths=(5, 4))).version_tokens == ()


def test_versions_far_behind_the_newest_are_told_together() -> None:
    group = make_group("t", lengths=(31,))
    spanned(group.header.samples[0], [(version, version + 1, version + 2) for version in range(30)])
    told = facts(group).version_tokens
    assert [made.version for made, _ in told] == list(range(29 - MOST_BEHIND, 29))
    assert [tokens for _, tokens in told] == [30 - MOST_BEHIND] + [1] * (MOST_BEHIND - 1)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [((0.5, 0.5, 0.5), True), ((0.0, -0.0), True), ((0.5, 0.5, 0.25), False), ((1.0, 0.0), False), ((1.0,), False)],
    ids=str,
)
def test_rewards_are_equal_where_two_or_more_samples_have_the_same(rewards: Sequence[float], equal: bool) -> None:
    assert facts(rewarded(*rewards)).equal_rewards is equal


@pytest.mark.parametrize(
    ("rewards", "milli"),
    [
        ((1.0, 0.0), 500),
        ((1.0, 0.0, 0.0), 333),
        ((-1.0, 0.0, 0.0), -334),
        # As float32 a little below and above what was written.
        ((0.7,), 700),
        ((0.1, 0.1), 100),
        ((-0.7,), -700),
        ((3.0e38, 3.0e38), NO_REWARD_BOUND),
        ((-3.0e38,), -NO_REWARD_BOUND),
    ],
    ids=str,
)
def test_the_mean_reward_is_rounded_down_to_thousandths(rewards: Sequence[float], milli: int) -> None:
    assert facts(rewarded(*rewards)).mean_reward_milli == milli


@pytest.mark.parametrize(
    ("rewards", "milli"),
    [
        ((0.25, -1.5, 3.0), 1_750),
        # Each is rounded by itself.
        ((0.0004, 0.0004, 0.0004), 0),
        ((0.7, 0.7, 0.7), 2_100),
        ((3.0e38, 3.0e38), NO_REWARD_BOUND),
        ((-3.0e38,), -NO_REWARD_BOUND),
    ],
    ids=str,
)
def test_rewards_are_summed_in_thousandths(rewards: Sequence[float], milli: int) -> None:
    assert facts(rewarded(*rewards)).reward_milli == milli


def test_turns_of_the_model_are_counted_and_a_sample_without_any_has_one() -> None:
    group = make_group("t", lengths=(9, 9, 9))
    for role, start, end in (("user", 0, 1), ("assistant", 1, 4), ("tool", 4, 6), ("assistant", 6, 9)):
        group.header.samples[0].turns.add(role=role, start=start, end=end)
    group.header.samples[1].turns.add(role="user", start=0, end=1)
    assert facts(group).turns == 2 + 0 + 1


def test_samples_that_ran_into_their_limit_are_counted() -> None:
    group = make_group("t", lengths=(3, 9, 5))
    for sample, reason in zip(group.header.samples, (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP) * 2, strict=False):
        sample.finish_reason = reason
    known = facts(group)
    assert (known.truncated_samples, known.response_tokens) == (2, 2 + 8 + 4)


def test_a_filtered_group_is_acknowledged_as_such() -> None:
    ack = to_ack(ops.NewGroup(facts(make_group("t")), b"", outcome=ops.Pushed(ops.PushKind.FILTERED, "t/0")))
    assert (ack.outcome, ack.group_id) == (pb.PUSH_OUTCOME_FILTERED, "t/0")


def test_rows_that_are_not_trainable_are_counted_and_decide_nothing() -> None:
    group = rewarded(1.0, 5.0, 0.0)
    for sample, trajectory in zip(group.header.samples, (1, 1, 2), strict=True):
        sample.trajectory = trajectory
    context = group.header.samples[1]
    context.trainable, context.loss_tokens = False, 0
    context.spans[0].version.version = 7
    made = facts(group)
    assert (made.samples, made.trajectories) == (3, 2)
    assert len(made.response_lengths) == len(made.rewards) == 3 * 4
    assert (made.mean_reward_milli, made.reward_milli, made.equal_rewards) == (500, 1_500, False)
    assert made.head == made.tail
    assert made.response_tokens == sum(s.tokens - s.prompt_len for s in group.header.samples)
