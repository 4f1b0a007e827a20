"""`python -m examples.trl`: a GRPO trainer of TRL on groups of the buffer; the reward is the share of digits.

GRPOTrainer, or with --asynchronous AsyncGRPOTrainer.

By default it starts the service and a worker with a simulated engine, which writes characters at random and makes their
log-probabilities up: it shows the bookkeeping and learns nothing. With --address it trains on workers of yours.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo import vocabulary

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainerCallback

    from trainer_client.integrations.trl import BufferSource

RUN_ID = "trl"
REWARD = "examples.trl.reward:digits"
COLUMNS = {
    "rollout_buffer/step": "step",
    "reward": "reward",
    "rollout_buffer/staleness_mean": "staleness",
    "rollout_buffer/train_version": "version",
    "ratio": "ratio",
    "grad_norm": "grad_norm",
}
"""Logged values, with their titles in the table."""
RATIOS = ("sampling/importance_sampling_ratio/mean", "ratio")
"""Names of the mean ratio of a token's probabilities, in the trainer and in the engine, by trainer."""


@contextmanager
def own_service(scratch: Path) -> Iterator[str]:
    """A service and a worker with a simulated engine, for as long as the block runs; the service's address."""
    from examples.demo.processes import service, worker

    engine = ["--simulate", "--tokens-per-s", "500", "--vocab-size", str(vocabulary.VOCAB_SIZE), "--length-median", "6"]
    with service(scratch / "service") as (_, address, _), worker(address, RUN_ID, scratch, "--reward", REWARD, *engine):
        yield address


def write_model(directory: Path) -> Path:
    """A small Qwen3 with random weights and one token per character; `directory`."""
    from examples.demo.model import build_model, save_model

    if not directory.exists():
        save_model(build_model(seed=0), directory)
    return directory


def config(out: Path, steps: int, *, asynchronous: bool) -> Any:  # noqa: ANN401 - a config of TRL
    """Settings as either trainer knows them: eight groups of eight samples an optimizer step."""
    from trl import GRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    values: dict[str, Any] = {
        "output_dir": str(out / "checkpoints"),
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
    }
    if asynchronous:
        return AsyncGRPOConfig(**values, token_budget=0, max_staleness=4, gradient_checkpointing=False)
    return GRPOConfig(**values, vllm_importance_sampling_mode="token_truncate")


def train(address: str, model: Path, out: Path, options: argparse.Namespace) -> None:
    """Train as a user writes it: a data set, a config, where the run is, and train."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from transformers.utils import logging

    from trainer_client import BufferClient, Policy
    from trainer_client.integrations.trl import BufferGRPOTrainer, BufferSource
    from trainer_client.publish import FilesPublisher

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sums = [(left, right) for left in range(10) for right in range(10)]
    dataset = Dataset.from_list([{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in sums])
    args = config(out, options.steps, asynchronous=options.asynchronous)
    with BufferClient(address) as client, FilesPublisher(out / "weights") as publisher:
        source = BufferSource(client=client, run_id=RUN_ID, publisher=publisher, policy=Policy(max_staleness=4))
        trainer: Any
        if options.asynchronous:
            trainer = asynchronous_trainer(model, args, dataset, source)
        else:
            trainer = BufferGRPOTrainer(str(model), args=args, train_dataset=dataset, buffer=source)
        trainer.add_callback(table())
        trainer.remove_callback(PrinterCallback)
        print("".join(f"{title:>11}" for title in COLUMNS.values()))
        trainer.train(resume_from_checkpoint=options.resume or None)


def asynchronous_trainer(model: Path, args: Any, dataset: "Dataset", source: "BufferSource") -> object:  # noqa: ANN401 - a config of TRL
    """TRL's AsyncGRPOTrainer, unchanged; one object is its rollout worker, its weight transfer and a callback."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from examples.trl import on_cpu
    from trainer_client.integrations.trl_async import BufferRollouts

    rollouts = BufferRollouts(source, dataset)
    on_cpu.before_construction()
    trainer = AsyncGRPOTrainer(
        str(model),
        args=args,
        train_dataset=dataset,
        rollout_worker=rollouts,
        weight_transfer=rollouts,
        callbacks=[rollouts],
    )
    on_cpu.after_construction()
    return trainer


def table() -> "TrainerCallback":
    """Make the callback that prints a line for every optimizer step."""
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    class Table(TrainerCallback):
        def on_log(
            self,
            args: TrainingArguments,  # noqa: ARG002 - a callback's arguments have names
            state: TrainerState,  # noqa: ARG002 - likewise
            control: TrainerControl,  # noqa: ARG002 - likewise
            **named: dict[str, float],
        ) -> None:
            logs = named["logs"]
            if "loss" in logs:
                shown = {**logs, "ratio": next(logs[name] for name in RATIOS if name in logs)}
                values = (f"{shown[name]:>{max(9, len(title) + 2)}.4g}" for name, title in COLUMNS.items())
                print("".join(values), flush=True)

    return Table()


def main(argv: list[str] | None = None) -> int:
    """Train, and print a line for every step."""
    parser = argparse.ArgumentParser(prog="python -m examples.trl", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps in all (default 10)")
    parser.add_argument("--address", help="host:port of a running service, whose workers serve the run 'trl'")
    parser.add_argument("--out", type=Path, help="model, weights and checkpoints (default: a temporary directory)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--asynchronous", action="store_true", help="AsyncGRPOTrainer in place of GRPOTrainer")
    options = parser.parse_args(argv)
    if options.resume and (options.address is None or options.out is None):
        parser.error("--resume needs the --address and the --out of the run that it goes on with")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-")))
        out = options.out or scratch
        model = write_model(out / "model")
        train(options.address or stack.enter_context(own_service(scratch)), model, out, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
