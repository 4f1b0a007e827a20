"""A BufferGRPOTrainer on recorded groups, and what went through it; as a program it may be one rank of several.

python -m tests.integrations.trl_training ADDRESS RUN FOLDER DIES_AFTER     (0: it lives)
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig

from tests.support.recorded_groups import recorded_tasks
from trainer_client import Batch, BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.integrations.trl import BufferGRPOTrainer, BufferSource
from trainer_client.publish import FilesPublisher

GROUP_SIZE = 4
POLICY = Policy(max_queued_groups=4, overflow_action="block", max_staleness=2)


def dataset() -> Dataset:
    """The prompts of the recording as text; "answer" is what a reward would need."""
    prompts = [str(task.metadata["prompt"]) for task in recorded_tasks(group_size=GROUP_SIZE)]
    return Dataset.from_dict({"prompt": prompts, "answer": [f"of {prompt}" for prompt in prompts]})


def config(folder: Path, **changes: Any) -> GRPOConfig:
    """Two groups of 4 an optimizer step."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8,
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
        "vllm_importance_sampling_mode": "token_truncate",
        **changes,
    }
    return GRPOConfig(**values)


class Watched(BufferGRPOTrainer):
    """Keeps every batch and what TRL made of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[tuple[Batch, dict[str, Any]]] = []

    def _check_output(self, batch: Batch, output: dict[str, Any]) -> None:
        super()._check_output(batch, output)
        self.made.append((batch, dict(output)))

    @property
    def logged(self) -> list[dict[str, float]]:
        """Return what was logged of each optimizer step."""
        return [entry for entry in self.state.log_history if "loss" in entry]


def trainer_of(
    client: BufferClient, run_id: str, folder: Path, args: GRPOConfig, *, publisher: FilesPublisher | None, **more: Any
) -> Watched:
    """A trainer on the model in `folder`/model."""
    source = BufferSource(
        client=client,
        run_id=run_id,
        publisher=publisher,
        policy=more.pop("policy", POLICY),
        options=SessionOptions(pull_timeout_s=60),
    )
    return Watched(str(folder / "model"), args=args, train_dataset=dataset(), buffer=source, **more)


class Journal(TrainerCallback):
    """Writes the groups and figures of every step into a file, and kills the process after `dies_after` steps."""

    def __init__(self, path: Path, dies_after: int = 0) -> None:
        self.path = path
        self.dies_after = dies_after
        self.trainer: Watched | None = None

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        logs = named["logs"]
        if self.trainer is None or "loss" not in logs:
            return
        batch, _made = self.trainer.made[-1]
        entry = {
            "step": batch.step,
            "global_step": state.global_step,
            "tasks": [group.task_id for group in batch.groups],
            "tokens": int(np.sum([sample.token_ids.sum() for sample in batch.samples])),
            "replayed": batch.info.replayed,
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if state.global_step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


def journalled(path: Path) -> list[dict[str, Any]]:
    """Return what a journal holds."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(address: str, run_id: str, folder: Path, dies_after: int) -> None:
    """Six steps with a checkpoint after every second one, of which the process sees `dies_after`, if it is not 0."""
    rank = os.environ.get("RANK", "0")
    group = {"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}
    journal = Journal(folder / f"rank-{rank}.jsonl", dies_after)
    with BufferClient(address, ClientOptions(timeout_s=30)) as client:
        trainer = trainer_of(
            client,
            run_id,
            folder,
            config(folder, max_steps=6, save_strategy="steps", save_steps=2, **group),
            publisher=FilesPublisher(folder / "weights") if rank == "0" else None,
            callbacks=[journal],
        )
        journal.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
