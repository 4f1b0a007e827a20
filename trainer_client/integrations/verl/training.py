"""Training by verl's FullyAsyncTrainer on Ray, put together as verl's own task runner does it."""
# ruff: noqa: ANN401 - verl's config has no type that mypy sees

from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.experimental.fully_async_policy.message_queue import MessageQueueClient
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.experimental.separation.utils import create_resource_pool_manager, create_role_worker_mapping
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_tokenizer
from verl.utils.device import auto_set_device
from verl.utils.fs import copy_to_local

from buffer_wire.errors import InvalidField
from trainer_client.integrations.verl.rollouter import BufferRollouter, MakeSource
from trainer_client.integrations.verl.steps import versions
from trainer_client.integrations.verl.weights import BACKEND, BufferWeights

_SERVED = {
    "async_training.use_trainer_do_validate": (False, "False: the trainer's GPUs have no engine here"),
    "async_training.use_dynamic_resource_scheduling": (False, "False: the trainer's GPUs have no engine here"),
    "trainer.val_before_train": (False, "False: evaluate with BufferClient.evaluate, beside the training"),
    "trainer.test_freq": (-1, "-1: evaluate with BufferClient.evaluate, beside the training"),
    "actor_rollout_ref.model.lora_rank": (0, "0: adapters are not published here"),
    "actor_rollout_ref.model.lora.rank": (0, "0: adapters are not published here"),
    "actor_rollout_ref.model.lora_adapter_path": (None, "None: adapters are not published here"),
    "reward.reward_model.enable": (False, "False: workers give the rewards"),
    "global_profiler.steps": (None, "None: there is no engine of verl's to profile"),
}
"""Options of verl's config that the buffer serves with one value: that value, and why."""


def train(config: Any, source: MakeSource) -> None:
    """Train by verl's FullyAsyncTrainer on Ray, until `rollout.total_rollout_steps` groups were trained on.

    `config`: that of verl's fully_async_main, which keeps its meaning but for `rollout`, whose engines do not start.
    The training ends with a whole synchronization. Raises InvalidField for a config that the buffer does not serve, and
    what the training raises, from Ray.
    """
    _check(config)
    auto_set_device(config)
    with open_dict(config):
        config.rollout.nnodes = config.actor_rollout_ref.rollout.nnodes = 0
        engine = config.actor_rollout_ref.rollout.checkpoint_engine
        engine.backend, engine.custom_backend_module = BACKEND, BufferWeights.__module__

    class Runner:
        def run(self, config: Any) -> None:
            _fit(config, source)

    run_ppo(migrate_legacy_reward_impl(config), task_runner_class=ray.remote(num_cpus=1)(Runner))


def _check(config: Any) -> None:
    for name, (served, limit) in _SERVED.items():
        value = OmegaConf.select(config, name, default=served)
        if value != served:
            raise InvalidField(name, value, limit)
    versions(config)


def _fit(config: Any, source: MakeSource) -> None:
    """Put trainer and rollouter together, as verl's task runner does, and train."""
    OmegaConf.resolve(config)
    path = copy_to_local(config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.use_shm)
    tokenizer = hf_tokenizer(path, trust_remote_code=config.data.get("trust_remote_code", False))
    workers, group_class = create_role_worker_mapping(config)
    trainer = FullyAsyncTrainer.remote(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=workers,
        resource_pool_manager=create_resource_pool_manager(config, roles=list(workers)),
        ray_worker_group_cls=group_class,
        device_name=config.trainer.device,
    )
    ray.get(trainer.init_workers.remote())
    rollouter = ray.remote(num_cpus=1)(BufferRollouter).remote(config, source, tokenizer.pad_token_id or 0)
    ray.get(trainer.set_rollouter.remote(rollouter))
    ray.get(trainer.set_total_train_steps.remote(versions(config)))
    ray.get(trainer.set_message_queue_client.remote(MessageQueueClient(rollouter)))
    ray.get(rollouter.open.remote(ray.get(trainer.load_checkpoint.remote())))
    ray.get(trainer.fit.remote())
    ray.get(rollouter.close.remote())
