"""The supervised warm-up: right answers are shown until the model samples the right one now and then.

Reinforcement learning needs groups in which some samples are right and some wrong; a model with random weights
is never right. The warm-up stops as soon as the expected exact match reaches its target, and leaves the rest to the
reward.

The expected exact match under sampling at temperature 1 is known without sampling: the mean over tasks of
Π_t π(answer_t | prompt, answer_<t), the end token included.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.demo import vocabulary
from examples.demo.tasks import ArithmeticTask, ChainSums
from trainer_client.objectives import selected_logprobs


class WarmUpFailed(RuntimeError):
    """The target was not reached within the allowed steps."""


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """Settings of the warm-up: when to stop, and how to get there."""

    target_exact_match: float = 0.3
    """Expected share of right samples at temperature 1, between 0 and 1."""
    learning_rate: float = 1e-3
    batch_tasks: int = 128
    evaluation_tasks: int = 256
    max_steps: int = 400
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class WarmUpReport:
    """Result of the warm-up: what it took and reached."""

    steps: int
    exact_match: float
    wall_s: float


def warm_up(model: Qwen3ForCausalLM, tasks: ChainSums, config: WarmUpConfig | None = None) -> WarmUpReport:
    """Train `model` in place on tasks from the start of `tasks`.

    Raises `WarmUpFailed` after `max_steps`.
    """
    config = config or WarmUpConfig()
    started_s = time.perf_counter()
    stream = tasks.stream()
    evaluation = teacher_batch(list(islice(stream, config.evaluation_tasks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    reached = expected_exact_match(model, *evaluation)
    for step in range(config.max_steps + 1):
        if reached >= config.target_exact_match:
            return WarmUpReport(step, reached, time.perf_counter() - started_s)
        token_ids, mask = teacher_batch(list(islice(stream, config.batch_tasks)))
        logprobs = selected_logprobs(model(input_ids=token_ids).logits, token_ids)
        loss = -logprobs[mask].mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        reached = expected_exact_match(model, *evaluation)
    raise WarmUpFailed(
        f"the warm-up reached an exact match of {reached:.3f} in {config.max_steps} steps, "
        f"its target is {config.target_exact_match}"
    )


def teacher_batch(tasks: Sequence[ArithmeticTask]) -> tuple[Tensor, Tensor]:
    """Prompts with their right responses: token ids int64 [B, T], padded right, and their mask bool [B, T]."""
    rows = [(task.prompt_ids, task.answer_ids) for task in tasks]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids = torch.full((len(rows), length), vocabulary.PAD_ID, dtype=torch.int64)
    mask = torch.zeros((len(rows), length), dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : end] = True
    return token_ids, mask


@torch.no_grad()
def expected_exact_match(model: Qwen3ForCausalLM, token_ids: Tensor, mask: Tensor) -> float:
    """Mean probability that sampling at temperature 1 gives the whole masked response: 0 to 1.

    `token_ids`: int64 [B, T]. `mask`: bool [B, T], true on the response.
    """
    logprobs = selected_logprobs(model(input_ids=token_ids).logits, token_ids)
    return float(torch.where(mask, logprobs, 0.0).sum(dim=1).exp().mean())
