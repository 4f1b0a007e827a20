"""verl's FullyAsyncTrainer on recorded groups, on Ray and the CPU; as a program it may be killed and started again.

python -m tests.integrations.verl_training ADDRESS RUN FOLDER DIES_AFTER     (0: it lives)

`CPU` has to be in the environment: verl looks for its platform when it is imported.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from hydra import compose, initialize_config_dir
from verl.experimental import fully_async_policy

from tests.support.recorded_groups import recorded_tasks
from trainer_client import BufferClient, ClientOptions, Policy, SessionOptions
from trainer_client.integrations.verl import BufferSource, train
from trainer_client.publish import FilesPublisher

GROUP_SIZE = 4
STEP_GROUPS = 2
STEPS_PER_VERSION = 2
STEPS = 6
POLICY = Policy(max_queued_groups=4, overflow_action="block", max_staleness=2)
_DUMPED_S = 60.0


def config(folder: Path, *changes: str) -> Any:
    """Two groups of 4 a step, a version and a checkpoint after every second step, an actor of one process on the CPU.

    verl computes old log-probabilities with its own model.
    """
    options = {
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": STEP_GROUPS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": GROUP_SIZE,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.n": GROUP_SIZE,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": GROUP_SIZE,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": False,
        "async_training.trigger_parameter_sync_step": STEPS_PER_VERSION,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "rollout.total_rollout_steps": STEPS * STEP_GROUPS,
        "trainer.device": "cpu",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.save_freq": 1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 100_000_000,
    }
    overrides = [f"{name}={value}" for name, value in options.items()]
    with initialize_config_dir(f"{fully_async_policy.__path__[0]}/config", version_base=None):
        return compose("fully_async_ppo_trainer", overrides=[*overrides, *changes])


def kill(pid: int) -> None:
    """Kill the process `pid`, the cluster of Ray that it started, and this process, which is a part of it."""
    driver = psutil.Process(pid)
    for process in (driver, *driver.children(recursive=True)):
        if process.pid != os.getpid():
            process.kill()
    psutil.Process().kill()


def main(address: str, run_id: str, folder: Path, dies_after: int) -> None:
    """Train `STEPS` steps; after `dies_after` of them, if it is not 0, everything is killed.

    verl writes what it trained on into `folder`/dump-DIES_AFTER.
    """
    driver, dump = os.getpid(), folder / f"dump-{dies_after}"

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step + 1 != dies_after:
            return
        # verl writes its dump in a thread of its own.
        dumped, until = dump / f"{dies_after}.jsonl", time.monotonic() + _DUMPED_S
        while time.monotonic() < until and not (dumped.is_file() and dumped.read_text().endswith("\n")):
            time.sleep(0.05)
        kill(driver)

    def source(config: Any) -> BufferSource:
        return BufferSource(
            client=BufferClient(address, ClientOptions(timeout_s=30)),
            run_id=run_id,
            publisher=FilesPublisher(folder / "weights"),
            tasks=recorded_tasks(None, group_size=GROUP_SIZE),
            policy=POLICY,
            options=SessionOptions(pull_timeout_s=600, on_step=on_step),
        )

    changes = (f"trainer.rollout_data_dir={dump}", f"+ray_kwargs.ray_init._temp_dir={folder.parent}")
    train(config(folder, *changes), source)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
