"""The warm-up stops at its target, and its expected exact match is the one that sampling finds."""

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from examples.demo.model import build_model
from examples.demo.tasks import MAX_ANSWER_TOKENS, ChainSums
from examples.demo.warmup import (
    WarmUpConfig,
    WarmUpFailed,
    WarmUpReport,
    expected_exact_match,
    teacher_batch,
    warm_up,
)
from tests.demo_parts.sampler import rollout


def test_it_stops_as_soon_as_the_target_is_reached(warmed_up: tuple[Qwen3ForCausalLM, WarmUpReport]) -> None:
    model, report = warmed_up
    assert 0.3 <= report.exact_match < 0.36
    assert 0 < report.steps < 100
    fresh = [ChainSums(seed=77)[i] for i in range(400)]
    assert expected_exact_match(model, *teacher_batch(fresh)) == pytest.approx(report.exact_match, abs=0.06)


def test_expected_exact_match_is_what_sampling_finds(model: Qwen3ForCausalLM) -> None:
    tasks = [ChainSums(seed=4)[i] for i in range(40)]
    expected = expected_exact_match(model, *teacher_batch(tasks))
    _, found = rollout(model, tasks, 50, MAX_ANSWER_TOKENS, torch.Generator().manual_seed(0))
    # Standard error of 2,000 samples, at most.
    assert found == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 2000))


def test_teacher_batches_mask_the_response_only() -> None:
    tasks = [ChainSums(seed=4, max_terms=3)[i] for i in range(20)]
    token_ids, mask = teacher_batch(tasks)
    for row, task in enumerate(tasks):
        assert token_ids[row][mask[row]].tolist() == task.answer_ids
        assert token_ids[row, : len(task.prompt_ids)].tolist() == task.prompt_ids


def test_a_target_out_of_reach_is_an_error_with_what_was_reached() -> None:
    with pytest.raises(WarmUpFailed, match=r"in 2 steps, its target is 0\.9"):
        warm_up(build_model(1), ChainSums(seed=1), WarmUpConfig(target_exact_match=0.9, max_steps=2))
