"""Batches laid end to end, positions and advantages of both layouts, and that a model sees the same in either."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import collate, pack

if TYPE_CHECKING:
    from trainer_client.collate import PackedBatch, PaddedBatch

GROUP_SIZES = (3, 1, 4)


@pytest.fixture
def batch() -> Batch:
    groups = [arrays_for(f"t{i}", group_size=size, version=2) for i, size in enumerate(GROUP_SIZES)]
    return assemble(pull_messages(groups, step=5, train_version=4, head_version=2, tail_version=2))


def segments(packed: "PackedBatch") -> list[slice]:
    """Tell where each sample lies."""
    bounds = packed.cu_seqlens.tolist()[: len(packed.lengths) + 1]
    return [slice(start, end) for start, end in pairwise(bounds)]


def test_samples_lie_end_to_end(batch: Batch) -> None:
    packed = pack(batch)
    samples = list(batch.samples)
    total = sum(sample.tokens for sample in samples)
    assert packed.token_ids.shape == packed.position_ids.shape == packed.segment_ids.shape == (total,)
    assert packed.token_ids.dtype == packed.position_ids.dtype == packed.segment_ids.dtype == torch.int64
    assert packed.versions.dtype == torch.int64
    assert packed.loss_mask.dtype == torch.bool
    assert packed.logprobs.dtype == torch.float32
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.shape == (len(samples) + 1,)
    assert packed.max_seqlen == max(sample.tokens for sample in samples)
    assert packed.pad_tokens == 0
    assert packed.advantages is None
    for i, (sample, at) in enumerate(zip(samples, segments(packed), strict=True)):
        np.testing.assert_array_equal(packed.token_ids[at].numpy(), sample.token_ids)
        np.testing.assert_array_equal(packed.logprobs[at].numpy(), sample.logprobs)
        np.testing.assert_array_equal(packed.loss_mask[at].numpy(), sample.loss_mask.astype(bool))
        np.testing.assert_array_equal(packed.versions[at].numpy(), sample.versions)
        assert packed.position_ids[at].tolist() == list(range(sample.tokens))
        assert packed.segment_ids[at].tolist() == [i] * sample.tokens


def test_padding_is_a_segment_of_its_own_that_no_loss_sees(batch: Batch) -> None:
    bare, packed = pack(batch), pack(batch, multiple_of=64, pad_token_id=-7)
    total = len(bare.token_ids)
    assert len(packed.token_ids) == -(-total // 64) * 64
    assert packed.pad_tokens == len(packed.token_ids) - total > 0
    assert packed.cu_seqlens.tolist() == [*bare.cu_seqlens.tolist(), len(packed.token_ids)]
    assert packed.max_seqlen == max(bare.max_seqlen, packed.pad_tokens)
    pad = slice(total, None)
    assert (packed.token_ids[pad] == -7).all()
    assert packed.position_ids[pad].tolist() == list(range(packed.pad_tokens))
    assert not packed.loss_mask[pad].any()
    assert (packed.logprobs[pad] == 0).all()
    assert (packed.versions[pad] == -1).all()
    assert (packed.segment_ids[pad] == -1).all()
    for name in ("token_ids", "position_ids", "loss_mask", "logprobs", "versions", "segment_ids"):
        assert torch.equal(getattr(packed, name)[:total], getattr(bare, name))


def test_a_row_that_is_full_has_no_padding_segment(batch: Batch) -> None:
    total = len(pack(batch).token_ids)
    packed = pack(batch, multiple_of=total)
    assert packed.pad_tokens == 0
    assert len(packed.cu_seqlens) == len(packed.lengths) + 1


def test_facts_are_those_of_the_padded_batch(batch: Batch) -> None:
    packed, padded = pack(batch), collate(batch)
    for name in ("rewards", "group_index", "sample_index", "prompt_len", "lengths", "staleness"):
        assert torch.equal(getattr(packed, name), getattr(padded, name))
    assert packed.group_index.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert packed.sample_index.tolist() == list(range(8))
    assert (packed.step, packed.train_version, packed.final) == (5, 4, True)
    assert packed.total_loss_tokens == padded.total_loss_tokens == batch.info.total_loss_tokens


def test_an_empty_shard_is_an_empty_row(batch: Batch) -> None:
    packed = pack(batch, groups=[], multiple_of=8)
    assert packed.token_ids.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.max_seqlen == packed.pad_tokens == 0


@pytest.mark.parametrize("pad_side", ["right", "left"])
def test_positions_begin_at_each_samples_first_token(batch: Batch, pad_side: str) -> None:
    padded = collate(batch, pad_side=pad_side)  # type: ignore[arg-type]
    assert padded.position_ids.dtype == torch.int64
    for i, length in enumerate(padded.lengths.tolist()):
        there = padded.attention_mask[i]
        assert padded.position_ids[i][there].tolist() == list(range(length))
        assert (padded.position_ids[i][~there] == 0).all()


def both(batch: Batch, advantages: object) -> "tuple[PaddedBatch, PackedBatch]":
    return (
        collate(batch, advantages=advantages, pad_side="left"),  # type: ignore[arg-type]
        pack(batch, advantages=advantages, multiple_of=32),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_an_advantage_of_a_sample_is_spread_over_its_loss_tokens(batch: Batch, kind: type) -> None:
    given = [0.5, -1.0, 2.0, 0.25, -0.125, 1.0, 3.0, 0.0]
    for made in both(batch, kind(given)):
        assert made.advantages is not None
        assert made.sample_advantages is not None
        assert made.advantages.dtype == made.sample_advantages.dtype == torch.float32
        assert made.sample_advantages.tolist() == given
        assert made.advantages.shape == made.token_ids.shape
        assert (made.advantages[~made.loss_mask] == 0).all()
        counts = [sample.loss_tokens for sample in batch.samples]
        spread = [value for value, count in zip(given, counts, strict=True) for _ in range(count)]
        assert made.advantages[made.loss_mask].tolist() == spread


def test_advantages_of_tokens_lie_where_their_tokens_are(batch: Batch) -> None:
    samples = list(batch.samples)
    rng = np.random.default_rng(3)
    given = [rng.standard_normal(sample.tokens).astype(np.float32) for sample in samples]
    padded, packed = both(
        batch, [torch.from_numpy(each).requires_grad_() if i % 2 else each.tolist() for i, each in enumerate(given)]
    )
    assert padded.advantages is not None
    assert packed.advantages is not None
    assert padded.sample_advantages is packed.sample_advantages is None
    for i, at in enumerate(segments(packed)):
        np.testing.assert_array_equal(padded.advantages[i][padded.attention_mask[i]].numpy(), given[i])
        np.testing.assert_array_equal(packed.advantages[at].numpy(), given[i])
    assert (padded.advantages[~padded.attention_mask] == 0).all()
    assert (packed.advantages[packed.segment_ids < 0] == 0).all()


@pytest.mark.parametrize(
    ("given", "field"),
    [([0.0] * 7, "advantages"), ([[0.0, 1.0]] * 8, "advantages[0]"), (np.zeros((8, 2)), "advantages[0]")],
)
def test_advantages_of_another_number_are_refused(batch: Batch, given: object, field: str) -> None:
    for make in (collate, pack):
        with pytest.raises(InvalidField) as raised:
            make(batch, advantages=given)  # type: ignore[arg-type]
        assert raised.value.attributes["field"] == field


def test_a_model_gives_the_same_logits_in_either_layout(batch: Batch) -> None:
    """transformers 5 recognises packed samples by positions that begin anew (batch of one row, no mask)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.train(mode=False)
    packed = pack(batch, multiple_of=32)
    with torch.no_grad():
        row = {"input_ids": packed.token_ids[None], "position_ids": packed.position_ids[None]}
        flat = model(**row, use_cache=False).logits[0]
        for side in ("right", "left"):
            padded = collate(batch, pad_side=side)
            logits = model(
                input_ids=padded.token_ids,
                attention_mask=padded.attention_mask,
                position_ids=padded.position_ids,
                use_cache=False,
            ).logits
            for i, at in enumerate(segments(packed)):
                torch.testing.assert_close(flat[at], logits[i][padded.attention_mask[i]], rtol=1e-4, atol=1e-5)
