"""The functions that docs/coming_from shows do what the pages say, on a batch with prompts of two lengths."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT, blocks
from tests.support.push import GroupArrays, arrays_for
from tests.trainer_client.fake_service import pull_messages
from tests.trainer_client.test_batch import assemble
from trainer_client.batch import Batch


def with_prompt(group: GroupArrays, prompt_len: int) -> GroupArrays:
    """The group with the first of its responses' tokens counted to the prompts."""
    samples = []
    for sample in group.samples:
        mask = sample.loss_mask.copy()
        mask[:prompt_len] = 0
        spans = [(term, version, prompt_len, end) for term, version, _, end in sample.spans]
        samples.append(
            replace(sample, prompt_len=prompt_len, loss_mask=mask, logprobs=sample.logprobs * mask, spans=spans)
        )
    return replace(group, samples=samples)


@pytest.fixture
def batch() -> Batch:
    groups = [
        arrays_for("a", version=3, response_len=8),
        with_prompt(arrays_for("b", version=4, response_len=5), 6),
    ]
    return assemble(pull_messages(groups, step=1, train_version=4, head_version=3, tail_version=4))


def shown(page: str, name: str) -> Callable[..., Any]:
    """The function that a page shows."""
    names: dict[str, Any] = {}
    (block,) = (block for block in blocks(ROOT / f"docs/coming_from/{page}.md") if f"def {name}(" in block.text)
    exec(compile(block.text, block.where, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


def test_areals_tensors_have_the_documented_shapes_and_types(batch: Batch) -> None:
    tensors = shown("areal", "areal_batch")(batch)
    samples = list(batch.samples)
    width = max(sample.tokens for sample in samples)
    per_token = {name: tensor for name, tensor in tensors.items() if name != "rewards"}
    assert {tuple(tensor.shape) for tensor in per_token.values()} == {(4, width)}
    assert tensors["rewards"].tolist() == pytest.approx([sample.reward for sample in samples])
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    assert types == {
        "input_ids": torch.int32,
        "attention_mask": torch.bool,
        "loss_mask": torch.int32,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "rewards": torch.float32,
    }
    for row, sample in enumerate(samples):
        assert tensors["input_ids"][row, : sample.tokens].tolist() == sample.token_ids.tolist()
        assert tensors["versions"][row, : sample.tokens].tolist() == sample.versions.tolist()
        assert int(tensors["attention_mask"][row].sum()) == sample.tokens


def test_verls_tensors_meet_between_prompt_and_response(batch: Batch) -> None:
    tensors, uids = shown("verl", "verl_tensors")(batch, pad_token_id=99)
    samples = list(batch.samples)
    assert uids == [group.task_id for group in batch.groups for _ in group.samples]
    longest = max(sample.tokens - sample.prompt_len for sample in samples)
    of_responses, whole = (
        {tensors[name].shape for name in names}
        for names in (
            ("responses", "response_mask", "rollout_log_probs", "rm_scores"),
            ("input_ids", "attention_mask", "position_ids"),
        )
    )
    assert (tensors["prompts"].shape, of_responses, whole) == ((4, 6), {(4, longest)}, {(4, 6 + longest)})
    for row, sample in enumerate(samples):
        here = tensors["attention_mask"][row].bool()
        assert tensors["input_ids"][row][here].tolist() == sample.token_ids.tolist()
        assert tensors["position_ids"][row][here].tolist() == list(range(sample.tokens))
        length = sample.tokens - sample.prompt_len
        assert tensors["responses"][row, :length].tolist() == sample.token_ids[sample.prompt_len :].tolist()
        assert (tensors["responses"][row, length:] == 99).all()
        assert tensors["response_mask"][row, :length].tolist() == sample.loss_mask[sample.prompt_len :].tolist()
        assert tensors["rollout_log_probs"][row, :length].tolist() == sample.logprobs[sample.prompt_len :].tolist()
        assert tensors["rm_scores"][row].nonzero().flatten().tolist() in ([length - 1], [])
        assert float(tensors["rm_scores"][row].sum()) == pytest.approx(sample.reward)
