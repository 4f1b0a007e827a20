"""AReaL's PPOTrainer on recorded groups, on the CPU; as a program it may be killed and started again.

python -m tests.integrations.areal_training ADDRESS RUN FOLDER DIES_AFTER     (0: it lives)
"""

import json
import sys
from pathlib import Path
from typing import Any

import psutil
from areal.api import cli_args
from torch.utils.data import Dataset

from tests.support.recorded_groups import recorded_tasks
from trainer_client import BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.integrations.areal import BufferController, BufferPPOTrainer, BufferSource
from trainer_client.publish import FilesPublisher

GROUP_SIZE = 4
STEPS = 6
POLICY = Policy(max_queued_groups=4, overflow_action="block", max_staleness=2)


class Rows(Dataset[dict[str, int]]):
    """Rows that AReaL's loader counts; the run's tasks are its own."""

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"row": index}


def config(folder: Path) -> cli_args.PPOConfig:
    """Two groups of 4 a step, one process of FSDP on the CPU, a recover checkpoint after every second step."""
    names = {"experiment_name": "math", "trial_name": "one"}
    cpu = cli_args.SchedulingSpec(cpu=1, gpu=0, mem=1, cmd=f"{sys.executable} -m areal.infra.rpc.rpc_server")
    # Compiling costs a minute, and changes nothing for a model of this size.
    cpu.env_vars["TORCHDYNAMO_DISABLE"] = "1"
    # AReaL wants the folder to be there.
    (folder / "names").mkdir(exist_ok=True)
    every_two = {**names, "fileroot": str(folder), "freq_steps": 2}
    return cli_args.PPOConfig(
        **names,
        total_train_epochs=1,
        tokenizer_path=str(folder / "model"),
        cluster=cli_args.ClusterSpecConfig(
            fileroot=str(folder),
            n_nodes=1,
            n_gpus_per_node=1,
            name_resolve=cli_args.NameResolveConfig(nfs_record_root=str(folder / "names")),
        ),
        gconfig=cli_args.GenerationHyperparameters(n_samples=GROUP_SIZE),
        rollout=cli_args.InferenceEngineConfig(**names, backend="sglang:d1", request_timeout=60),
        actor=cli_args.PPOActorConfig(
            **names,
            path=str(folder / "model"),
            backend="fsdp:d1",
            dtype="float32",
            attn_impl="sdpa",
            weight_update_mode="disk",
            use_decoupled_loss=True,
            reward_norm=cli_args.NormConfig(mean_level="group", std_level="group", group_size=GROUP_SIZE),
            optimizer=cli_args.OptimizerConfig(lr=1e-3),
            # A sample each: where there is no flash attention, AReaL's packed samples attend to one another.
            ppo_n_minibatches=1,
            mb_spec=cli_args.MicroBatchSpec(n_mbs=2 * GROUP_SIZE, max_tokens_per_mb=4096),
            scheduling_spec=(cpu,),
        ),
        train_dataset=cli_args.TrainDatasetConfig(path="rows", type="rl", batch_size=2, shuffle=False),
        valid_dataset=None,
        scheduler=cli_args.SchedulerConfig(type="local"),
        recover=cli_args.RecoverConfig(**every_two, mode="auto"),
        saver=cli_args.SaverConfig(**names, fileroot=str(folder)),
        evaluator=cli_args.EvaluatorConfig(**names, fileroot=str(folder)),
        stats_logger=cli_args.StatsLoggerConfig(**names, fileroot=str(folder)),
    )


class Watched(BufferPPOTrainer):
    """Writes every step's groups and figures into a file; after step `dies_after` it and its workers are killed."""

    journal: Path
    dies_after: int

    def _init_rollout(self, *args: Any, **kwargs: Any) -> BufferController:
        controller = super()._init_rollout(*args, **kwargs)
        self.trained: list[tuple[str, bytes, dict[str, Any]]] = []
        make = BufferController._trajectory

        def noted(batch: Any, group: Any, group_size: int) -> dict[str, Any]:
            made = make(controller, batch, group, group_size)
            self.trained.append((group.task_id, bytes(group.payload), dict(made)))
            return made

        controller._trajectory = noted  # type: ignore[method-assign]
        return controller

    def _export_and_commit_stats(self, *, global_step: int, **_: int) -> None:
        stats = {**self.actor.export_stats(), **self.rollout.export_stats()}
        entry = {
            "global_step": global_step,
            "version": self.rollout.get_version(),
            "tasks": [task for task, _, _ in self.trained],
            "bytes": [content.hex() for _, content, _ in self.trained],
            "newest": max(int(made["versions"].max()) for _, _, made in self.trained),
            "stats": {name: float(value) for name, value in stats.items()},
        }
        self.trained.clear()
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if global_step + 1 == self.dies_after:
            for process in (*psutil.Process().children(recursive=True), psutil.Process()):
                process.kill()


def main(address: str, run_id: str, folder: Path, dies_after: int) -> None:
    """Train `STEPS` steps, of which the process sees `dies_after`, if it is not 0."""
    with BufferClient(address, ClientOptions(timeout_s=30)) as client:
        source: dict[str, Any] = {"publisher": FilesPublisher(folder / "weights"), "policy": POLICY}
        buffer = BufferSource(
            client=client,
            run_id=run_id,
            tasks=recorded_tasks(None, group_size=GROUP_SIZE),
            options=SessionOptions(pull_timeout_s=60),
            **source,
        )
        Watched.journal, Watched.dies_after = folder / "journal.jsonl", dies_after
        with Watched(config(folder), Rows(), buffer=buffer) as trainer:
            trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
