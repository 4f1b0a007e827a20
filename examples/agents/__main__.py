"""`python -m examples.agents`: two agents, one for each API, through service, worker, SGLang and trainer.

After every batch new weights are published and loaded in flight, so that games are played with several versions. With
--simulate the engine only keeps SGLang's timing.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from examples.agents.model import VOCAB_SIZE, written
from examples.demo.processes import service, sglang, worker
from trainer_client import BufferClient, Policy, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch
from trainer_client.publish import FilesPublisher

RUN_ID = "agents"
APIS = ("openai", "anthropic")
MODELS = 3
"""Models that are published in turn."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Contents of one batch."""

    samples: int
    turns: int
    """Turns that the model wrote."""
    written: int
    """Their tokens, those that are trained on."""
    told: int
    """Tokens of the agents between them."""
    mixed: int
    """Samples of several weight versions."""
    reward: float
    """Mean."""


def figures(batch: Batch) -> Figures:
    """Count what is in a batch."""
    samples = list(batch.samples)
    written = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Figures(
        samples=len(samples),
        turns=sum(turn.role == "assistant" for sample in samples for turn in sample.turns),
        written=written,
        told=sum(sample.tokens - sample.prompt_len for sample in samples) - written,
        mixed=sum(len(sample.spans) > 1 for sample in samples),
        reward=sum(sample.reward for sample in samples) / len(samples),
    )


def tasks() -> Iterator[Task]:
    """Games without end, by each API in turn. The agents bring their own prompts."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=4,
            sampling=SamplingParams(max_new_tokens=80),
            prompt_token_ids=[0],
            metadata={"api": APIS[i % len(APIS)], "number": i * 7 % 10},
        )


def run(steps: int, engine: list[str], models: list[Path], scratch: Path) -> Iterator[Figures]:
    """Pull `steps` batches; `engine`: the worker's options that name its engine."""
    agent = ("--agent", "examples.agents.guessing:play")
    with (
        service(scratch / "service") as (_, address, _),
        worker(address, RUN_ID, scratch, *agent, *engine) as started,
        BufferClient(address) as client,
        FilesPublisher(scratch / "published") as publisher,
        client.session(
            RUN_ID,
            policy=Policy(batch_groups=8, max_staleness=4),
            tasks=tasks(),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0, on_wait=lambda _: started.check()),
        ) as session,
    ):
        for batch, model in zip(itertools.islice(session, steps), itertools.cycle(models), strict=False):
            yield figures(batch)
            session.publish(partial(shutil.copytree, model, dirs_exist_ok=True))


def main(argv: list[str] | None = None) -> int:
    """Print a line for every batch; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.agents", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="batches to pull (default 8)")
    parser.add_argument("--simulate", action="store_true", help="no SGLang: characters at random")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        scratch = Path(folder)
        models = written(scratch / "models", None if options.simulate else options.sglang_python, count=MODELS)
        engine = sglang(models[0], options.sglang_python)
        if options.simulate:
            engine = ["--simulate", "--vocab-size", str(VOCAB_SIZE), "--tokenizer", str(models[0])]
        print(f"{'batch':>5} {'samples':>8} {'turns':>6} {'written':>8} {'told':>6} {'mixed':>6} {'reward':>7}")
        for step, row in enumerate(run(options.steps, engine, models, scratch)):
            print(
                f"{step:>5} {row.samples:>8} {row.turns:>6} {row.written:>8} {row.told:>6} {row.mixed:>6} "
                f"{row.reward:>7.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
