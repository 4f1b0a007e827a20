"""TRL's GRPOTrainer, trained on the buffer's groups: workers generate and score, while the trainer trains.

    source = BufferSource(client=client, run_id="math", publisher=publisher, policy=Policy(max_staleness=4))
    trainer = BufferGRPOTrainer("Qwen/…", args=GRPOConfig(…), train_dataset=dataset, buffer=source)
    trainer.train()

Invariants: one generation batch of TRL is one step of the run; tokens, masks, log-probabilities and rewards reach the
loss as the workers made them. `trl_progress` describes the restart after a crash.

Follows trl 1.16.0 and uses these parts of it. The argument `rollout_func` (public, experimental) brings tokens, masks
and log-probabilities. `_generate_and_score_completions` is overridden to replace the data loader's rows by those of the
groups, since workers end in an order of their own. `use_vllm`, `vllm_generation` and `_last_loaded_step` are set after
construction, since TRL corrects for the sampler's log-probabilities under use_vllm alone. TRL's output for the groups
is checked at every step. So a TRL that ignores one of these parts causes an error, not another algorithm.

Needs the extra `trl` (pip install 'rollout-buffer[trl]').
"""

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.trl_tasks import (
    RowTasks,
    TaskForm,
    TaskOptions,
    encoder,
    rollouts_of,
    row_of,
    sampling_of,
    worker_reward,
)
from trainer_client.policy import Policy
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.publication import WeightPublisher, WeightSource
from trainer_client.session.plan import SessionOptions
from trainer_client.session.session import TrainerSession

try:
    import trl
    from accelerate.utils import broadcast_object_list
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError(
        "trainer_client.integrations.trl needs TRL, which is not installed: pip install 'rollout-buffer[trl]'"
    ) from error

from trainer_client.integrations.trl_progress import RolloutBufferCallback

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel
    from transformers.trainer_utils import TrainOutput
    from trl.trainer.grpo_trainer import RewardFunc

    from trainer_client.state import Resumed

__all__ = ["BufferGRPOTrainer", "BufferSource", "worker_reward"]

_WORKERS_BUSINESS = {
    "rollout_func": "None: the workers generate",
    "tools": "None: tools run beside the engines, with `rollout-buffer worker --rollout`",
    "environment_factory": "None: environments run beside the engines, with `rollout-buffer worker --environment`",
    "peft_config": "None: adapters are not published",
    "eval_dataset": "None: evaluate with TrainerSession.evaluate, beside the training",
}


def missing_hooks(trainer: type, config: type) -> list[str]:
    """List the parts of GRPOTrainer and GRPOConfig that this module uses and that are missing there."""
    hooks = {
        "GRPOTrainer(rollout_func=)": "rollout_func" in inspect.signature(trainer).parameters,
        "GRPOTrainer._generate_and_score_completions": hasattr(trainer, "_generate_and_score_completions"),
        "GRPOConfig.vllm_importance_sampling_mode": hasattr(config, "vllm_importance_sampling_mode"),
        "GRPOConfig.steps_per_generation": hasattr(config, "steps_per_generation"),
    }
    return [name for name, there in hooks.items() if not there]


if _missing := missing_hooks(GRPOTrainer, GRPOConfig):
    raise ImportError(f"trl {trl.__version__} has no {', '.join(_missing)}; trl 1.16 has (docs/integrations/trl.md)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSource(TaskForm):
    """Source of a trainer's batches: a run of the buffer, fed with tasks of this form."""

    client: BufferClient
    run_id: str
    publisher: WeightPublisher | None
    """Publisher that puts the weights in place for the engines, used on rank 0; None: the engines need not load, as
    simulated ones."""
    policy: Policy = field(default_factory=Policy)
    """Policy of the run. batch_groups is filled in: the config's generation_batch_size / num_generations."""
    prefetch: int = 0
    """Number of batches pulled while training."""
    options: SessionOptions = field(default_factory=SessionOptions)


class BufferGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose generation batches come from a run of the buffer; its config keeps its meaning.

    `buffer`: the run. `reward_funcs`: None: the workers' rewards; else functions of TRL, among which `worker_reward`
    stands for the workers'. The other arguments are GRPOTrainer's. Raises InvalidField for options that the buffer does
    not serve. `train` also raises a session's errors, and ImportError for a TRL that treats a rollout differently.
    """

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: "RewardFunc | list[RewardFunc] | None" = None,
        args: "GRPOConfig | None" = None,
        train_dataset: "Dataset | None" = None,
        *,
        buffer: BufferSource,
        **others: object,
    ) -> None:
        config = _checked(args, train_dataset, others)
        self._source = buffer
        self._pulled: Batch | None = None
        # Under use_vllm the constructor would look for a vLLM server.
        config.use_vllm = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(
                model=model,
                reward_funcs=[worker_reward] if reward_funcs is None else reward_funcs,
                args=config,
                train_dataset=train_dataset,
                rollout_func=self._rollout,
                **others,
            )
        self._check_model()
        self.use_vllm = True
        self.vllm_generation = _Workers()
        self._last_loaded_step = -1
        micro_batches = self.args.steps_per_generation * self.num_iterations
        self._run = RolloutBufferCallback(
            self._open_session,
            self._weights,
            optimizer_steps=max(1, micro_batches // self.args.gradient_accumulation_steps),
        )
        self.add_callback(self._run)

    @property
    def session(self) -> TrainerSession | None:
        """Session that holds the run while `train` goes on; None before and after."""
        return self._run.session

    def train(self, *args: object, **kwargs: object) -> "TrainOutput":
        """Train as GRPOTrainer does. The run is taken over when the checkpoint is loaded, and let go at the end."""
        try:
            output: TrainOutput = super().train(*args, **kwargs)
        finally:
            self._run.close()
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as GRPOTrainer does, with the session's metrics of the newest step."""
        super().log({**logs, **self._run.metrics()}, start_time)

    # ── what TRL calls ───────────────────────────────────────────────────────

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace the rows by those of the next step's groups, and let TRL score and correct their samples."""
        if not self.model.training:
            raise InvalidField("evaluate()", "called", "not called: use TrainerSession.evaluate, beside the training")
        batch = self._run.pull()
        for group in batch.groups:
            group.refuse_rows("TRL compares num_generations samples of a prompt")
        size, sizes = self.num_generations, [len(group.samples) for group in batch.groups]
        if set(sizes) != {size} or sum(sizes) != len(inputs):
            limit = f"{len(inputs) // size} groups of {size}"
            raise InvalidField(f"samples in the groups of step {batch.step}", sizes, limit)
        rows = [row_of(group, self.train_dataset) for group in batch.groups for _ in range(size)]
        self._pulled = batch
        output: dict[str, Any] = super()._generate_and_score_completions(rows)
        self._check_output(batch, output)
        return output

    def _rollout(self, prompts: list[Any], _: GRPOTrainer) -> dict[str, list[Any]]:
        samples = [] if self._pulled is None else list(self._pulled.samples)
        if len(prompts) != len(samples):
            raise InvalidField("prompts of rollout_func", len(prompts), f"{len(samples)}, the samples of the step")
        return rollouts_of(samples)

    # ── what the run needs ───────────────────────────────────────────────────

    @contextmanager
    def _open_session(self, next_step: int) -> Iterator[TrainerSession]:
        """Open the session: rank 0 takes the run over, feeds it and publishes; the others join where it begins."""
        source, accelerator = self._source, self.accelerator
        shard = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        begun: list[Resumed | Exception | None] = [None]
        with ExitStack() as stack:
            if accelerator.is_main_process:
                try:
                    session = source.client.session(
                        source.run_id,
                        policy=_policy(source.policy, self.args, accelerator.num_processes),
                        tasks=self._tasks(),
                        publisher=source.publisher,
                        next_step=next_step,
                        prefetch=source.prefetch,
                        options=source.options,
                        **shard,
                    )
                    held = stack.enter_context(session)
                    begun[0] = held.start
                except Exception as error:
                    begun[0] = RuntimeError(f"rank 0: {error}")
                    raise
                finally:
                    # Also when it failed, for the others wait here.
                    broadcast_object_list(begun)
            else:
                broadcast_object_list(begun)
                if isinstance(begun[0], Exception):
                    raise begun[0]
                joined = source.client.session(
                    source.run_id, start=begun[0], prefetch=source.prefetch, options=source.options, **shard
                )
                held = stack.enter_context(joined)
            yield held

    def _tasks(self) -> RowTasks:
        encode = encoder(self.processing_class, chat_template=self.chat_template, **self.chat_template_kwargs)
        options = TaskOptions(
            group_size=self.num_generations,
            sampling=sampling_of(self.args),
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed,
            prompts=self._source.prompts,
            metadata_columns=self._source.metadata_columns,
            environment_column=self._source.environment_column,
        )
        return RowTasks(self.train_dataset, encode, options)

    def _weights(self) -> WeightSource:
        model = self.accelerator.unwrap_model(self.model)
        publisher = self._source.publisher
        if isinstance(publisher, FilesPublisher):
            return model.save_pretrained  # type: ignore[no-any-return]
        return None if publisher is None else model

    # ── checks ───────────────────────────────────────────────────────────────

    def _check_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InvalidField("fsdp or deepspeed", "enabled", "off: sharded weights are not published")
        per_process = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if per_process % self.num_generations:
            limit = f"a multiple of num_generations, {self.num_generations}: a process trains on whole groups"
            raise InvalidField("per_device_train_batch_size * steps_per_generation", per_process, limit)
        if hasattr(self.model, "peft_config"):
            raise InvalidField("model", "a PeftModel", "one that is trained whole: adapters are not published")
        mode = self.vllm_importance_sampling_mode
        if self.loss_type == "vespo" and self.vllm_importance_sampling_correction and not mode.startswith("token_"):
            raise InvalidField("vllm_importance_sampling_mode", mode, "token_truncate or token_mask with vespo")

    def _check_output(self, batch: Batch, output: dict[str, Any]) -> None:
        """Check that TRL took masks and log-probabilities as they are. Raises ImportError when it did not."""
        wanted = {"completion_mask", "tool_mask", "sampling_per_token_logps"}
        if self.vllm_importance_sampling_correction:
            wanted.add("importance_sampling_ratio")
        if missing := sorted(wanted - output.keys()):
            raise ImportError(f"trl {trl.__version__} makes no {', '.join(missing)} of a rollout; trl 1.16 does")
        trained = int((output["tool_mask"] * output["completion_mask"]).sum())
        expected = sum(sample.loss_tokens for sample in batch.samples)
        if trained != expected and not self.mask_truncated_completions:
            raise ImportError(f"trl {trl.__version__} trains on {trained} tokens of step {batch.step}, not {expected}")


class _Workers:
    """Stand-in for TRL's vLLM object; the engines get their weights by publishing."""

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this before a rollout."""


def _checked(args: "GRPOConfig | None", train_dataset: "Dataset | None", others: dict[str, object]) -> "GRPOConfig":
    """Copy the config. Raises InvalidField for options that are the workers' business, and for batch shapes that steps
    of the run cannot have.
    """
    for name, limit in _WORKERS_BUSINESS.items():
        if others.get(name) is not None:
            raise InvalidField(name, type(others[name]).__name__, limit)
    if not isinstance(args, GRPOConfig):
        raise InvalidField("args", type(args).__name__, "a GRPOConfig")
    if not hasattr(train_dataset, "__getitem__") or not hasattr(train_dataset, "__len__"):
        raise InvalidField("train_dataset", type(train_dataset).__name__, "a datasets.Dataset, whose rows have numbers")
    if args.eval_strategy != "no":
        raise InvalidField("eval_strategy", str(args.eval_strategy), "no: use TrainerSession.evaluate")
    if args.restore_callback_states_from_checkpoint:
        limit = "False: transformers would make the callback anew; the place in the run is restored anyway"
        raise InvalidField("restore_callback_states_from_checkpoint", "True", limit)
    sampling_of(args)
    generation, optimizer_step = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if generation % optimizer_step and optimizer_step % generation:
        limit = f"a multiple or a divisor of gradient_accumulation_steps, {optimizer_step}"
        raise InvalidField("steps_per_generation * num_iterations", generation, limit)
    return copy.copy(args)


def _policy(policy: Policy, args: "GRPOConfig", processes: int) -> Policy:
    """Fill in the policy: N, equal shards for several processes, and publishes no more often than optimizer steps."""
    batch_groups = args.generation_batch_size // args.num_generations
    if policy.max_uses not in (None, 1):
        raise InvalidField("policy.max_uses", policy.max_uses, "1: a step of TRL has generation_batch_size samples")
    if policy.batch_groups not in (None, batch_groups):
        limit = f"None or {batch_groups}, which is generation_batch_size / num_generations"
        raise InvalidField("policy.batch_groups", policy.batch_groups, limit)
    if policy.batch_tokens:
        raise InvalidField("policy.batch_tokens", policy.batch_tokens, "0: TRL's batches have a number of samples")
    batches = max(1, args.gradient_accumulation_steps // (args.steps_per_generation * args.num_iterations))
    if (policy.batches_per_publish or batches) % batches:
        limit = f"None or a multiple of {batches}, the batches of an optimizer step"
        raise InvalidField("policy.batches_per_publish", policy.batches_per_publish, limit)
    return replace(
        policy,
        batch_groups=batch_groups,
        batches_per_publish=policy.batches_per_publish or batches,
        equal_shards=True if processes > 1 else policy.equal_shards,
    )
