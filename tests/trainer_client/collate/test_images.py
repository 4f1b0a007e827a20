"""Inputs of a vision model for collated samples: of each image once, in the samples' order, beside their tokens."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from rollout_buffer.v1 import groups_pb2
from tests.support.push import GroupArrays, arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client import ImageRef
from trainer_client.batch import Batch, Group
from trainer_client.collate import collate, micro_batches, pack
from trainer_client.collate.images import ImageInputs

PATCHES = {"a": 4, "b": 2, "c": 1}
"""Patches of each image."""


class WithImages(GroupArrays):
    def to_wire(self, worker_id: str = "tester") -> tuple[groups_pb2.GroupHeader, bytes]:
        header, payload = GroupArrays.to_wire(self, worker_id)
        for i, name in enumerate(self.task_id):
            if name in PATCHES:
                header.images.add(sha256=name * 64, location=f"{name}.png", start=i, tokens=1 + i)
        return header, payload


@pytest.fixture
def batch() -> Batch:
    """A group of the images a and b, one of a, and one of none."""
    made = [arrays_for(task, group_size=2) for task in ("ab", "a", "x")]
    return assemble(pull_messages([WithImages(task_id=one.task_id, samples=one.samples) for one in made]))


class Seen:
    """A processor, and what it was asked for."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.inputs = ImageInputs(self._read, self._process)

    def _read(self, image: ImageRef) -> bytes:
        self.read.append(image.location)
        return image.sha256[:1].encode()

    def _process(self, data: bytes) -> Mapping[str, torch.Tensor]:
        patches = PATCHES[data.decode()]
        values = torch.full((patches, 3), float(ord(data)))
        return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, patches, 1]])}


def test_references_are_the_group_s(batch: Batch) -> None:
    first, _, last = batch.groups
    assert first.images == (
        ImageRef(sha256="a" * 64, location="a.png", start=0, tokens=1),
        ImageRef(sha256="b" * 64, location="b.png", start=1, tokens=2),
    )
    assert last.images == ()


@pytest.mark.parametrize("pad_side", ["right", "left"])
def test_padded_samples_have_their_images_in_order(batch: Batch, pad_side: str) -> None:
    seen = Seen()
    padded = collate(batch, pad_side=pad_side)  # type: ignore[arg-type]
    made = seen.inputs(padded, batch.groups)
    assert made["pixel_values"][:, 0].tolist() == [97.0] * 4 + [98.0] * 2 + [97.0] * 4 + [98.0] * 2 + [97.0] * 8
    assert made["image_grid_thw"].tolist() == [[1, 4, 1], [1, 2, 1]] * 2 + [[1, 4, 1]] * 2
    kinds = made["mm_token_type_ids"]
    assert kinds.shape == padded.token_ids.shape
    for row, there, sample in zip(kinds, padded.attention_mask, groups_of(batch), strict=True):
        assert row[there].nonzero().flatten().tolist() == sample
    assert seen.read == ["a.png", "b.png"]
    seen.inputs(padded, batch.groups)
    assert seen.read == ["a.png", "b.png"]


def groups_of(batch: Batch) -> list[list[int]]:
    """Places of the placeholders of each sample."""
    return [
        [token for image in group.images for token in range(image.start, image.start + image.tokens)]
        for group in batch.groups
        for _ in group.samples
    ]


def test_packed_samples_and_parts_of_a_batch_too(batch: Batch) -> None:
    packed = pack(batch, multiple_of=64)
    kinds = Seen().inputs(packed, batch.groups)["mm_token_type_ids"]
    starts = packed.cu_seqlens.tolist()
    expected = [starts[i] + place for i, places in enumerate(groups_of(batch)) for place in places]
    assert np.flatnonzero(kinds.numpy()).tolist() == expected
    parts = micro_batches(batch, max_tokens=int(packed.lengths.max()) * 2, layout="packed")
    made = [Seen().inputs(part, batch.groups) for part in parts]
    assert sum(len(inputs.get("image_grid_thw", ())) for inputs in made) == 6


def test_without_images_there_is_nothing(batch: Batch) -> None:
    alone: list[Group] = [batch.groups[2]]
    assert Seen().inputs(collate(batch, groups=alone), alone) == {}
