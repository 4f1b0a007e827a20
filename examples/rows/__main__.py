"""`python -m examples.rows`: a small model learns nim against itself, from trajectories of several rows.

On SGLang; with --simulate on an engine that moves at random whatever it is given, to see the bookkeeping alone.
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
from transformers import Qwen3ForCausalLM

from examples.demo import vocabulary
from examples.demo.model import build_model, save_model, write_weights
from examples.demo.processes import service, worker
from examples.rows.nim import PILE
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.collate import PaddedBatch, collate
from trainer_client.objectives import aipo_loss, dr_grpo_advantages, selected_logprobs
from trainer_client.publish import FilesPublisher

RUN_ID = "rows"
GAMES = 8
POLICY = Policy(batch_groups=16, max_queued_groups=16, max_staleness=2, filter_equal_rewards=True)


@dataclass(frozen=True, slots=True)
class Figures:
    """Contents of one batch; shares and means are of its games."""

    games: int
    rows: int
    moves: float
    """Mean number of moves."""
    finished: float
    """Share in which every move was legal."""
    white: float
    """Share that white has won."""


def figures(batch: PaddedBatch) -> Figures:
    """Count what is in a batch, each game by its first row."""
    index = batch.trajectory_index.tolist()
    first = [i for i, trajectory in enumerate(index) if trajectory not in index[:i]]
    moves, finished = (
        named[first] for name in ("moves", "finished") if isinstance(named := batch.extras[name], Tensor)
    )
    won = (batch.rewards[first] > 0).float().mean().item()
    return Figures(batch.total_trajectories, len(index), moves.mean().item(), finished.mean().item(), won)


def tasks(*, seeded: bool) -> Iterator[Task]:
    """Games without end. `seeded`: for the simulated engine, which else does the same with the same prompt."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=GAMES,
            sampling=SamplingParams(max_new_tokens=8, seed=i * GAMES if seeded else None),
            prompt_token_ids=vocabulary.encode(f"nim {PILE}:"),
        )


def train(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> None:
    """One step. Each side is compared with itself over the games of a group; every game weighs the same."""
    advantages = dr_grpo_advantages(
        batch.rewards,
        batch.group_index.bincount(),
        trajectories=batch.trajectory_index,
        policies=batch.policy_index,
    )
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    loss = aipo_loss(
        selected_logprobs(logits, batch.token_ids),
        batch.logprobs,
        advantages,
        batch.loss_mask,
        delta=4.0,
        total_samples=batch.total_trajectories,
        sample_tokens=batch.trajectory_loss_tokens,
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def run(steps: int, engine: list[str], scratch: Path) -> Iterator[Figures]:
    """Train for `steps` batches; `engine`: the worker's options that name its engine, beside the model."""
    torch.set_num_threads(1)
    model = build_model(0)
    save_model(model, scratch / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if "--simulate" not in engine:
        engine = [*engine, "--launch", str(scratch / "model")]
    rollout = ("--rollout", "examples.rows.nim:rollout")
    with (
        service(scratch / "service") as (_, address, _),
        worker(address, RUN_ID, scratch, *rollout, *engine) as started,
        BufferClient(address) as client,
        FilesPublisher(scratch / "published", serve="http") as publisher,
        client.session(
            RUN_ID,
            policy=POLICY,
            tasks=tasks(seeded="--simulate" in engine),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0, on_wait=lambda _: started.check()),
        ) as session,
    ):
        for pulled in itertools.islice(session, steps):
            batch = collate(pulled, rows=True, extras=("finished", "moves"))
            train(model, optimizer, batch)
            session.publish(partial(write_weights, model))
            if batch.step % 10 == 9:
                session.checkpoint()  # No resume is wanted further back: older versions may go.
            yield figures(batch)


def main(argv: list[str] | None = None) -> int:
    """Print a line for every tenth batch; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.rows", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=21, help="batches to train on (default 21)")
    parser.add_argument("--simulate", action="store_true", help="an engine that moves at random")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    engine = ["--sglang-python", str(options.sglang_python)]
    if options.simulate:
        engine = ["--simulate", "--tokens-per-s", "2000", "--vocab-size", str(vocabulary.VOCAB_SIZE)]
    print(f"{'batch':>5} {'games':>6} {'rows':>6} {'moves':>6} {'finished':>9} {'white':>6}")
    with tempfile.TemporaryDirectory(prefix="rows-") as scratch:
        for step, seen in enumerate(run(options.steps, engine, Path(scratch))):
            if step % 10 == 0 or step == options.steps - 1:
                shown = f"{seen.moves:>6.2f} {seen.finished:>9.3f} {seen.white:>6.3f}"
                print(f"{step:>5} {seen.games:>6} {seen.rows:>6} {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
