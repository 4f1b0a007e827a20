"""Batches as padded torch tensors."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from tests.support.push import arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch
from trainer_client.collate import collate


@pytest.fixture
def batch() -> Batch:
    groups = [arrays_for(f"t{i}", group_size=3, version=2) for i in range(4)]
    return assemble(pull_messages(groups, step=5, train_version=4, head_version=2, tail_version=2))


@pytest.mark.parametrize("pad_side", ["right", "left"])
def test_every_token_is_where_its_sample_is(batch: Batch, pad_side: str) -> None:
    padded = collate(batch, pad_token_id=-7, pad_side=pad_side)  # type: ignore[arg-type]
    samples = list(batch.samples)
    width = max(sample.tokens for sample in samples)
    assert padded.token_ids.shape == (12, width)
    assert padded.token_ids.dtype == padded.versions.dtype == torch.int64
    assert padded.logprobs.dtype == padded.rewards.dtype == torch.float32
    assert padded.loss_mask.dtype == padded.attention_mask.dtype == torch.bool
    assert padded.prompt_len.dtype == padded.group_index.dtype == padded.lengths.dtype == torch.int64
    for i, sample in enumerate(samples):
        start = width - sample.tokens if pad_side == "left" else 0
        row = slice(start, start + sample.tokens)
        np.testing.assert_array_equal(padded.token_ids[i, row].numpy(), sample.token_ids)
        np.testing.assert_array_equal(padded.logprobs[i, row].numpy(), sample.logprobs)
        np.testing.assert_array_equal(padded.loss_mask[i, row].numpy(), sample.loss_mask.astype(bool))
        np.testing.assert_array_equal(padded.versions[i, row].numpy(), sample.versions)
        assert padded.attention_mask[i].sum() == sample.tokens
        assert padded.attention_mask[i, row].all()
    padding = ~padded.attention_mask
    assert padding.any()
    assert (padded.token_ids[padding] == -7).all()
    assert not padded.loss_mask[padding].any()
    assert (padded.logprobs[padding] == 0).all()
    assert (padded.versions[padding] == -1).all()


def test_facts_of_samples_and_of_the_step_come_along(batch: Batch) -> None:
    padded = collate(batch)
    assert padded.group_index.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert padded.rewards.tolist() == [sample.reward for sample in batch.samples]
    assert padded.prompt_len.tolist() == [3] * 12
    assert padded.lengths.tolist() == [sample.tokens for sample in batch.samples]
    assert padded.staleness.tolist() == [2] * 12
    info = batch.info
    assert (padded.step, padded.train_version) == (5, 4)
    assert (padded.total_groups, padded.total_samples) == (info.total_groups, info.total_samples)
    assert (padded.total_tokens, padded.total_loss_tokens) == (info.total_tokens, info.total_loss_tokens)


def test_the_width_is_a_multiple(batch: Batch) -> None:
    assert collate(batch, multiple_of=32).token_ids.shape == (12, 32)


def test_micro_batches_add_up_to_the_whole(batch: Batch) -> None:
    """A token-mean over the step's total is the same whole or in parts of any padding."""

    def loss(**chosen: object) -> float:
        padded = collate(batch, **chosen)  # type: ignore[arg-type]
        per_token = padded.logprobs.double() * (padded.token_ids % 13)
        return float((per_token * padded.loss_mask).sum() / padded.total_loss_tokens)

    parts = sum(loss(groups=batch.groups[i : i + 1], multiple_of=8, pad_side="left") for i in range(4))
    assert parts == pytest.approx(loss(), rel=1e-12)


def test_tensors_are_writable_and_own_their_memory(batch: Batch) -> None:
    padded = collate(batch)
    before = int(next(iter(batch.samples)).token_ids[0])
    padded.token_ids[0, 0] = before + 1
    assert int(next(iter(batch.samples)).token_ids[0]) == before


def test_a_batch_moves_to_a_device_as_one(batch: Batch) -> None:
    moved = collate(batch).to("meta")
    assert moved.token_ids.device.type == moved.rewards.device.type == "meta"
    assert moved.total_loss_tokens == batch.info.total_loss_tokens


def test_an_empty_shard_has_no_rows(batch: Batch) -> None:
    assert collate(batch, groups=[]).token_ids.shape == (0, 0)


@pytest.mark.parametrize(("option", "value"), [("multiple_of", 0), ("pad_side", "top")])
def test_bad_options_are_refused(batch: Batch, option: str, value: object) -> None:
    with pytest.raises(InvalidField) as raised:
        collate(batch, **{option: value})  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == option


def test_without_torch_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from trainer_client.collate import collate\n"
        "try: collate(None)\n"
        "except ImportError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'rollout-buffer[torch]'" in shown
