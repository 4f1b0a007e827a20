"""Micro-batches of bounded size: every sample in one, none cut, the parts as equal as few parts can be."""

import itertools

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.support.push import GroupArrays, SampleArrays
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import PackedBatch, PaddedBatch, collate, micro_batches, pack
from trainer_client.collate.splitting import packed_parts, padded_parts


def batch_of(lengths: list[int], group_size: int = 2) -> Batch:
    """Samples of these lengths, in groups."""
    rng = np.random.default_rng(1)
    samples = [
        SampleArrays(
            token_ids=rng.integers(0, 1000, n, np.int32),
            logprobs=-rng.random(n, np.float32),
            loss_mask=np.array([0] + [1] * (n - 1), np.uint8),
            prompt_len=1,
            reward=float(i),
            spans=[(1, 0, 1, n)],
        )
        for i, n in enumerate(lengths)
    ]
    cut = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    return assemble(pull_messages([GroupArrays(task_id=f"t{i}", samples=group) for i, group in enumerate(cut)]))


LONG_TAILED = [int(n) for n in np.random.default_rng(7).lognormal(4, 1, 200).clip(4, 900)]


def test_every_sample_is_in_one_part_and_whole() -> None:
    batch = batch_of(LONG_TAILED)
    samples = list(batch.samples)
    parts = micro_batches(batch, max_tokens=1000)
    assert all(isinstance(part, PackedBatch) for part in parts)
    seen = [i for part in parts for i in part.sample_index.tolist()]
    assert sorted(seen) == list(range(200))
    assert [part.sample_index[0] for part in parts] == sorted(part.sample_index[0] for part in parts)
    for part in parts:
        assert len(part.token_ids) <= 1000
        assert part.sample_index.tolist() == sorted(part.sample_index.tolist())
        assert part.group_index.tolist() == [i // 2 for i in part.sample_index.tolist()]
        for i, (start, end) in zip(part.sample_index, itertools.pairwise(part.cu_seqlens.tolist()), strict=True):
            np.testing.assert_array_equal(part.token_ids[start:end].numpy(), samples[i].token_ids)
            assert part.rewards[(part.sample_index == i).nonzero()[0, 0]] == samples[i].reward


def test_the_parts_are_few_and_equal() -> None:
    parts = packed_parts(LONG_TAILED, 1000)
    loads = [sum(LONG_TAILED[i] for i in part) for part in parts]
    least = -(-sum(LONG_TAILED) // 1000)
    assert least <= len(parts) <= least * 11 / 9 + 1  # first-fit-decreasing's bound
    assert max(loads) <= 1000
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def test_a_shard_that_fits_is_one_part_in_order() -> None:
    assert packed_parts([3, 9, 5], 100) == padded_parts([3, 9, 5], 100) == [[0, 1, 2]]
    assert packed_parts([], 100) == padded_parts([], 100) == []
    assert packed_parts([6, 6, 6, 6], 12) == [[0, 1], [2, 3]]


def test_padded_parts_hold_neighbours_by_length() -> None:
    lengths = [10, 100, 11, 98, 12, 9]
    assert padded_parts(lengths, 200) == [[0, 2, 4, 5], [1, 3]]
    parts = padded_parts(LONG_TAILED, 2000)
    areas = [len(part) * max(LONG_TAILED[i] for i in part) for part in parts]
    assert sorted(i for part in parts for i in part) == list(range(200))
    assert max(areas) <= 2000
    assert sum(areas) < 1.25 * sum(LONG_TAILED)
    assert len(parts) <= len(packed_parts(LONG_TAILED, 2000)) + 2


@pytest.mark.parametrize("multiple_of", [1, 16, 64])
def test_the_bound_holds_with_padding(multiple_of: int) -> None:
    batch = batch_of(LONG_TAILED)
    for part in micro_batches(batch, max_tokens=1000, multiple_of=multiple_of):
        assert len(part.token_ids) <= 1000
        assert len(part.token_ids) % multiple_of == 0
    for padded in micro_batches(batch, max_tokens=1000, multiple_of=multiple_of, layout="padded", pad_side="left"):
        assert isinstance(padded, PaddedBatch)
        assert padded.token_ids.numel() <= 1000
        assert padded.token_ids.shape[1] % multiple_of == 0
        assert padded.attention_mask[:, -1].all()


def test_the_same_shard_is_cut_the_same_way() -> None:
    once, again = (micro_batches(batch_of(LONG_TAILED), max_tokens=700) for _ in range(2))
    assert [part.sample_index.tolist() for part in once] == [part.sample_index.tolist() for part in again]


def test_a_sample_that_exceeds_the_bound_is_named() -> None:
    batch = batch_of([10, 20, 30, 25])
    with pytest.raises(InvalidField, match=r"at least 30 for sample 2 \(of task 't1'\) and its 30 tokens") as raised:
        micro_batches(batch, max_tokens=29)
    assert raised.value.attributes["field"] == "max_tokens"
    with pytest.raises(InvalidField, match="at least 32 for sample 2"):
        micro_batches(batch, max_tokens=31, multiple_of=8, layout="padded")
    with pytest.raises(InvalidField, match="'padded' or 'packed'"):
        micro_batches(batch, max_tokens=100, layout="flat")  # type: ignore[call-overload]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_losses_and_gradients_of_parts_add_up_to_the_whole(layout: str) -> None:
    """Token-mean over the step's total, with an advantage of each sample, in float64."""
    batch = batch_of(LONG_TAILED[:40])
    advantages = np.random.default_rng(5).standard_normal(40)
    weight = torch.linspace(-1, 1, 1000, dtype=torch.float64, requires_grad=True)

    def loss(part: PackedBatch | PaddedBatch) -> torch.Tensor:
        assert part.advantages is not None
        per_token = weight[part.token_ids] * part.logprobs.double() * part.advantages.double()
        return (per_token * part.loss_mask).sum() / part.total_loss_tokens

    whole = loss(collate(batch, advantages=advantages))
    (expected,) = torch.autograd.grad(whole, weight)
    parts = micro_batches(batch, max_tokens=950, layout=layout, advantages=advantages)  # type: ignore[call-overload]
    assert len(parts) > 2
    summed = sum(loss(part) for part in parts)
    assert isinstance(summed, torch.Tensor)
    (gradient,) = torch.autograd.grad(summed, weight)
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(loss(pack(batch, advantages=advantages)), whole, rtol=1e-12, atol=0)
