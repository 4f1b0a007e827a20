"""SkyRL's FullyAsyncRayPPOTrainer on recorded groups, on the CPU; as a program it may be killed and started again.

python -m tests.integrations.skyrl_training ADDRESS RUN FOLDER PASSES DIES_AFTER     (0: it lives)

SkyRL's own: loop, data loader, staleness manager, conversion, advantages, loss, actor group and dispatch on Ray,
checkpoints. Stand-ins, because there is no GPU: the strategy (plain torch in the place of FSDP), the process group and
flash_attn's padding, which is not called.
"""

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy
from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg
from skyrl.utils.tok import get_tokenizer

from tests.support.recorded_groups import recorded_tasks
from trainer_client import BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.integrations.skyrl import BufferPPOTrainer, BufferSource
from trainer_client.publish import FilesPublisher

GROUP_SIZE = 4
BATCH_GROUPS = 2
STEPS = 3
"""Steps of a pass over the rows."""
POLICY = Policy(max_queued_groups=4, overflow_action="block", max_staleness=2)


class Rows:
    """Rows that SkyRL's loader counts; the run's tasks are its own."""

    def __len__(self) -> int:
        return BATCH_GROUPS * STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": "?"}], "env_class": None, "env_extras": {}, "uid": str(index)}

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows


class PlainStrategy(DistributedStrategy):
    """One process, whole tensors."""

    world_size = 1

    def setup_distributed(self) -> None:
        pass

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **_: Any) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "", **_: Any) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return norm

    def save_checkpoint(self, model: Any, ckpt_dir: str, optimizer: Any, **_: Any) -> None:
        Path(ckpt_dir).mkdir(parents=True)
        torch.save((model.state_dict(), optimizer.state_dict()), Path(ckpt_dir) / "all.pt")

    def load_checkpoint(self, model: Any, ckpt_dir: str, optimizer: Any, **_: Any) -> tuple[str, dict[str, Any]]:
        weights, moments = torch.load(Path(ckpt_dir) / "all.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return ckpt_dir, {}

    def save_hf_model(self, model: Any, output_dir: str, tokenizer: Any = None, **_: Any) -> None:
        model.model.save_pretrained(output_dir)
        tokenizer.save_pretrained(output_dir)


class CpuPolicyWorker(PolicyWorkerBase):
    """SkyRL's policy worker in one process on the CPU."""

    def init_worker_process_group(self) -> None:
        torch.distributed.init_process_group(backend="gloo")
        self.device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        self.mesh_rank = MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)
        # What the base class asks CUDA for.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        torch.autocast = lambda **_: nullcontext()  # type: ignore[assignment, misc]

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        padding: Any = ModuleType("flash_attn.bert_padding")
        padding.pad_input = padding.unpad_input = None
        sys.modules |= {"flash_attn": ModuleType("flash_attn"), "flash_attn.bert_padding": padding}
        from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

        self.strategy = PlainStrategy()
        self.model = HFModelWrapper(model_path, bf16=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)

    def _set_pad_token_id(self, pad_token_id: int) -> None:
        self.model.model.config.pad_token_id = pad_token_id

    def empty_cache(self) -> None:
        pass


class Journal:
    """Tracker that writes figures into a file, and the groups of each step beside them."""

    backend = "journal"

    def __init__(self, file: Path, dies_after: int) -> None:
        self._file, self._dies_after = file, dies_after
        self.groups: list[tuple[str, bytes]] = []

    def log(self, figures: dict[str, Any], step: int, commit: bool) -> None:
        if commit:
            return
        entry = {
            "global_step": step,
            "tasks": [task for task, _ in self.groups],
            "bytes": [content.hex() for _, content in self.groups],
            "figures": {name: float(value) for name, value in figures.items()},
        }
        self.groups.clear()
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if step == self._dies_after:
            for process in (*psutil.Process().children(recursive=True), psutil.Process()):
                process.kill()

    def finish(self) -> None:
        pass


class Watched(BufferPPOTrainer):
    """Tells the journal which groups it trains on."""

    def _generated(self, group: Any) -> Any:
        self.tracker.groups.append((group.task_id, bytes(group.payload)))
        return super()._generated(group)


def config(folder: Path, **changes: object) -> Any:
    """SkyRL's config: two groups of 4 a step, one worker, a checkpoint after every second step and every pass."""
    cfg = SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.policy.model.path": folder / "model",
            "trainer.fully_async.enabled": "true",
            "trainer.fully_async.max_staleness_steps": 2,
            "trainer.fully_async.num_parallel_generation_workers": BATCH_GROUPS,
            "trainer.algorithm.policy_loss_type": "rollout_is",
            "trainer.placement.colocate_all": "false",
            "trainer.placement.colocate_policy_ref": "false",
            "trainer.train_batch_size": BATCH_GROUPS,
            "trainer.policy_mini_batch_size": BATCH_GROUPS,
            "trainer.micro_train_batch_size_per_gpu": GROUP_SIZE,
            "trainer.ckpt_path": folder / "checkpoints",
            "trainer.export_path": folder / "exports",
            "trainer.ckpt_interval": 2,
            "trainer.eval_interval": -1,
            "trainer.logger": "console",
            "trainer.flash_attn": "false",
            "trainer.remove_microbatch_padding": "false",
            "trainer.enable_ray_gpu_monitor": "false",
            "trainer.algorithm.use_kl_loss": "false",
            "generator.n_samples_per_prompt": GROUP_SIZE,
            "generator.batched": "false",
            "generator.sampling_params.logprobs": 1,
            "generator.inference_engine.enable_ray_prometheus_stats": "false",
            "data.dataloader.num_workers": 0,
            **changes,
        }
    )
    validate_cfg(cfg)
    return cfg


def trainer_of(source: BufferSource, folder: Path, cfg: Any, dies_after: int = 0) -> Watched:
    """Trainer of `source`, without its models."""
    return Watched(
        buffer=source,
        cfg=cfg,
        tracker=Journal(folder / "journal.jsonl", dies_after),
        tokenizer=get_tokenizer(str(folder / "model")),
        train_dataset=Rows(),
    )


def main(address: str, run_id: str, folder: Path, passes: int, dies_after: int) -> None:
    """Train `passes` passes of `STEPS` steps, of which the process sees `dies_after`, if it is not 0."""
    cfg = config(folder, **{"trainer.epochs": passes})
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=100 * 1024**2)
    sync_registries()
    with BufferClient(address, ClientOptions(timeout_s=30)) as client:
        source = BufferSource(
            client=client,
            run_id=run_id,
            publisher=FilesPublisher(folder / "weights"),
            tasks=recorded_tasks(None, group_size=GROUP_SIZE),
            policy=POLICY,
            options=SessionOptions(pull_timeout_s=60),
        )
        trainer = trainer_of(source, folder, cfg, dies_after)
        trainer.build_models(ray.remote(num_gpus=1)(CpuPolicyWorker), None, None)
        asyncio.run(trainer.train())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
