"""`python -m examples.routing`: a mixture of experts that is trained along the routes that the engine took.

SGLang generates, and gives with each token the experts of every layer (the column `routed_experts`). The trainer has
its model take the same ones (R3), and shows beside it how far its log-probabilities are off where it routes by itself.
New weights travel as patches of the versions before.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.demo import vocabulary
from examples.demo.processes import service, sglang, worker
from examples.routing.model import build_model, replayed, routers, save_model
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.collate import PaddedBatch, collate
from trainer_client.objectives import aipo_loss, grpo_advantages, selected_logprobs
from trainer_client.publish import FilesPublisher

RUN_ID = "routing"


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one step, from before it."""

    reward: float
    """Mean."""
    staleness: float
    """Mean over samples, in versions."""
    rerouted: float
    """Share of the response's tokens that the trainer's own router would send elsewhere, in some layer."""
    apart: float
    """Mean |log π − log μ| of the response's tokens where the trainer routes by itself, in nats."""
    apart_replayed: float
    """Mean of it along the engine's routes."""


def tasks() -> Iterator[Task]:
    """Short prompts without end."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=8,
            sampling=SamplingParams(max_new_tokens=32),
            prompt_token_ids=vocabulary.encode(f"{10 + i % 90}+{10 + i * 7 % 90}?"),
            columns=["routed_experts"],
        )


def own_routes(model: Qwen3MoeForCausalLM, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, T] where the model routes by itself, and its experts [B, T, layers, k], ascending."""
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for router in routers(model)]
    with torch.no_grad():
        logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    for hook in hooks:
        hook.remove()
    experts = torch.stack(chosen, 1).view(*batch.token_ids.shape, len(chosen), -1)
    return selected_logprobs(logits, batch.token_ids), experts.sort(-1).values


def train_step(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> Figures:
    """One optimizer step along the engine's routes."""
    experts = batch.extras["routed_experts"]
    assert isinstance(experts, Tensor)  # noqa: S101 - a column by token, not a ragged one
    own, routes = own_routes(model, batch)
    with replayed(model, experts):
        logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    logprobs = selected_logprobs(logits, batch.token_ids)
    advantages = grpo_advantages(batch.rewards, torch.bincount(batch.group_index))
    loss = aipo_loss(
        logprobs, batch.logprobs, advantages, batch.loss_mask, delta=2.0, loss_tokens=batch.total_loss_tokens
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    elsewhere = (routes != experts.sort(-1).values).any(-1).any(-1)
    # The experts of a position are those that made the next token.
    made_by = batch.loss_mask.roll(-1, 1)
    made_by[:, -1] = False

    def apart(of: Tensor) -> float:
        return (of.detach() - batch.logprobs)[batch.loss_mask].abs().mean().item()

    return Figures(
        reward=batch.rewards.mean().item(),
        staleness=batch.staleness.float().mean().item(),
        rerouted=elsewhere[made_by].float().mean().item(),
        apart=apart(own),
        apart_replayed=apart(logprobs),
    )


def train(model: Qwen3MoeForCausalLM, address: str, scratch: Path, steps: int) -> Iterator[tuple[Figures, float]]:
    """Figures of each step, and the smallest patch of the version that it published over the whole file."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    with (
        BufferClient(address) as client,
        FilesPublisher(scratch / "weights", serve="http", patches=2) as publisher,
        client.session(
            RUN_ID,
            policy=Policy(batch_groups=16, max_queued_groups=32, max_staleness=4),
            tasks=tasks(),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0),
        ) as session,
    ):
        for batch in itertools.islice(session, steps):
            figures = train_step(model, optimizer, collate(batch, extras=("routed_experts",)))
            version = session.publish(partial(save_model, model))
            (weights,) = (file for file in publisher.manifest_of(version).files if file.name == "model.safetensors")
            yield (
                figures,
                min((patch.size_bytes for patch in weights.patches), default=weights.size_bytes) / weights.size_bytes,
            )
            session.checkpoint()  # nothing is resumed here: what the steps so far had is let go
        print(f"weights of the engine: {client.run(RUN_ID).engines[0].weights_from}")


def main(argv: list[str] | None = None) -> int:
    """Print a line for every fourth step; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.routing", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps (default 16)")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="routing-") as directory:
        scratch = Path(directory)
        model = build_model(1)
        save_model(model, scratch / "model")
        reward = ("--reward", "examples.plain.reward:even_share")
        asked = ("--enable-return-routed-experts", "--dtype=float32")
        engine = sglang(scratch / "model", options.sglang_python, *asked)
        with service(scratch / "service") as (_, address, _), worker(address, RUN_ID, scratch, *reward, *engine):
            _print(train(model, address, scratch, options.steps))
    return 0


def _print(rows: Iterator[tuple[Figures, float]]) -> None:
    print(f"{'step':>5} {'reward':>7} {'stale':>6} {'rerouted':>9} {'apart':>8} {'replayed':>9} {'patch':>6}")
    for step, (row, patch) in enumerate(rows):
        if step == 0 or step % 4 == 3:
            print(
                f"{step:>5} {row.reward:>7.3f} {row.staleness:>6.2f} {row.rerouted:>9.1%} {row.apart:>8.4f} "
                f"{row.apart_replayed:>9.4f} {patch:>6.0%}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
