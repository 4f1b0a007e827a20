"""Stand-ins for the modules of Miles and slime that the adapter imports, where neither is installed.

Written from what radixark/miles (31f1ca9) and THUDM/slime (624b824) publish, both of 21 August 2026: names of modules,
classes, fields and arguments are theirs, the bodies are not. `install("miles")` puts them into `sys.modules`, and
refuses to where the real package can be imported.

The tokenizer is one of characters: id = code point.
"""

import copy
import importlib.util
import json
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from examples.miles.stand_in_samples import AdapterRef, MilesSample, RewardSpec, Sample, SlimeSample


@dataclass
class RolloutFnTrainOutput:
    """`rollout/base_types.py`."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """`rollout/base_types.py`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class EvalDatasetConfig:
    """`utils/eval_config.py`: one entry of args.eval_datasets."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """The sample's metadata with the dataset's own on top."""
        own = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**(sample_metadata or {}), **own, **self.metadata_overrides}


@dataclass
class SlimeEvalDatasetConfig(EvalDatasetConfig):
    """Names that only slime has."""

    custom_rm_path: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    app_service: str | None = None
    eval_task_timeout: int | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    remote_environment: dict[str, Any] | None = None


class Tokenizer:
    """A token is a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - the usual argument
        """Code points."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:  # noqa: ARG002 - there are none
        """The inverse."""
        return "".join(chr(token) for token in token_ids)


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **kwargs: object) -> Tokenizer:  # noqa: ARG001 - there is but one
    """`utils/processing_utils.py` of Miles."""
    return Tokenizer()


def slime_load_tokenizer(name_or_path: str, **kwargs: object) -> Tokenizer:  # noqa: ARG001 - there is but one
    """`utils/processing_utils.py` of slime."""
    return Tokenizer()


class Dataset:
    """`utils/data.py`: prompts of a JSON-lines file; `shuffle(epoch)` orders them by seed and epoch alone."""

    sample: type[Sample] = Sample

    def __init__(  # noqa: PLR0913 - theirs
        self,
        path: str | Path,
        tokenizer: Tokenizer,  # noqa: ARG002 - theirs filters and renders with it
        processor: object,  # noqa: ARG002 - same
        max_length: int | None,  # noqa: ARG002 - same
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,  # noqa: ARG002 - text only
        label_key: str | None = None,
        tool_key: str | None = None,  # noqa: ARG002 - same
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,  # noqa: ARG002 - same
        apply_chat_template_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - same
    ) -> None:
        if not str(path).endswith(".jsonl"):
            raise ValueError(f"{path}: .jsonl is what the stand-in reads")
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self.origin_samples = [
            self.sample(
                prompt=row.get(prompt_key),
                label=row[label_key] if label_key is not None else None,
                metadata=row.get(metadata_key) or {},
            )
            for row in rows
        ]
        self.epoch_id = -1
        self.seed = seed
        self.samples = self.origin_samples

    def shuffle(self, new_epoch_id: int) -> None:
        """A new order for a new epoch."""
        if self.epoch_id != new_epoch_id:
            order = list(range(len(self.samples)))
            random.seed(self.seed + new_epoch_id)
            random.shuffle(order)
            self.samples = [self.origin_samples[i] for i in order]
            self.epoch_id = new_epoch_id

    def __len__(self) -> int:
        return len(self.samples)


class MilesDataset(Dataset):
    """Samples of Miles, from its prompts."""

    sample = MilesSample


class SlimeDataset(Dataset):
    """Samples of slime, from its prompts."""

    sample = SlimeSample


class RolloutDataSourceWithBuffer:
    """`rollout/data_source.py`: groups of one prompt, over and over; `save` and `load` keep its position."""

    dataset_of: type[Dataset] = MilesDataset

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset = self.dataset_of(
            args.prompt_data, Tokenizer(), None, args.rollout_max_prompt_len, prompt_key=args.input_key,
            label_key=args.label_key, metadata_key=args.metadata_key, seed=args.rollout_seed,
        )  # fmt: skip
        self.buffer: list[list[Sample]] = []
        if args.rollout_shuffle:
            self.dataset.shuffle(0)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next groups; those to be generated again come first."""
        return [self.buffer.pop(0) if self.buffer else self._next_group() for _ in range(num_samples)]

    def _next_group(self) -> list[Sample]:
        if self.sample_offset == len(self.dataset):
            self.sample_offset, self.epoch_id = 0, self.epoch_id + 1
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
        group = [copy.deepcopy(self.dataset.samples[self.sample_offset]) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_offset += 1
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Groups to be generated again."""
        self.buffer += samples

    def save(self, rollout_id: int) -> None:
        """Keep the position of a checkpoint."""
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({name: getattr(self, name) for name in (*_POSITION, "metadata")}), encoding="utf-8")

    def load(self, rollout_id: int | None = None) -> None:
        """Go back to it; nothing where there is none."""
        if self.args.load is None or not self._path(self.args.load, rollout_id).exists():
            return
        vars(self).update(json.loads(self._path(self.args.load, rollout_id).read_text(encoding="utf-8")))
        if self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    @staticmethod
    def _path(folder: str, rollout_id: int | None) -> Path:
        return Path(folder) / f"rollout/global_dataset_state_dict_{rollout_id}.pt"


_POSITION = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")


class SlimeDataSource(RolloutDataSourceWithBuffer):
    """Data source of slime's samples."""

    dataset_of = SlimeDataset


@dataclass(frozen=True)
class DataBufferConstructorInput:
    """`rollout/fully_async_data_buffer.py` of Miles."""

    args: Namespace
    unused_handler_fn: Callable[[list[Sample]], None]


@dataclass
class DataBufferInput:
    """`rollout/fully_async_data_buffer.py` of Miles."""

    prompt_group: list[Sample]
    group: list[Any]


@dataclass
class DynamicFilterOutput:
    """`rollout/filter_hub/base_types.py` of Miles."""

    keep: bool
    reason: str | None = None


def arguments(**values: object) -> Namespace:
    """The parsed arguments that are read: those that a job has to choose, and the frameworks' defaults."""
    chosen: dict[str, Any] = {
        "rollout_batch_size": 8, "n_samples_per_prompt": 4, "rollout_max_response_len": 16, "hf_checkpoint": "none",
        "input_key": "text", "label_key": "label", "eval_datasets": None, "start_rollout_id": 0,
    }  # fmt: skip
    return Namespace(**{**DEFAULTS, **chosen, **values})


DEFAULTS: dict[str, Any] = {
    "apply_chat_template": False, "apply_chat_template_kwargs": {}, "async_data_buffer_capacity_factor": 2.0,
    "async_max_concurrent_samples": None, "async_unused_samples_handler": "drop", "buffer_filter_path": None,
    "chat_template_path": None, "dump_details": None, "dynamic_sampling_filter_path": None, "eval_max_prompt_len": None,
    "eval_min_new_tokens": None, "eval_reward_key": None, "load": None, "max_weight_staleness": None,
    "metadata_key": "metadata", "multimodal_keys": None, "reward_key": None, "rollout_global_dataset": True,
    "rollout_max_context_len": None, "rollout_max_prompt_len": None, "rollout_sample_filter_path": None,
    "rollout_seed": 42, "rollout_shuffle": False, "rollout_skip_special_tokens": False, "rollout_stop": None,
    "rollout_stop_token_ids": None, "rollout_temperature": 1.0, "rollout_top_k": -1, "rollout_top_p": 1.0,
    "save_hf": None, "save_interval": None, "sglang_enable_deterministic_inference": False, "tool_key": "tools",
    "update_weights_interval": 1,
}  # fmt: skip


_BOTH: dict[str, dict[str, Any]] = {
    "rollout.base_types": {"RolloutFnTrainOutput": RolloutFnTrainOutput, "RolloutFnEvalOutput": RolloutFnEvalOutput},
}
CONTENTS: dict[str, dict[str, dict[str, Any]]] = {
    "miles": {
        **_BOTH,
        "utils.types": {"Sample": MilesSample, "AdapterRef": AdapterRef, "RewardSpec": RewardSpec},
        "utils.data": {"Dataset": MilesDataset},
        "utils.eval_config": {"EvalDatasetConfig": EvalDatasetConfig},
        "utils.processing_utils": {"load_tokenizer": load_tokenizer},
        "rollout.data_source": {"RolloutDataSourceWithBuffer": RolloutDataSourceWithBuffer},
        "rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
        "rollout.fully_async_data_buffer": {
            "DataBufferConstructorInput": DataBufferConstructorInput,
            "DataBufferInput": DataBufferInput,
        },
    },
    "slime": {
        **_BOTH,
        "utils.types": {"Sample": SlimeSample},
        "utils.data": {"Dataset": SlimeDataset},
        "utils.eval_config": {"EvalDatasetConfig": SlimeEvalDatasetConfig},
        "utils.processing_utils": {"load_tokenizer": slime_load_tokenizer},
        "rollout.data_source": {"RolloutDataSourceWithBuffer": SlimeDataSource},
    },
}
"""Stand-ins for classes and functions, by package and module."""


def modules(name: str) -> dict[str, ModuleType]:
    """The stand-ins for package `name`, by the names under which they are imported."""
    made: dict[str, ModuleType] = {}
    for path, contents in CONTENTS[name].items():
        parts = (name, *path.split("."))
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            made.setdefault(full, ModuleType(full, "A stand-in."))
            if depth < len(parts):
                made[full].__path__ = []
        vars(made[".".join(parts)]).update(contents)
    return made


def install(name: str) -> None:
    """Put the stand-ins for `name` in place. Raises RuntimeError where the package itself is installed."""
    if importlib.util.find_spec(name) is not None:
        raise RuntimeError(f"{name} is installed: use it")
    sys.modules.update(modules(name))
