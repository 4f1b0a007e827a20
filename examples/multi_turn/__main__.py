"""`python -m examples.multi_turn`: a rollout function with a calculator, through service, worker and trainer.

By default on a simulated engine, which writes characters at random and so shows the bookkeeping, not the arithmetic;
with --model on SGLang.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.demo import vocabulary
from examples.demo.processes import service, sglang, worker
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch

RUN_ID = "multi-turn"


@dataclass(frozen=True, slots=True)
class Figures:
    """Contents of one batch."""

    samples: int
    calls: int
    """Answers of the calculator."""
    written: int
    """Tokens that the model wrote, those that are trained on."""
    told: int
    """Tokens of the calculator."""
    reward: float
    """Mean."""


def figures(batch: Batch) -> Figures:
    """Count what is in a batch."""
    samples = list(batch.samples)
    written = sum(int(sample.loss_mask.sum()) for sample in samples)
    responses = sum(sample.tokens - sample.prompt_len for sample in samples)
    calls = sum(turn.role == "tool" for sample in samples for turn in sample.turns)
    return Figures(
        len(samples), calls, written, responses - written, sum(sample.reward for sample in samples) / len(samples)
    )


def tasks() -> Iterator[Task]:
    """Sums of two numbers, without end."""
    for i in itertools.count():
        left, right = 10 + i % 90, 10 + i * 7 % 90
        yield Task(
            task_id=f"t{i:06d}",
            group_size=4,
            sampling=SamplingParams(max_new_tokens=160),
            prompt_token_ids=vocabulary.encode(f"{left}+{right}?"),
            metadata={"answer": left + right},
        )


def run(steps: int, engine: list[str], scratch: Path) -> Iterator[Figures]:
    """Pull `steps` batches; `engine`: the worker's options that name its engine."""
    rollout = ("--rollout", "examples.multi_turn.calculator:rollout")
    with (
        service(scratch / "service") as (_, address, _),
        worker(address, RUN_ID, scratch, *rollout, *engine) as started,
        BufferClient(address) as client,
        client.session(
            RUN_ID,
            policy=Policy(batch_groups=8),
            tasks=tasks(),
            options=SessionOptions(pull_timeout_s=300.0, on_wait=lambda _: started.check()),
        ) as session,
    ):
        for batch in itertools.islice(session, steps):
            yield figures(batch)


def main(argv: list[str] | None = None) -> int:
    """Print a line for every batch; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.multi_turn", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="batches to pull (default 5)")
    parser.add_argument("--model", type=Path, help="model directory in the demo's vocabulary, for SGLang")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    engine = ["--simulate", "--tokens-per-s", "2000", "--vocab-size", str(vocabulary.VOCAB_SIZE)]
    if options.model is not None:
        engine = sglang(options.model, options.sglang_python)
    print(f"{'batch':>5} {'samples':>8} {'calls':>6} {'written':>8} {'told':>6} {'reward':>7}")
    with tempfile.TemporaryDirectory(prefix="multi-turn-") as scratch:
        for step, row in enumerate(run(options.steps, engine, Path(scratch))):
            print(f"{step:>5} {row.samples:>8} {row.calls:>6} {row.written:>8} {row.told:>6} {row.reward:>7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
