"""An AsyncGRPOTrainer on recorded groups, on the CPU, and what went through it; as a program perhaps one of two ranks.

python -m tests.integrations.trl_async_training ADDRESS RUN FOLDER DIES_AFTER     (0: it lives)
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from examples.trl import on_cpu
from tests.integrations.trl_training import GROUP_SIZE, POLICY, dataset
from trainer_client import Batch, BufferClient, ClientOptions, SessionOptions
from trainer_client.integrations.trl import BufferSource
from trainer_client.integrations.trl_async import BufferRollouts
from trainer_client.publish import FilesPublisher


def config(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    """Two groups of 4 an optimizer step, a micro-batch each."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 64,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "token_budget": 0,
        **changes,
    }
    return AsyncGRPOConfig(**values)


class Watched(BufferRollouts):
    """Keeps every batch that was pulled."""

    def __init__(self, source: BufferSource, rows: Any) -> None:
        super().__init__(source, rows)
        self.batches: list[Batch] = []

    def _samples_of(self, batch: Batch) -> list[Any]:
        self.batches.append(batch)
        return super()._samples_of(batch)


def source_of(client: BufferClient, run_id: str, publisher: Any, **changes: Any) -> BufferSource:
    values = {"policy": POLICY, "options": SessionOptions(pull_timeout_s=60), **changes}
    return BufferSource(client=client, run_id=run_id, publisher=publisher, **values)


def trainer_of(rollouts: BufferRollouts, folder: Path, args: AsyncGRPOConfig, **more: Any) -> AsyncGRPOTrainer:
    """A trainer on the model in `folder`/model."""
    on_cpu.before_construction()
    callbacks = [rollouts, *more.pop("callbacks", [])]
    trainer = AsyncGRPOTrainer(
        str(folder / "model"), args=args, train_dataset=dataset(), rollout_worker=rollouts, weight_transfer=rollouts,
        callbacks=callbacks, **more,
    )  # fmt: skip
    on_cpu.after_construction()
    return trainer


def logged(trainer: AsyncGRPOTrainer) -> list[dict[str, float]]:
    """Return what was logged of each optimizer step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


class Journal(TrainerCallback):
    """Writes the groups and figures of every step into a file, and kills the process after `dies_after` steps."""

    def __init__(self, rollouts: Watched, path: Path, dies_after: int = 0) -> None:
        self.rollouts, self.path, self.dies_after = rollouts, path, dies_after

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        logs = named["logs"]
        if "loss" not in logs or self.rollouts.session is None:
            return
        step = self.rollouts.session.next_step - 1
        batch = next(batch for batch in reversed(self.rollouts.batches) if batch.step == step)
        entry = {
            "step": step,
            "global_step": state.global_step,
            "tasks": [group.task_id for group in batch.groups],
            "bytes": [bytes(group.payload).hex() for group in batch.groups],
            "replayed": batch.info.replayed,
            "loss": logs["loss"],
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if state.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def main(address: str, run_id: str, folder: Path, dies_after: int) -> None:
    """Six steps with a checkpoint after every second one, of which the process sees `dies_after`, if it is not 0."""
    rank = os.environ.get("RANK", "0")
    group = {"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}
    with BufferClient(address, ClientOptions(timeout_s=30)) as client:
        publisher = FilesPublisher(folder / "weights") if rank == "0" else None
        rollouts = Watched(source_of(client, run_id, publisher), dataset())
        journal = Journal(rollouts, folder / f"rank-{rank}.jsonl", dies_after)
        args = config(folder, max_steps=6, save_strategy="steps", save_steps=2, **group)
        trainer_of(rollouts, folder, args, callbacks=[journal]).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
