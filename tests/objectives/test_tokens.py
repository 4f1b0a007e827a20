"""Alignment of log-probabilities with tokens, and spreading per-sample values over packed tokens."""

import numpy as np
import pytest
import torch

from buffer_wire.errors import InvalidField
from trainer_client.objectives import per_token, selected_logprobs


def test_logprobs_are_aligned_with_the_token_they_speak_of() -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(2, 4, 5)))
    token_ids = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
    got = selected_logprobs(logits, token_ids)
    assert torch.equal(got[:, 0], torch.zeros(2, dtype=torch.float64))
    for b in range(2):
        for t in range(1, 4):
            row = logits[b, t - 1].numpy()
            expected = row[token_ids[b, t]] - np.log(np.exp(row).sum())
            assert got[b, t].item() == pytest.approx(expected, rel=1e-12)


def test_logprobs_over_what_could_be_drawn_are_those_of_the_draw() -> None:
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(size=(2, 4, 6)), requires_grad=True)
    token_ids = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
    counts = torch.tensor([[0, 0, 2, 3], [0, 1, 0, 2]], dtype=torch.int32)
    kept = [[1, 5], [0, 4, 2], [2], [1, 3]]
    got = selected_logprobs(logits, token_ids, (torch.tensor([i for ids in kept for i in ids]), counts))
    drawn = iter(kept)
    for b in range(2):
        for t in range(1, 4):
            row = logits[b, t - 1].detach().numpy()
            of = next(drawn) if counts[b, t] else range(6)
            expected = row[token_ids[b, t]] - np.log(sum(np.exp(row[i]) for i in of))
            assert got[b, t].item() == pytest.approx(expected, abs=1e-12)
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    # A token that alone could be drawn has probability 1, whatever its logit.
    assert logits.grad[1, 0].abs().max() < 1e-12


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    token_ids = torch.tensor([[1, 2, 3]])
    got = selected_logprobs(logits, token_ids)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), selected_logprobs(logits.double(), token_ids).numpy(), atol=1e-6)


def test_per_token_repeats_each_value_over_its_sample() -> None:
    got = per_token(torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2, 0, 3]))
    assert got.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidField, match="logits"):
        selected_logprobs(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(InvalidField, match="token_ids"):
        selected_logprobs(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int32))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InvalidField, match=r"kept\[1\]"):
        selected_logprobs(torch.zeros(2, 3, 4), ids, (ids[0], ids[0]))
    with pytest.raises(InvalidField, match=r"kept\[0\].*as many as the counts say"):
        selected_logprobs(torch.zeros(2, 3, 4), ids, (ids[0], ids))
    with pytest.raises(InvalidField, match="values"):
        per_token(torch.zeros(2, 2), torch.tensor([1, 1]))
    with pytest.raises(InvalidField, match="token_counts"):
        per_token(torch.zeros(2), torch.tensor([1.0, 1.0]))
