"""SkyRL's FullyAsyncRayPPOTrainer, with its mini-batches out of a run of the buffer.

    source = BufferSource(client=client, run_id="math", publisher=publisher, tasks=tasks)
    trainer = BufferPPOTrainer(buffer=source, cfg=cfg, tracker=tracker, tokenizer=tokenizer, train_dataset=dataset)
    trainer.build_models(PolicyWorker, CriticWorker, RefWorker)
    asyncio.run(trainer.train())

Invariants: one training step of SkyRL is one step of the run. SkyRL's loop draws prompts and counts them, as it always
does; its generator gives places, and the run's groups take them when the mini-batch is made into tensors. Weights are
published where SkyRL syncs them, after every step, which commits the steps in them. A checkpoint says by the prompts
that it counts how many steps are in its weights, and the run is taken over there. Only public methods are overridden.

Followed: skyrl 0.3.0, `FullyAsyncRayPPOTrainer`, `GeneratorInterface` and `WorkerDispatch`.
"""
# ruff: noqa: ANN401 - SkyRL names the arguments of what is overridden; mypy does not see its types

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from buffer_wire.errors import InvalidField
from trainer_client.batch import REWARDS, Batch, Group
from trainer_client.integrations.source import BufferSource
from trainer_client.publish.files import FilesPublisher
from trainer_client.session.session import TrainerSession

try:
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
    from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput
    from skyrl.train.utils import Timer
except ImportError as error:
    raise ImportError(
        "trainer_client.integrations.skyrl needs SkyRL: pip install 'rollout-buffer[torch]' 'skyrl[fsdp]==0.3.0'"
    ) from error

__all__ = ["BufferPPOTrainer", "BufferSource"]


class BufferPPOTrainer(FullyAsyncRayPPOTrainer):
    """FullyAsyncRayPPOTrainer on a run of the buffer. It needs neither generator nor inference engines.

    `given`: FullyAsyncRayPPOTrainer's own arguments. Raises InvalidField for a config that the buffer does not serve.
    """

    def __init__(self, *, buffer: BufferSource, cfg: Any, **given: Any) -> None:
        _check(cfg, buffer)
        self.session: TrainerSession | None = None
        """Session that holds the run while `train` goes on; None before and after."""
        self._source = buffer
        self._stack = ExitStack()
        super().__init__(cfg=cfg, **{**given, "generator": _Places(), "inference_engine_client": None})

    def build_models(self, *workers: Any) -> None:
        """Build SkyRL's models; their weights are published to the run."""
        super().build_models(*workers)
        models = self.policy_model, self.critic_model, self.ref_model
        self.dispatch = _PublishingDispatch(self.cfg, *models, publish=self._publish)

    async def train(self) -> None:
        """Train. Raises a session's errors besides SkyRL's, and InvalidField for groups that SkyRL cannot take."""
        with self._stack:
            try:
                await super().train()
            finally:
                self.session = None

    # ── batches ──────────────────────────────────────────────────────────────

    def convert_generation_group_mini_batch_to_training_input(
        self,
        cur_generation_group_mini_batch: Any,  # noqa: ARG002 - places
        dropped_groups: Any = None,
    ) -> Any:
        """Pull the next step of the run, and make SkyRL's training input of it, in the places of the mini-batch.

        Raises InvalidField for a drained run, a smaller step, and groups of another size, with rows or with images.
        """
        session = self._held()
        with Timer("wait_for_generation_buffer", self.all_timings):
            batch: Batch | None = next(session, None)
        if batch is None or len(batch.groups) != self.mini_batch_size:
            found = "drained" if batch is None else f"{len(batch.groups)} groups in step {batch.step}"
            limit = f"{self.mini_batch_size} groups in each step, or a max_training_steps that fits what it still has"
            raise InvalidField(f"state of run {session.run_id}", found, limit)
        groups = [self._generated(group) for group in batch.groups]
        return super().convert_generation_group_mini_batch_to_training_input(groups, dropped_groups)

    def _generated(self, group: Group) -> GeneratedOutputGroup:
        samples, wanted = group.samples, self.cfg.generator.n_samples_per_prompt
        if len(samples) != wanted:
            limit = f"generator.n_samples_per_prompt, {wanted}"
            raise InvalidField(f"group_size of task {group.task_id}", len(samples), limit)
        group.refuse_rows("SkyRL compares n_samples_per_prompt samples of a prompt")
        group.refuse_images("SkyRL would train without them")
        prompts = [sample.token_ids[: sample.prompt_len].tolist() for sample in samples]
        responses = [slice(sample.prompt_len, None) for sample in samples]
        output = GeneratorOutput(
            prompt_token_ids=prompts,
            response_ids=[sample.token_ids[of].tolist() for sample, of in zip(samples, responses, strict=True)],
            rewards=group.rewards.tolist(),
            loss_masks=[sample.loss_mask[of].tolist() for sample, of in zip(samples, responses, strict=True)],
            stop_reasons=[sample.finish_reason for sample in samples],
            rollout_metrics=None,
            rollout_logprobs=[sample.logprobs[of].tolist() for sample, of in zip(samples, responses, strict=True)],
        )
        return GeneratedOutputGroup(
            generator_output=output,
            uid=group.group_id,
            global_step_when_scheduled=self.global_step - group.staleness,
            prompts=[[{"role": "user", "content": self.tokenizer.decode(prompt)}] for prompt in prompts],
        )

    # ── weights ──────────────────────────────────────────────────────────────

    def init_weight_sync_state(self) -> None:
        """Take the run over at the step of the weights; there are no engines to connect.

        Raises InvalidField for a policy that SkyRL's config contradicts, or with stages that SkyRL does not read.
        """
        session = self._source.session(batch_groups=self.mini_batch_size, next_step=self.global_step, trainer="SkyRL")
        self.session = self._stack.enter_context(session)
        if unread := [stage for stage in self.session.policy.stages if stage != REWARDS]:
            raise InvalidField("policy.stages", unread, f"none but {REWARDS!r}: SkyRL computes what its loss needs")

    def _publish(self) -> None:
        """Publish the weights. The first sync, before any batch, is none: engines have those weights.

        They started with them, or were taken back to those of the checkpoint.
        """
        session = self._held()
        if session.next_step == session.start.next_step:
            return
        session.publish(None if self._source.publisher is None else self._save)
        self.all_metrics.update(session.metrics())

    def _save(self, directory: Path) -> None:
        self.dispatch.save_hf_model("policy", str(directory), self.tokenizer)

    # ── checkpoints ──────────────────────────────────────────────────────────

    def load_checkpoints(self) -> Any:
        """Load SkyRL's checkpoint, and say how many steps are in its weights.

        SkyRL's own number is that, but for its last checkpoint, whose number is one more. Raises InvalidField for a
        checkpoint that does not say its pass over the data.
        """
        global_step, path, consumed, filtered, passes = super().load_checkpoints()
        if global_step == 0:
            return global_step, path, consumed, filtered, passes
        if passes is None:
            raise InvalidField("checkpoint", path, "one of skyrl 0.3.0, which says the pass over the data")
        steps = passes * self.num_steps_per_epoch + len(consumed) // self.mini_batch_size
        return steps, path, consumed, filtered, passes

    def save_checkpoints(self) -> str:
        """Save as SkyRL does, and tell the service of it when it is on disk: those steps are not replayed any more."""
        folder: str = super().save_checkpoints()
        self._held().checkpoint()
        return folder

    def _held(self) -> TrainerSession:
        if self.session is None:
            raise InvalidField("trainer", "asked for the run", "inside of train() alone")
        return self.session


class _Places(GeneratorInterface):
    """Generator of places in SkyRL's mini-batches, which groups of the run take."""

    async def generate(self, input_batch: Any) -> Any:  # noqa: ARG002 - GeneratorInterface's
        return {}


class _PublishingDispatch(WorkerDispatch):
    """Dispatch whose weight sync publishes to the run."""

    def __init__(self, cfg: Any, *models: Any, publish: Callable[[], None]) -> None:
        super().__init__(cfg, *models)
        self._publish = publish

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:  # noqa: ARG002 - WorkerDispatch's
        await asyncio.to_thread(self._publish)


def _check(cfg: Any, source: BufferSource) -> None:
    """Check that a config asks for nothing that the buffer does not serve. Raises InvalidField."""
    if not isinstance(source.publisher, FilesPublisher | None):
        raise InvalidField("publisher", type(source.publisher).__name__, "a FilesPublisher, or None")
    trainer, generator = cfg.trainer, cfg.generator
    wanted = {
        "trainer.fully_async.sample_full_batch": (
            trainer.fully_async.sample_full_batch,
            "the policy's filters, or SessionOptions(filter=…)",
        ),
        "trainer.fully_async.simulate_training": (trainer.fully_async.simulate_training, "models to publish"),
        "trainer.eval_interval": (max(0, trainer.eval_interval), "TrainerSession.evaluate, beside the training"),
        "trainer.policy.model.lora.rank": (trainer.policy.model.lora.rank, "whole models, as they are published"),
        "generator.step_wise_trajectories": (generator.step_wise_trajectories, "a sample for each trajectory"),
        "generator.inference_engine.enable_return_routed_experts": (
            generator.inference_engine.enable_return_routed_experts,
            "no routing replay",
        ),
    }
    for name, (value, instead) in wanted.items():
        if value:
            raise InvalidField(name, value, f"{type(value)()}: {instead}")
