"""Stands in for the engine: samples from a model in this process, in the arrays that the learner takes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.demo import reward, vocabulary
from examples.demo.learner import TrainBatch
from examples.demo.tasks import ArithmeticTask
from trainer_client.objectives import grpo_advantages


@torch.no_grad()
def rollout(
    model: Qwen3ForCausalLM,
    tasks: Sequence[ArithmeticTask],
    samples: int,
    max_new_tokens: int,
    generator: torch.Generator,
    staleness: int = 0,
) -> tuple[TrainBatch, float]:
    """A batch of `samples` samples of each task at temperature 1, and its mean reward."""
    repeated = [task for task in tasks for _ in range(samples)]
    rows = torch.arange(len(repeated))
    prompt_len = torch.tensor([len(task.prompt_ids) for task in repeated])
    width = int(prompt_len.max()) + max_new_tokens
    token_ids = torch.full((len(repeated), width), vocabulary.PAD_ID)
    for row, task in enumerate(repeated):
        token_ids[row, : prompt_len[row]] = torch.tensor(task.prompt_ids)
    logprobs = torch.zeros(len(repeated), width)
    mask = torch.zeros(len(repeated), width, dtype=torch.bool)
    alive = torch.ones(len(repeated), dtype=torch.bool)
    for offset in range(max_new_tokens):
        at = prompt_len + offset
        logits = model(input_ids=token_ids[:, : int(at.max())]).logits[rows, at - 1]
        distribution = torch.log_softmax(logits.float(), dim=-1)
        drawn = torch.multinomial(distribution.exp(), 1, generator=generator).squeeze(1)
        here = (rows[alive], at[alive])
        token_ids[here] = drawn[alive]
        logprobs[here] = distribution[rows, drawn][alive]
        mask[here] = True
        alive &= drawn != vocabulary.EOS_ID
        if not alive.any():
            break
    rewards = torch.tensor(
        [reward.exact_match(_response(token_ids[row], mask[row]), task.answer) for row, task in enumerate(repeated)]
    )
    batch = TrainBatch(
        token_ids=token_ids,
        prompt_len=prompt_len,
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        advantages=grpo_advantages(rewards.view(-1, samples)).reshape(-1),
        staleness=torch.full((len(repeated),), staleness),
    )
    return batch, float(rewards.mean())


def _response(token_ids: Tensor, mask: Tensor) -> list[int]:
    response: list[int] = token_ids[mask].tolist()
    return response
