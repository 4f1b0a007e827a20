"""`python -m examples.plain`: a plain torch loop that trains a tiny Qwen3 from the buffer.

By itself it starts the service and a worker: with a simulated engine, whose tokens and logprobs are made up, so that
the loop is shown but nothing is learned; with --sglang-python on SGLang, where the reward rises. With --address it
trains from a service that runs already, whose worker was started with the same --model.

Started again with the same --out it goes on from its checkpoint.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from examples.demo import vocabulary
from examples.demo.model import build_model, save_model
from examples.demo.processes import service, sglang, worker
from examples.plain.loop import POLICY, LoopOptions, train
from trainer_client import Group, SamplingParams, Task

GROUP_SIZE = 8
TWICE = replace(POLICY, max_uses=2, reuse_share_milli=500, reuse_max_staleness=2)
"""The loop's policy, with 8 groups that earlier steps have trained on beside each step's 16."""


def tasks() -> Iterator[Task]:
    """Short prompts in the demo's vocabulary, without end; the feeder's cursor is the index into them."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_new_tokens=24),
            prompt_token_ids=vocabulary.encode(f"{10 + i % 90}+{10 + i * 7 % 90}?"),
        )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.plain", description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="host:port of a running service; default: start one, and a worker")
    parser.add_argument("--run", default="plain", help="the run (default plain)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all (default 20)")
    parser.add_argument("--model", type=Path, help="model directory; default: a new model in the demo's vocabulary")
    parser.add_argument("--out", type=Path, default=Path("demo_out/plain"), help="checkpoint and weights go there")
    parser.add_argument("--sglang-python", type=Path, help="interpreter of SGLang's environment, for the own worker")
    parser.add_argument("--reuse", action="store_true", help="train on some groups twice: 8 beside 16 new ones")
    parser.add_argument("--reject-cut-off", action="store_true", help="give groups back whose samples were all cut off")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.address is not None and options.model is None:
        parser.error("--address needs --model, the one that the worker's engines started with")
    if options.address is not None and options.sglang_python is not None:
        parser.error("--sglang-python is for the worker that is started without --address")
    return options


def prepared_model(directory: Path | None, out: Path) -> tuple[PreTrainedModel, Path]:
    """The model to train and the directory that engines start from; a new one where none is named."""
    if directory is None:
        directory = out / "model"
        if not directory.exists():
            save_model(build_model(seed=1), directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32", local_files_only=True), directory


def started(out: Path, run_id: str, model: Path, sglang_python: Path | None, stack: ExitStack) -> str:
    """The address of a service of our own, with a worker for the run."""
    _, address, _ = stack.enter_context(service(out / "service"))
    engine = ["--simulate", "--tokens-per-s", "500", "--vocab-size", str(vocabulary.VOCAB_SIZE)]
    if sglang_python is not None:
        engine = sglang(model, sglang_python, "--dtype=float32")
    stack.enter_context(worker(address, run_id, out, "--reward", "examples.plain.reward:even_share", *engine))
    return address


def is_cut_off(group: Group) -> bool:
    """Tell whether every sample of a group met the limit of its tokens."""
    return all(sample.finish_reason == "length" for sample in group.samples)


def show(step: int, metrics: dict[str, float]) -> None:
    """A line for a step."""
    print(
        f"{step:>5} {metrics['loss']:>8.4f} {metrics['reward']:>7.3f} {metrics['ratio_mean']:>7.3f}"
        f" {metrics['rollout_buffer/staleness_mean']:>9.2f} {metrics['rollout_buffer/train_s']:>7.2f}"
        f" {metrics['rollout_buffer/pull_wait_s']:>7.2f} {metrics['rollout_buffer/rejected_groups']:>8.0f}"
        f" {metrics['rollout_buffer/reused_groups']:>6.0f}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Print a line for every step; 0 when all are done."""
    options = arguments(argv)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model, directory = prepared_model(options.model, out)
    with ExitStack() as stack:
        address = options.address or started(out, options.run, directory, options.sglang_python, stack)
        names = f"{'step':>5} {'loss':>8} {'reward':>7} {'ratio':>7} {'staleness':>9}"
        print(f"{names} {'train s':>7} {'wait s':>7} {'rejected':>8} {'reused':>6}")
        loop = LoopOptions(
            address=address,
            run_id=options.run,
            steps=options.steps,
            checkpoint=out / "checkpoint.pt",
            weights=out / "weights",
            is_useless=is_cut_off if options.reject_cut_off else None,
            policy=TWICE if options.reuse else POLICY,
        )
        train(model, tasks(), loop, show)
    print(f"{options.steps} steps are in {out / 'checkpoint.pt'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the next start goes on from the checkpoint")
