"""Groups as PRIME-RL's trainer takes them: packed, padded, balanced over ranks, and as bytes."""

from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from tests.integrations.prime_rl_trainer import decode, group_of
from trainer_client.integrations.prime_rl import Packing, encode, pack
from trainer_client.integrations.prime_rl.micro_batches import group_advantages
from trainer_client.integrations.prime_rl.wire import FIELDS


def test_rollouts_are_packed_longest_first_where_they_fit_first() -> None:
    [packed] = pack([group_of(0, 1, lengths=(5, 9)), group_of(1, 0, lengths=(4, 3))], Packing(seq_len=12))
    assert [each.tokens for each in packed] == [12, 9]
    assert packed[0].token_ids.tolist() == [*range(100, 109), *range(100, 103)]
    assert packed[0].position_ids.tolist() == [*range(9), *range(3)]
    assert (packed[0].lengths, packed[1].lengths) == ((9, 3), (5, 4))
    assert packed[1].loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert packed[1].logprobs.tolist() == [0, 0, -0.25, -0.25, -0.25, 0, 0, -0.25, -0.25]


def test_advantage_is_the_reward_less_the_groups_mean() -> None:
    [[packed]] = pack([group_of(0, 1, lengths=(3, 4)), group_of(3, 1, lengths=(3, 3))], Packing(seq_len=64))
    assert packed.advantages.tolist() == [0.5] * 4 + [-0.5] * 3 + [1.0] * 3 + [-1.0] * 3


def test_advantage_of_ones_own_sees_rewards_and_response_lengths() -> None:
    seen: list[Any] = []

    def advantage(rewards: Any, lengths: Any) -> Any:
        seen.append((rewards.tolist(), lengths.tolist()))
        return rewards * 2

    assert group_advantages(group_of(1, 3, lengths=(4, 7)), advantage).tolist() == [2, 6]
    assert seen == [([1, 3], [2, 5])]
    with pytest.raises(InvalidField, match="advantage"):
        group_advantages(group_of(1, 3, lengths=(4, 7)), lambda rewards, _: rewards[:1])


def test_rows_of_trajectories_are_compared_by_trajectory_and_trained_where_they_may_be() -> None:
    rows = [(1, True), (1, True), (2, True), (2, False)]
    group = group_of(1, 1, 0, 0, lengths=(3, 4, 5, 6), rows=rows)
    assert group_advantages(group, None).tolist() == [0.5, 0.5, -0.5, 0]
    [[packed]] = pack([group], Packing(seq_len=64))
    assert packed.lengths == (5, 4, 3)
    with pytest.raises(InvalidField, match="rows of trajectories"):
        group_advantages(group, lambda rewards, _: rewards)


def test_what_has_no_advantage_is_not_trained() -> None:
    groups = [group_of(1, 1, lengths=(5, 6)), group_of(0, 1, lengths=(3, 4))]
    [[packed]] = pack(groups, Packing(seq_len=64))
    assert packed.lengths == (4, 3)
    assert "rl_weights" not in packed.streams


def test_step_without_any_advantage_is_a_step_without_loss() -> None:
    [first, second] = pack([group_of(1, 1, lengths=(5, 6))], Packing(seq_len=64, data_ranks=2))
    assert [each.token_ids.tolist() for each in (*first, *second)] == [[0, 1, 2, 3, 4]] * 2
    assert not any(each.loss_mask.any() or each.advantages.any() for each in (*first, *second))


def test_advantages_of_tokens_come_before_those_of_groups() -> None:
    [[packed]] = pack([group_of(1, 1, lengths=(4, 5), columns=("advantages",))], Packing(seq_len=64))
    assert packed.advantages.tolist() == [1, 1.125, 1.25, 1.375, 1.5, 0, 0.125, 0.25, 0.375]
    assert "rl_weights" not in packed.streams
    # Token 2 of the second sample, and its last one.
    [[packed]] = pack([group_of(1, 1, lengths=(3, 4), prompt_len=0, columns=("advantages",))], Packing(seq_len=64))
    assert packed.streams["rl_weights"].tolist() == [1, 1, 1, 1, 0, 1, 1]


def test_weights_of_losses_are_carried_and_filled_where_a_rollout_has_none() -> None:
    columns = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
    groups = [group_of(0, 1, lengths=(3, 4), columns=columns), group_of(0, 1, lengths=(2, 3), prompt_len=1)]
    [[packed]] = pack(groups, Packing(seq_len=64, pad_to_multiple_of=8))
    assert packed.lengths == (4, 3, 3, 6)
    own = [1, 1.125, 1.25, 1.375, 0, 0.125, 0.25]
    assert packed.streams["rl_weights"].tolist() == own + [1.0] * 5 + [0.0] * 4
    for name in ("ref_logprobs", "ce_weights", "ref_kl_weights"):
        assert packed.streams[name].tolist() == own + [0.0] * 9


def test_padding_belongs_to_the_last_rollout_and_has_no_loss() -> None:
    packing = Packing(seq_len=16, pad_to_multiple_of=4, temperature=0.5)
    [[packed]] = pack([group_of(0, 1, lengths=(3, 4))], packing)
    assert packed.lengths == (4, 4)
    assert packed.token_ids[7:].tolist() == [1]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert packed.temperatures.tolist() == [0.5] * 7 + [1.0]
    assert packed.environments == (("math", 4), ("math", 3), ("", 1))
    assert (packed.loss_mask[7], packed.advantages[7], packed.logprobs[7]) == (False, 0.0, 0.0)


def test_rollout_longer_than_the_budget_is_cut() -> None:
    [packed] = pack([group_of(0, 1, lengths=(20, 3))], Packing(seq_len=8))
    assert [each.token_ids.tolist() for each in packed] == [list(range(8)), [100, 101, 102]]


def test_names_that_the_trainers_metrics_need_are_said_otherwise() -> None:
    groups = [group_of(0, 1, lengths=(3, 3), environment=name) for name in ("", "all", "code")]
    [[packed]] = pack(groups, Packing(seq_len=64))
    assert {name for name, _ in packed.environments} == {"default", "all_", "code"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seq_len", [20, 64])
def test_every_rank_has_as_many_micro_batches_and_together_all_tokens(ranks: int, seq_len: int) -> None:
    rng = np.random.default_rng(ranks)
    groups = [group_of(0, 1, 2, lengths=[int(n) for n in rng.integers(3, 18, 3)]) for _ in range(5)]
    shares = pack(groups, Packing(seq_len=seq_len, data_ranks=ranks, pad_to_multiple_of=2))
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    # The middle sample of each group has no advantage.
    expected = sum(sample.loss_tokens for group in groups for sample in group.samples[::2])
    assert sum(int(each.loss_mask.sum()) for share in shares for each in share) == expected
    assert all(each.tokens <= seq_len and each.tokens % 2 == 0 for share in shares for each in share)
    loads = [sum(each.tokens for each in share) for share in shares]
    assert max(loads) - min(loads) <= seq_len


def test_routed_experts_are_never_packed_beside_rollouts_without_them() -> None:
    groups = [group_of(0, 1, lengths=(3, 4), experts=True), group_of(0, 1, lengths=(3, 3))]
    [packed] = pack(groups, Packing(seq_len=64, pad_to_multiple_of=8))
    assert [each.lengths for each in packed] == [(4, 4), (3, 5)]
    experts = packed[0].routed_experts
    assert experts is not None
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert packed[1].routed_experts is None


def test_bytes_hold_every_field_in_order_and_leave_out_what_ends_them_empty() -> None:
    packing = Packing(seq_len=64, pad_to_multiple_of=8, temperature=0.5)
    [packed] = pack([group_of(0, 1, lengths=(3, 4), experts=True)], packing)
    [micro] = decode(encode(packed))
    assert tuple(micro) == FIELDS[:11]
    assert micro == {
        "input_ids": [100, 101, 102, 103, 0, 1, 2, 1],
        "loss_mask": [False, False, True, True, False, False, True, False],
        "advantages": [0.5] * 4 + [-0.5] * 3 + [0.0],
        "inference_logprobs": [0, 0, -0.5, -0.5, 0, 0, -0.25, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
        "sequence_lengths": [4, 4],
        "temperatures": [0.5] * 7 + [1.0],
        "env_names": ["math"] * 7 + [""],
        "seq_lens": [4, 4],
        "ref_logprobs": None,
        "routed_experts": [bytes([1] * 8 + [0] * 8), [8, 2, 1], "uint8"],
    }
    [packed] = pack([group_of(0, 1, lengths=(3, 4), columns=("ref_kl_weights",))], packing)
    [micro] = decode(encode(packed))
    assert tuple(micro) == FIELDS
    assert [name for name, value in micro.items() if value is None] == [
        "ref_logprobs", "routed_experts", "mm_kwargs", "mm_token_type_ids", "rl_weights", "ce_weights",
    ]  # fmt: skip
    assert micro["ref_kl_weights"] == [1, 1.125, 1.25, 1.375, 0, 0.125, 0.25, 0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seq_len": 0}, "seq_len"),
        ({"seq_len": 30}, "seq_len"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"data_ranks": 0}, "data_ranks"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        Packing(**({"seq_len": 32, "pad_to_multiple_of": 4} | changes))
