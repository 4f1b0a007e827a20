"""Evaluation by the rollout function, `evaluation=True`: the datasets of --eval-prompt-data, at the published version.

It runs beside the training, which is neither paused nor disturbed. Every sample of an evaluation comes from one weight
version. A prompt that failed for good is left out and named in the log.
"""

import logging
from collections.abc import Iterator, MutableMapping, Sequence
from typing import cast

from buffer_wire.errors import UnknownEvaluation
from buffer_wire.limits import MAX_TASKS_PER_SUBMIT
from trainer_client.client.blocking import BufferClient
from trainer_client.integrations.miles.contract import Args, DatasetOf, EvalDataset, Sample
from trainer_client.integrations.miles.conversion import Converter, eval_sampling_of
from trainer_client.integrations.miles.settings import Settings
from trainer_client.tasks import Task

logger = logging.getLogger("trainer_client.integrations.miles")

_PREFIX = "miles-"


class EvaluationFailed(RuntimeError):
    """Error: every prompt of a dataset failed, so there is no figure to give."""


class Evaluator:
    """Evaluator of one trainer's hold on a run; `datasets` caches the datasets read, by their number."""

    def __init__(
        self,
        client: BufferClient,
        converter: Converter,
        settings: Settings,
        *,
        term: int,
        datasets: MutableMapping[int, DatasetOf],
    ) -> None:
        self._client = client
        self._converter = converter
        self._settings = settings
        self._term = term
        self._datasets = datasets
        self._error = ""
        """Error of the prompt that failed last."""
        self._key = _reward_key(converter.args)

    def evaluate(self, rollout_id: int) -> object:
        """Return RolloutFnEvalOutput: by dataset's name the rewards, truncated flags and samples, in order of their
        indices.

        Raises EvaluationNotReady after the timeout, naming the missing tasks and on whom it waits, and
        EvaluationFailed.
        """
        args = self._converter.args
        self._forget_older()
        data: dict[str, dict[str, object]] = {}
        metrics: dict[str, float] = {}
        for number, config in enumerate(cast("Sequence[EvalDataset]", getattr(args, "eval_datasets", None) or ())):
            tasks = self._tasks(config, number)
            samples: list[Sample] = []
            for first in range(0, len(tasks), MAX_TASKS_PER_SUBMIT):
                eval_id = f"{_PREFIX}{self._term}-{rollout_id}-{number}-{first}"
                samples += self._generated(eval_id, tasks[first : first + MAX_TASKS_PER_SUBMIT])
            if tasks and not samples:
                what = f"all {len(tasks)} prompts of {config.name!r} at rollout {rollout_id}"
                raise EvaluationFailed(f"{what} failed, the last with: {self._error}")
            samples.sort(key=lambda sample: sample.index or 0)
            data[config.name] = self._summary(samples)
            missing = len(tasks) - len(samples) // config.n_samples_per_eval_prompt
            metrics[f"eval/{config.name}/failed_prompts"] = missing
        return self._converter.framework.eval_output(data, metrics)

    def _generated(self, eval_id: str, tasks: Sequence[Task]) -> Iterator[Sample]:
        run_id = self._settings.run_id
        with self._client.evaluate(run_id, tasks, term=self._term, eval_id=eval_id) as evaluation:
            for group in evaluation.groups(self._settings.timeout_s):
                yield from self._converter.samples(group, reward_key=self._key)
            for failure in evaluation.state().failures:
                self._error = failure.error
                logger.warning("prompt %d of evaluation %s failed: %s", failure.task_index, eval_id, failure.error)

    def _tasks(self, config: EvalDataset, number: int) -> list[Task]:
        """Make a task for each prompt; indices count over the samples of the dataset, as the frameworks count them."""
        converter = self._converter
        if number not in self._datasets:
            self._datasets[number] = converter.framework.dataset(converter.args, config, converter.tokenizer)
        sampling = eval_sampling_of(converter.args, config)
        size = config.n_samples_per_eval_prompt
        tasks = []
        for i, prompt in enumerate(self._datasets[number].samples):
            group = [
                converter.framework.sample(
                    group_index=i,
                    index=i * size + j,
                    prompt=prompt.prompt,
                    tokens=list(prompt.tokens),
                    label=prompt.label,
                    multimodal_inputs=prompt.multimodal_inputs,
                    metadata=config.inject_metadata(prompt.metadata),
                )
                for j in range(size)
            ]
            tasks.append(converter.task(group, sampling))
        return tasks

    def _summary(self, samples: list[Sample]) -> dict[str, object]:
        key = self._key
        rewards = [cast("dict[str, object]", s.reward)[key] if key else s.reward for s in samples]
        truncated = [s.status == type(s).Status.TRUNCATED for s in samples]
        return {"rewards": rewards, "truncated": truncated, "samples": samples}

    def _forget_older(self) -> None:
        """Delete evaluations that an earlier trainer left: their versions will not be generated any more."""
        run_id = self._settings.run_id
        for state in self._client.evaluations(run_id):
            if state.eval_id.startswith(_PREFIX) and state.version.term < self._term:
                try:
                    self._client.delete_evaluation(run_id, state.eval_id)
                except UnknownEvaluation:
                    logger.info("evaluation %s of an earlier trainer is deleted already", state.eval_id)


def _reward_key(args: Args) -> str | None:
    return getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
