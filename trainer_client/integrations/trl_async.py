"""TRL's AsyncGRPOTrainer, trained on the buffer's groups through its two public protocols.

    rollouts = BufferRollouts(BufferSource(client=client, run_id="math", publisher=publisher), dataset)
    trainer = AsyncGRPOTrainer(
        "Qwen/…", args=AsyncGRPOConfig(token_budget=0, …), train_dataset=dataset,
        rollout_worker=rollouts, weight_transfer=rollouts, callbacks=[rollouts],
    )
    trainer.train()

One object has three roles: rollout worker (samples, metrics), weight transfer (publishing) and transformers' callback
(the run taken over, commits, checkpoints). Nothing of TRL is overridden.

Invariants: one optimizer step of TRL is one step of the run, whose samples it takes in order and whole; the count is
checked at every step. TRL asks for the first micro-batch of a step while it trains on the step before. So steps are
pulled one ahead, for the version that will train on them, and committed only when they are trained. A checkpoint says
how many steps of the run are in it, in trainer_state.json. Rank 0 pulls and publishes; TRL deals the samples out.

Followed: trl 1.16.0, `RolloutWorkerProtocol`, `WeightTransferProtocol`, `RolloutSample` and `AsyncGRPOConfig`.
"""
# ruff: noqa: ANN401, ARG002 - transformers and TRL name the arguments of callbacks and protocols, whose types mypy does not see

import queue
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from buffer_wire.errors import InvalidField
from trainer_client.batch import Batch
from trainer_client.client.driver import PULL_SLICE_S
from trainer_client.client.pulling import PullSpec
from trainer_client.dataset import ServiceClock, whole_step
from trainer_client.integrations.trl import BufferSource
from trainer_client.integrations.trl_tasks import Rows, RowTasks, TaskOptions, encoder, sampling_of
from trainer_client.objectives import grpo_advantages
from trainer_client.policy import Policy
from trainer_client.publish.collective.plan import TensorSpec
from trainer_client.publish.files import FilesPublisher
from trainer_client.publish.named_tensors import specs_of
from trainer_client.publish.saving import save_tensors
from trainer_client.session.metrics import of_groups, of_step
from trainer_client.session.pulls.puller import Puller, PullSource, pulls_of
from trainer_client.session.session import TrainerSession

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are importing from 'trl.experimental'")
        from trl.experimental.async_grpo import AsyncGRPOConfig
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    raise ImportError(
        "trainer_client.integrations.trl_async needs TRL's AsyncGRPOTrainer: pip install 'rollout-buffer[trl]'"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BufferRollouts"]

_EPS = 1e-8
"""Addition to a group's standard deviation, as in TRL's own worker."""


class BufferRollouts(TrainerCallback, ExportableState):
    """Rollout worker, weight transfer and callback of one AsyncGRPOTrainer, on one run.

    `rows`: the trainer's `train_dataset`. Rewards are the workers'; TRL calls no `reward_funcs` beside a rollout worker
    of one's own. `train` raises InvalidField for options that the buffer does not serve, and a session's errors.
    """

    def __init__(self, source: BufferSource, rows: Rows) -> None:
        if source.prefetch:
            raise InvalidField("prefetch", source.prefetch, "0: TRL itself asks a micro-batch ahead")
        if not isinstance(source.publisher, FilesPublisher | None):
            raise InvalidField("publisher", type(source.publisher).__name__, "a FilesPublisher, or None")
        self.rollout_buffer = _Samples(self._next_samples)
        """Queue that the trainer drains. Its `get` waits for the workers as long as a session's pull."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        """Queue of the metrics of each step, by the names that a session gives them."""
        self.session: TrainerSession | None = None
        """Session that holds the run while `train` goes on; None before and after."""
        self._source, self._rows = source, rows
        self._stack = ExitStack()
        self._puller: Puller | None = None
        self._pulled = 0
        """Next step of the run to pull."""
        self._model_version = 0
        """Version in TRL's numbers, which count from 1 in each process."""
        self._ahead = 0
        """Difference between TRL's numbers and the run's."""
        self._is_begun = False
        self._figures: deque[dict[str, float]] = deque()
        """Metrics of steps that were pulled and not trained yet."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._step_samples = self._micro_samples = 0
        self._optimizer_steps = 0

    # ── rollout worker ───────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin; the run was taken over by `on_train_begin`."""
        self._is_begun = True

    def stop(self) -> None:
        """Let go of the run, which goes on."""
        self.session = None
        self._stack.close()

    def update_model_version(self, model_version: int) -> None:
        """Take TRL's number of the version that was just published."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what feeding or the session raised. A wait for workers ends by the session's `pull_timeout_s`."""
        self._held().check()

    # ── weight transfer ──────────────────────────────────────────────────────

    def init_weight_transfer(self) -> None:
        """Do nothing: engines fetch what is published."""

    def pause(self) -> None:
        """Do nothing: each worker pauses its engine for the load."""

    def send_weights(self, iterator: "Iterator[tuple[str, Tensor]]") -> None:
        """Publish the weights, and commit the steps in them.

        TRL's first transfer comes before the first step and is not published. The engines have those weights: they
        started with them, or were taken back to those of the checkpoint.
        """
        if not self._is_begun:
            self._specs, _ = specs_of(lambda: iterator)
            return
        save = partial(_save, iterator, self._specs)
        if self._source.publisher is None:
            # Ranks that shard the model take part in every tensor.
            for _ in iterator:
                pass
        self._held().publish(None if self._source.publisher is None else save)

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def destroy(self) -> None:
        """Do nothing: `stop` lets go of the run."""

    # ── callback ─────────────────────────────────────────────────────────────

    def state(self) -> dict[str, dict[str, int]]:
        """Return the state for the checkpoint: {"next_step": steps of the run that are in the weights}."""
        return {"args": {}, "attributes": {"next_step": 0 if self.session is None else self.session.next_step}}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Take the run over at the step of the weights. Raises InvalidField for a checkpoint without that step."""
        policy = _policy(self._source.policy, args)
        if not state.is_world_process_zero:
            return
        saved = cast("dict[str, Any]", state.stateful_callbacks or {}).get(type(self).__name__)
        if state.global_step and not saved:
            limit = "one saved with BufferRollouts: this one does not say how many steps of a run are in it"
            raise InvalidField("resume_from_checkpoint", f"checkpoint-{state.global_step}", limit)
        session = self._source.client.session(
            self._source.run_id,
            policy=policy,
            tasks=self._tasks(args, given["processing_class"]),
            publisher=self._source.publisher,
            next_step=int(saved["attributes"]["next_step"]) if state.global_step and saved else 0,
            options=self._source.options,
        )
        self.session = self._stack.enter_context(session)
        _check_staleness(self.session.policy.max_staleness, args.max_staleness)
        self._puller, self._pulled = _puller(self.session, self._source), self.session.next_step
        self._micro_samples = args.per_device_train_batch_size * args.world_size
        self._step_samples = self._micro_samples * args.gradient_accumulation_steps
        self._optimizer_steps = self.rollout_buffer.taken = self._ahead = 0

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Count the step of the run as the one that is trained now; those before it are in the weights."""
        if self.session is not None:
            self.session.took(self.session.next_step)
            self.metrics_queue.put(self._figures.popleft())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Check that TRL trained on this step's samples and on no others. Raises InvalidField."""
        if self.session is None:
            return
        self._optimizer_steps += 1
        expected = self._optimizer_steps * self._step_samples + self._micro_samples
        if self.rollout_buffer.taken != expected:
            limit = f"{expected}: a trainer that leaves some out does not train on steps of the run"
            raise InvalidField("samples taken by AsyncGRPOTrainer", self.rollout_buffer.taken, limit)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Tell the service of the checkpoint, which is on disk: the steps it covers are not replayed any more."""
        if self.session is not None:
            self.session.checkpoint()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Commit steps that are trained and not published."""
        if self.session is not None:
            self.session.commit()

    # ── inside ───────────────────────────────────────────────────────────────

    def _held(self) -> TrainerSession:
        if self.session is None:
            raise InvalidField("rollouts", "asked for", "only inside of train(), with callbacks=[rollouts]")
        return self.session

    def _tasks(self, args: Any, processing_class: Any) -> RowTasks:
        options = TaskOptions(
            group_size=args.num_generations,
            sampling=sampling_of(args),
            shuffle=False,
            seed=args.seed,
            prompts=self._source.prompts,
            metadata_columns=self._source.metadata_columns,
            environment_column=self._source.environment_column,
        )
        return RowTasks(self._rows, encoder(processing_class, **(args.chat_template_kwargs or {})), options)

    def _next_samples(self) -> list[RolloutSample]:
        """Pull the next step of the run, and make TRL's samples of it."""
        session, puller = self._held(), self._puller
        batch = None if puller is None else whole_step(puller, self._pulled)
        if batch is None:
            limit = "one that goes on, or a max_steps that fits what it still has: TRL asks a step further"
            raise InvalidField(f"state of run {session.run_id}", "drained", limit)
        if self._pulled == session.start.next_step:
            self._ahead = self._model_version - session.start.version
        self._pulled = batch.step + 1
        figures = {**of_step(batch.info), **of_groups(list(batch.groups))}
        self._figures.append({f"rollout_buffer/{name}": float(value) for name, value in figures.items()})
        return self._samples_of(batch)

    def _samples_of(self, batch: Batch) -> list[RolloutSample]:
        samples = []
        for place, group in enumerate(batch.groups):
            group.refuse_rows("AsyncGRPOTrainer compares num_generations samples of a prompt")
            group.refuse_images("AsyncGRPOTrainer would train without them")
            rewards = torch.tensor(group.rewards, dtype=torch.float64)
            advantages = grpo_advantages(rewards[None], eps=_EPS, unbiased=False)[0].tolist()
            spread = float(rewards.std(correction=0))
            samples += [
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.asarray(sample.token_ids, dtype=np.int64),
                    completion_mask=np.asarray(sample.loss_mask, dtype=np.int64),
                    old_log_probs=np.where(sample.loss_mask, sample.logprobs, 0).astype(np.float32),
                    advantage=advantage,
                    model_version=group.head_version + self._ahead,
                    group_id=batch.step * len(batch.groups) + place,
                    metrics={"reward": float(sample.reward), "reward_std": spread},
                )
                for sample, advantage in zip(group.samples, advantages, strict=True)
            ]
        return samples


class _Samples:
    """Queue, as far as AsyncGRPOTrainer uses one, that is filled by the step when it is empty and asked."""

    def __init__(self, pull: Callable[[], Iterable[RolloutSample]]) -> None:
        self._pull = pull
        self._samples: deque[RolloutSample] = deque()
        self.taken = 0

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:  # noqa: FBT001, FBT002 - queue.Queue's
        """Take the next sample. Raises what the pull of a step raises."""
        while not self._samples:
            self._samples.extend(self._pull())
        self.taken += 1
        return self._samples.popleft()

    def qsize(self) -> int:
        """Return the number of samples that were pulled and not taken."""
        return len(self._samples)


def _save(iterator: "Iterator[tuple[str, Tensor]]", specs: tuple[TensorSpec, ...], directory: Path) -> None:
    save_tensors(lambda: iterator, directory, specs=specs)


def _puller(session: TrainerSession, source: BufferSource) -> Puller:
    """Make the puller of steps that are one ahead of the session's own."""
    client, run_id, start = source.client, source.run_id, session.start
    pulls = PullSource(
        pull=pulls_of(client, run_id, PullSpec(term=start.term, step=start.next_step), lambda _: None),
        published=lambda: client.run(run_id, timeout_s=PULL_SLICE_S).published.version,
        exhausted=lambda: session.exhausted,
        check=session.check,
        loop=client.pull_loop(run_id),
        on_wait=source.options.on_wait,
    )
    clock = ServiceClock(lambda: client.run(run_id, timeout_s=PULL_SLICE_S), start)
    return Puller(pulls, clock, source.options.pull_timeout_s)


def _policy(policy: Policy, args: Any) -> Policy:
    """Fill in the policy by the trainer's config. Raises InvalidField for what steps of a run cannot follow."""
    if not isinstance(args, AsyncGRPOConfig):
        raise InvalidField("args", type(args).__name__, "an AsyncGRPOConfig")
    if args.token_budget is None or args.token_budget > 0:
        limit = "0: with a budget TRL tells nobody which samples an optimizer step took"
        raise InvalidField("token_budget", args.token_budget, limit)
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if samples % args.num_generations:
        limit = f"a multiple of num_generations, {args.num_generations}: a step of the run has whole groups"
        raise InvalidField("per_device_train_batch_size * gradient_accumulation_steps * processes", samples, limit)
    if policy.max_uses not in (None, 1):
        raise InvalidField("policy.max_uses", policy.max_uses, "1: an optimizer step of TRL has a number of samples")
    if policy.batch_tokens:
        raise InvalidField("policy.batch_tokens", policy.batch_tokens, "0: TRL's batches have a number of samples")
    wanted = {"batch_groups": samples // args.num_generations, "batches_per_publish": args.weight_sync_steps}
    for name, value in wanted.items():
        if getattr(policy, name) not in (None, value):
            raise InvalidField(
                f"policy.{name}", getattr(policy, name), f"None or {value}, which follows from the config"
            )
    staleness = policy.max_staleness
    if staleness is None and policy.preset is None:
        staleness = args.max_staleness
    return replace(policy, **wanted, max_staleness=staleness, prefetch_batches=max(1, policy.prefetch_batches or 0))


def _check_staleness(of_run: int | None, of_trainer: int) -> None:
    """Check that the run, which judges staleness, lets nothing through that TRL drops. Raises InvalidField."""
    if of_run is None or of_run > of_trainer:
        limit = f"at most the config's max_staleness, {of_trainer}: TRL drops what is staler"
        raise InvalidField("max_staleness of the run", of_run, limit)
