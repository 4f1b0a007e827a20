"""Further columns of a batch: laid out as their tokens, in the dtype that was pushed, or refused by name."""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import groups_pb2
from tests.support.push import Extra, GroupArrays, arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import Ragged, collate, micro_batches, pack

NAMES = ("routed_experts", "hidden", "scores", "images")
ITEM = (2, 3)


class Bfloat16Group(GroupArrays):
    """The column `hidden` is bfloat16, whose bits numpy holds as uint16."""

    def to_wire(self, worker_id: str = "tester") -> tuple[groups_pb2.GroupHeader, bytes]:
        header, payload = GroupArrays.to_wire(self, worker_id)
        for column in header.columns:
            if column.name == "hidden":
                column.dtype = groups_pb2.D_TYPE_BFLOAT16
        return header, payload


def group_of(task_id: str, *, size: int, without: str = "", experts: type = np.uint8) -> GroupArrays:
    """A group with a column of each axis; the same arguments give the same arrays."""
    plain = arrays_for(task_id, group_size=size)
    rng = np.random.default_rng(size)
    lengths = [len(sample.token_ids) for sample in plain.samples]
    extras = {
        "routed_experts": Extra(
            axis=groups_pb2.AXIS_TOKEN, arrays=[rng.integers(1, 128, (n, *ITEM)).astype(experts) for n in lengths]
        ),
        "hidden": Extra(
            axis=groups_pb2.AXIS_TOKEN,
            arrays=[torch.randn(n, 4).bfloat16().view(torch.uint16).numpy() for n in lengths],
        ),
        "scores": Extra(axis=groups_pb2.AXIS_SAMPLE, arrays=[rng.standard_normal(2) for _ in lengths]),
        "images": Extra(
            axis=groups_pb2.AXIS_RAGGED,
            arrays=[rng.standard_normal((int(rng.integers(0, 4)), 5)).astype(np.float16) for _ in lengths],
        ),
    }
    extras.pop(without, None)
    return Bfloat16Group(task_id=task_id, samples=plain.samples, extras=extras)


@pytest.fixture
def batch() -> Batch:
    return assemble(pull_messages([group_of("a", size=2), group_of("b", size=3)]))


def ragged(made: object) -> Ragged:
    assert isinstance(made, Ragged)
    return made


def bits(tensor: object) -> npt.NDArray[np.generic]:
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.uint16).numpy()


@pytest.mark.parametrize("pad_side", ["right", "left"])
def test_padded_columns_lie_beside_their_tokens(batch: Batch, pad_side: str) -> None:
    fill = {"routed_experts": 255}
    padded = collate(batch, extras="all", extras_fill=fill, pad_side=pad_side)  # type: ignore[arg-type]
    assert set(padded.extras) == set(NAMES)
    experts, hidden = padded.extras["routed_experts"], padded.extras["hidden"]
    assert isinstance(experts, torch.Tensor)
    assert experts.dtype == torch.uint8
    assert experts.shape == (*padded.token_ids.shape, *ITEM)
    for i, sample in enumerate(batch.samples):
        there = padded.attention_mask[i].numpy()
        np.testing.assert_array_equal(experts[i].numpy()[there], sample.extras["routed_experts"])
        np.testing.assert_array_equal(bits(hidden)[i][there], sample.extras["hidden"])
    padding = ~padded.attention_mask
    assert padding.any()
    assert (experts[padding] == 255).all()
    assert isinstance(hidden, torch.Tensor)
    assert (hidden[padding] == 0).all()


def test_packed_columns_lie_beside_their_tokens(batch: Batch) -> None:
    packed = pack(batch, extras=("routed_experts", "hidden"), multiple_of=64, extras_fill=7)
    assert set(packed.extras) == {"routed_experts", "hidden"}
    experts, hidden = packed.extras["routed_experts"], packed.extras["hidden"]
    assert isinstance(experts, torch.Tensor)
    assert isinstance(hidden, torch.Tensor)
    assert experts.shape == (len(packed.token_ids), *ITEM)
    bounds = packed.cu_seqlens.tolist()
    for sample, (start, end) in zip(batch.samples, pairwise(bounds[:-1]), strict=True):
        np.testing.assert_array_equal(experts[start:end].numpy(), sample.extras["routed_experts"])
        np.testing.assert_array_equal(bits(hidden)[start:end], sample.extras["hidden"])
    assert packed.pad_tokens > 0
    assert (experts[-packed.pad_tokens :] == 7).all()
    assert (hidden[-packed.pad_tokens :] == 7).all()


def test_columns_of_samples_are_stacked_and_ragged_ones_come_with_offsets(batch: Batch) -> None:
    samples = list(batch.samples)
    for made in (collate(batch, extras=("scores", "images")), pack(batch, extras=("scores", "images"))):
        scores = made.extras["scores"]
        assert isinstance(scores, torch.Tensor)
        assert scores.dtype == torch.float64
        np.testing.assert_array_equal(scores.numpy(), np.stack([sample.extras["scores"] for sample in samples]))
        images = ragged(made.extras["images"])
        assert images.values.dtype == torch.float16
        assert images.offsets.dtype == torch.int64
        assert images.offsets.tolist()[0] == 0
        assert images.values.shape == (images.offsets[-1], 5)
        for sample, (start, end) in zip(samples, pairwise(images.offsets.tolist()), strict=True):
            np.testing.assert_array_equal(images.values[start:end].numpy(), sample.extras["images"])


def test_nothing_is_collated_that_was_not_asked_for(batch: Batch) -> None:
    assert collate(batch).extras == pack(batch).extras == {}


def test_an_unknown_name_is_refused_with_those_there_are(batch: Batch) -> None:
    with pytest.raises(InvalidField, match="one of hidden, images, routed_experts, scores") as raised:
        collate(batch, extras=("experts",))
    assert raised.value.attributes["field"] == "extras"
    with pytest.raises(InvalidField, match="there are no extras"):
        pack(assemble(pull_messages([arrays_for("a")])), extras=("experts",))
    with pytest.raises(InvalidField, match="sequence of names"):
        pack(batch, extras="hidden")


def test_a_column_that_some_groups_lack_is_refused_by_the_task(batch: Batch) -> None:
    mixed = assemble(pull_messages([group_of("a", size=2), group_of("b", size=3, without="routed_experts")]))
    with pytest.raises(InvalidField, match="absent from task 'b'"):
        collate(mixed, extras="all")
    assert set(collate(mixed, extras=("hidden",)).extras) == {"hidden"}


def test_of_a_ragged_column_a_group_may_have_nothing() -> None:
    mixed = assemble(pull_messages([group_of("a", size=2, without="images"), group_of("b", size=3)]))
    images = ragged(pack(mixed, extras="all").extras["images"])
    assert images.offsets.tolist()[:3] == [0, 0, 0]
    assert images.values.shape == (sum(len(s.extras["images"]) for s in mixed.groups[1].samples), 5)


def test_groups_that_differ_in_a_column_are_refused() -> None:
    mixed = assemble(pull_messages([group_of("a", size=2), group_of("b", size=3, experts=np.int16)]))
    with pytest.raises(
        InvalidField, match=r"uint8 \[2, 3\] per token in task 'a'.*int16 \[2, 3\] per token, as in other"
    ):
        collate(mixed, extras=("routed_experts",))


@pytest.mark.parametrize("fill", [256, -1, 0.5, math.nan, math.inf])
def test_a_fill_that_the_dtype_cannot_hold_is_refused(batch: Batch, fill: float) -> None:
    with pytest.raises(InvalidField, match="a whole number from 0 to 255"):
        collate(batch, extras=("routed_experts",), extras_fill=fill)


def test_an_empty_shard_has_no_columns(batch: Batch) -> None:
    assert collate(batch, groups=[], extras=("routed_experts",)).extras == {}


def test_micro_batches_carry_their_samples_columns(batch: Batch) -> None:
    samples = list(batch.samples)
    parts = micro_batches(batch, max_tokens=30, extras="all")
    assert len(parts) > 1
    for part in parts:
        images, experts = ragged(part.extras["images"]), part.extras["routed_experts"]
        assert isinstance(experts, torch.Tensor)
        for i, (at, (start, end)) in enumerate(zip(part.sample_index, pairwise(part.cu_seqlens.tolist()), strict=True)):
            np.testing.assert_array_equal(experts[start:end].numpy(), samples[at].extras["routed_experts"])
            first, last = images.offsets[i], images.offsets[i + 1]
            np.testing.assert_array_equal(images.values[first:last].numpy(), samples[at].extras["images"])


def test_columns_move_to_a_device_with_the_batch(batch: Batch) -> None:
    moved = pack(batch, extras="all").to("meta")
    hidden = moved.extras["hidden"]
    assert isinstance(hidden, torch.Tensor)
    tensors = (*ragged(moved.extras["images"]), hidden, moved.token_ids, moved.rewards)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
