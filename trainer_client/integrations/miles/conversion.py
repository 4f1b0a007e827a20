"""Conversion of prompt groups of Miles or slime into tasks, and of generated groups into their samples.

A task's metadata holds the facts from which a sample is made again, and which a reward function on a worker reads:

    {"label": …, "metadata": {…}, "prompt": "…", "group_index": 3, "indices": [24, 25, …]}

Invariant: a sample made from a group is a function of the group's bytes and of the arguments alone. So a replayed step
gives equal samples in another process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from buffer_wire.engine_columns import ROUTED_EXPERTS, SAMPLING_MASK, counts_of
from buffer_wire.errors import InvalidField
from trainer_client import batch
from trainer_client.integrations.miles.contract import (
    Args,
    EvalDataset,
    Framework,
    Prompt,
    PromptGroup,
    Sample,
    chosen,
)
from trainer_client.integrations.miles.contract import Tokenizer as TokenizerLike
from trainer_client.integrations.miles.settings import refuse_reuse
from trainer_client.tasks import SamplingParams, Task

TEACHER, TEACHER_FIELD = "teacher_logprobs", "teacher_log_probs"
"""Column that a reward function gives, and the field of a sample for it."""
SLIME_MASK = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
MILES_MASK = ("rollout_sampling_mask_ids", "rollout_sampling_mask_offsets")
"""Field names of a later Miles (its commit 301be963). Each token has a row there; where nothing was drawn it holds the
token itself."""

UNSERVED = (
    "custom_generate_function_path", "app_service", "eval_task_timeout", "min_eval_samples",
    "eval_early_stop_remaining", "eval_early_stop_idle_timeout", "message_processor", "reward_model",
    "remote_environment",
)  # fmt: skip
"""Settings of an evaluation's dataset that change generation or scoring and that a worker does not know."""


_KNOBS = ("temperature", "top_p", "top_k", "stop", "stop_token_ids")
"""Sampling parameters that --rollout-NAME sets for the training, and a dataset of an evaluation may set for itself."""


def sampling_of(args: Args, prompt_tokens: int) -> SamplingParams:
    """Convert the training's --rollout-* arguments; a response ends at --rollout-max-context-len too."""
    limit, context = args.rollout_max_response_len, getattr(args, "rollout_max_context_len", None)
    if context is not None and prompt_tokens:
        limit = max(1, min(limit, context - prompt_tokens))
    return _sampling(args, limit, {name: getattr(args, f"rollout_{name}", None) for name in _KNOBS})


def eval_sampling_of(args: Args, config: EvalDataset) -> SamplingParams:
    """Convert an evaluation dataset's own values, else the training's.

    Raises InvalidField for a setting without meaning here.
    """
    for name in UNSERVED:
        if (value := getattr(config, name, None)) is not None:
            raise InvalidField(f"eval_datasets.{config.name}.{name}", value, "unset: the buffer's workers generate")
    special = getattr(args, "rollout_skip_special_tokens", False)
    for name, served in (("skip_special_tokens", special), ("no_stop_trim", True)):
        if (value := getattr(config, name, None)) not in (None, served):
            raise InvalidField(f"eval_datasets.{config.name}.{name}", value, str(served))
    return _sampling(
        args,
        chosen(config, "max_response_len", args, "rollout_max_response_len"),
        {name: chosen(config, name, args, f"rollout_{name}") for name in _KNOBS},
        repetition_penalty=getattr(config, "repetition_penalty", None),
        min_new_tokens=chosen(config, "min_new_tokens", args, "eval_min_new_tokens") or 0,
    )


def _sampling(args: Args, max_new_tokens: int, knobs: dict[str, Any], **more: Any) -> SamplingParams:  # noqa: ANN401 - engine's
    temperature, top_k, stop = knobs["temperature"], knobs["top_k"], knobs["stop"]
    greedy = temperature is not None and temperature <= 0
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        # SGLang's temperature 0 is greedy; the service wants one above 0.
        temperature=None if greedy else temperature,
        top_p=knobs["top_p"],
        top_k=1 if greedy else top_k if top_k is not None and top_k > 0 else None,
        stop=[stop] if isinstance(stop, str) else stop or (),
        stop_token_ids=knobs["stop_token_ids"] or (),
        # Sample i draws with seed + i, as theirs does.
        seed=args.rollout_seed if getattr(args, "sglang_enable_deterministic_inference", False) else None,
        **more,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Converter:
    """Converter in both directions, for one framework and its arguments."""

    framework: Framework
    args: Args
    tokenizer: TokenizerLike

    def task(self, group: PromptGroup, sampling: SamplingParams | None = None) -> Task:
        """Make a task of one prompt group, to be generated once for each of its samples.

        Raises InvalidField for images and other inputs that are not text.
        """
        first = group[0]
        if first.multimodal_inputs:
            raise InvalidField("sample.multimodal_inputs", "set", "empty: this adapter takes text prompts only")
        ids = self._prompt_ids(first)
        return Task(
            group_size=len(group),
            sampling=sampling or sampling_of(self.args, len(ids)),
            prompt_token_ids=ids,
            messages=cast("list[dict[str, str]]", first.prompt) if not ids else (),
            columns=self._columns() if sampling is None else (),
            metadata={
                "label": first.label,
                "metadata": first.metadata,
                "prompt": first.prompt,
                "group_index": first.group_index,
                "indices": [sample.index for sample in group],
            },
        )

    def _columns(self) -> tuple[str, ...]:
        """Return the columns that the framework's trainer needs of the engine."""
        replayed = (ROUTED_EXPERTS,) if getattr(self.args, "use_rollout_routing_replay", False) else ()
        return (*((SAMPLING_MASK,) if self._mask_fields() else ()), *replayed)

    def _mask_fields(self) -> tuple[str, str] | None:
        """Return the fields of a sample for the tokens that could be drawn; None where the framework's trainer does not
        need them.
        """
        narrowed = (getattr(self.args, "rollout_top_p", None) or 1.0) != 1.0
        cut = (getattr(self.args, "rollout_top_k", None) or -1) > 0
        if not narrowed and not cut:
            return None
        known = self.framework.sample.__dataclass_fields__  # type: ignore[attr-defined]  # a class
        if MILES_MASK[0] in known:
            return MILES_MASK
        return SLIME_MASK if narrowed and SLIME_MASK[0] in known else None

    def _prompt_ids(self, sample: Sample) -> list[int]:
        """Return the token ids that the sample brings, or those of its text; empty for chat messages, which the worker
        renders.
        """
        if sample.tokens:
            return list(sample.tokens)
        if isinstance(sample.prompt, list):
            return []
        return self.tokenizer.encode(sample.prompt, add_special_tokens=False)

    def samples(self, group: batch.Group, *, reward_key: str | None = None) -> list[Sample]:
        """Convert a generated group to the framework's samples, in their order. Raises InvalidField for rows of
        trajectories, for images, and for a group that is used again.
        """
        refuse_reuse(group)
        group.refuse_images("multimodal_train_inputs are not made of them")
        group.refuse_rows("the framework's samples of a prompt are compared with each other")
        return [self._sample(group, i, made, reward_key) for i, made in enumerate(group.samples)]

    def _sample(self, group: batch.Group, i: int, made: batch.Sample, reward_key: str | None) -> Sample:
        facts = group.metadata
        indices = cast("list[int | None]", facts["indices"])
        status = self.framework.sample.Status  # type: ignore[attr-defined]  # a class, seen as what makes samples
        response = made.token_ids[made.prompt_len :].tolist()
        sample = self.framework.sample(
            group_index=facts["group_index"],
            index=indices[i],
            prompt=cast("Prompt", facts["prompt"]),
            tokens=made.token_ids.tolist(),
            response=self.tokenizer.decode(
                response, skip_special_tokens=getattr(self.args, "rollout_skip_special_tokens", False)
            ),
            response_length=len(response),
            label=facts["label"],
            reward={reward_key: made.reward} if reward_key else made.reward,
            loss_mask=made.loss_mask[made.prompt_len :].tolist(),
            weight_versions=[str(made.versions[span.start]) for span in made.spans],
            rollout_log_probs=made.logprobs[made.prompt_len :].tolist(),
            status={"stop": status.COMPLETED, "length": status.TRUNCATED}.get(made.finish_reason, status.ABORTED),
            metadata=dict(cast("dict[str, object]", facts["metadata"] or {})),
        )
        if ROUTED_EXPERTS in made.extras:
            # Row t holds the experts of token t; the last token is never an input.
            sample.rollout_routed_experts = made.extras[ROUTED_EXPERTS][:-1].astype("int32")  # type: ignore[attr-defined]
        if TEACHER in made.extras and TEACHER_FIELD in self.framework.sample.__dataclass_fields__:  # type: ignore[attr-defined]
            setattr(sample, TEACHER_FIELD, made.extras[TEACHER][made.prompt_len :].tolist())
        if SAMPLING_MASK in made.extras and (fields := self._mask_fields()) is not None:
            counts = made.extras[counts_of(SAMPLING_MASK)][made.prompt_len :]
            kept = made.extras[SAMPLING_MASK]
            if fields is MILES_MASK:
                forced = np.flatnonzero(counts == 0)
                places = np.cumsum(counts, dtype=np.intp)[forced]
                kept = np.insert(kept, places, made.token_ids[made.prompt_len :][forced])
                counts = np.maximum(counts, 1)
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype("int32")
            for name, values in zip(fields, (kept.astype("int32"), offsets), strict=True):
                setattr(sample, name, values.tolist() if fields is MILES_MASK else values)
        return sample


def first_index(group: Sequence[Sample]) -> int:
    """Return the index of the group's first sample, by which groups are sorted."""
    return group[0].index or 0
