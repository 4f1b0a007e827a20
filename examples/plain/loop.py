"""A plain torch training loop on one process; the lines that take it to the buffer are marked with `# +`.

Everything else is what such a loop has anyway: a model, an optimizer, a loss, a checkpoint.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trainer_client import BufferClient, Group, Policy, SessionOptions, Task
from trainer_client.collate import PaddedBatch, collate
from trainer_client.objectives import aipo_loss, grpo_advantages, ratio_sums, selected_logprobs
from trainer_client.publish import FilesPublisher

POLICY = Policy(batch_groups=16, max_queued_groups=16, max_staleness=4)
"""Batches of 16 groups; of a full queue the oldest are dropped, and nothing older than 4 versions is trained on."""
CLIP = 4.0
"""δ of AIPO: how far the policy may have moved from the one that generated before a token's weight is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Settings of a run of the loop."""

    address: str
    """host:port of the service."""
    run_id: str
    steps: int
    """Optimizer steps in all, over every start."""
    checkpoint: Path
    """Written every `checkpoint_every` steps; where it exists, the loop goes on from it."""
    weights: Path
    """The published versions are kept here, for engines on the same disk."""
    checkpoint_every: int = 5
    learning_rate: float = 1e-3
    policy: Policy = POLICY
    timeout_s: float = 600.0
    """Longest wait for one batch."""
    is_useless: Callable[[Group], bool] | None = None
    """Tells a group that is given back for another one; None: every group is trained on."""


def train(
    model: PreTrainedModel,
    tasks: Iterable[Task],
    options: LoopOptions,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
) -> None:
    """Train `model` until `options.steps` steps are in it; `on_step` is given each step's metrics."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    next_step = load_checkpoint(options.checkpoint, model, optimizer)
    if next_step >= options.steps:
        return
    session_options = SessionOptions(pull_timeout_s=options.timeout_s, progress=True, on_step=on_step)
    with (
        BufferClient(options.address) as client,  # +
        FilesPublisher(options.weights) as publisher,  # +
        client.session(  # +
            options.run_id,
            policy=options.policy,
            tasks=tasks,
            publisher=publisher,
            next_step=next_step,
            options=session_options,
        ) as session,
    ):
        for batch in session:  # +
            if options.is_useless and (useless := [group for group in batch.groups if options.is_useless(group)]):
                batch = session.reject(batch, useless, "useless")  # noqa: PLW2901 # +
            session.log(train_step(model, optimizer, collate(batch)))  # +
            session.publish(model.save_pretrained)  # +
            if session.next_step % options.checkpoint_every == 0 or session.next_step == options.steps:
                save_checkpoint(options.checkpoint, model, optimizer, session.next_step)  # +
                session.checkpoint()  # +
            if session.next_step == options.steps:
                break


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> dict[str, float]:
    """One optimizer step on a whole batch; its figures, from before the step.

    Samples are padded on the right, so causal attention keeps padding away from every token that counts.
    """
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    logprobs = selected_logprobs(logits, batch.token_ids)
    advantages = grpo_advantages(batch.rewards, torch.bincount(batch.group_index))
    loss = aipo_loss(
        logprobs, batch.logprobs, advantages, batch.loss_mask, delta=CLIP, loss_tokens=batch.total_loss_tokens
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ratio = ratio_sums(logprobs.detach(), batch.logprobs, batch.loss_mask).summary()
    return {
        "loss": loss.item(),
        "reward": batch.rewards.mean().item(),
        "ratio_min": ratio.ratio_min,
        "ratio_mean": ratio.ratio_mean,
        "ratio_max": ratio.ratio_max,
        "kl_behaviour": ratio.kl_behaviour,
    }


def save_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, next_step: int) -> None:
    """Write model, optimizer and `next_step` to one file, which is there complete or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_step": next_step}
    try:
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            # The service frees its replay data on the word that the checkpoint is safe.
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Take model and optimizer from the checkpoint, if there is one; the step to go on with."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["next_step"])
