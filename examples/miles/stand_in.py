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
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Sample:
    """`utils/types.py`: one prompt, and its response once there is one."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        """Where a sample stands."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every field; the status as its value."""
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Sample":
        """The inverse of `to_dict`."""
        return Sample(**{**data, "status": Sample.Status(data["status"])})

    def reset_for_retry(self) -> None:
        """What was generated is forgotten; the prompt and its identity stay."""
        fresh = Sample(
            self.group_index, self.index, prompt=self.prompt, label=self.label, metadata=self.metadata,
            multimodal_inputs=self.multimodal_inputs, status=Sample.Status.ABORTED,
        )  # fmt: skip
        self.__dict__.update(fresh.__dict__)

    @property
    def oldest_weight_version(self) -> int | None:
        """The smallest version of any call."""
        numbers = [int(version) for version in self.weight_versions if str(version).isdigit()]
        return min(numbers) if numbers else None


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
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """The sample's metadata with the dataset's own on top."""
        return {**(sample_metadata or {}), **self.metadata_overrides}


class Tokenizer:
    """A token is a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - the usual argument
        """Code points."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The inverse."""
        return "".join(chr(token) for token in token_ids)


def load_tokenizer(name_or_path: str, **options: object) -> Tokenizer:  # noqa: ARG001 - there is but one
    """`utils/processing_utils.py`."""
    return Tokenizer()


class Dataset:
    """`utils/data.py`: prompts of a JSON-lines file; `shuffle(epoch)` orders them by seed and epoch alone."""

    def __init__(self, path: str | Path, **options: object) -> None:
        prompt, label = options.get("prompt_key") or "text", options.get("label_key") or "label"
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self._in_file = [
            Sample(prompt=row[prompt], label=row.get(label), metadata={"row": i}) for i, row in enumerate(rows)
        ]
        self._seed = int(str(options.get("seed", 42)))
        self.samples = list(self._in_file)

    def shuffle(self, new_epoch_id: int) -> None:
        """A new order for a new epoch."""
        order = list(range(len(self._in_file)))
        random.Random(self._seed + new_epoch_id).shuffle(order)
        self.samples = [self._in_file[i] for i in order]

    def __len__(self) -> int:
        return len(self._in_file)


class RolloutDataSource:
    """`rollout/data_source.py`: groups of one prompt, over and over; `save` and `load` keep its position."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.dataset = Dataset(args.prompt_data, prompt_key=args.input_key, label_key=args.label_key)
        self.recycled: list[list[Sample]] = []
        if args.rollout_shuffle:
            self.dataset.shuffle(0)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next groups."""
        return [self._next_group() for _ in range(num_samples)]

    def _next_group(self) -> list[Sample]:
        if self.recycled:
            return self.recycled.pop(0)
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
        """Groups to be generated again, before any new one."""
        self.recycled += samples

    def save(self, rollout_id: int) -> None:
        """Keep the position of a checkpoint."""
        names = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")
        self._path(rollout_id).write_text(json.dumps({name: getattr(self, name) for name in names}), encoding="utf-8")

    def load(self, rollout_id: int) -> None:
        """Go back to it."""
        self.__dict__.update(json.loads(self._path(rollout_id).read_text(encoding="utf-8")))
        if self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def _path(self, rollout_id: int) -> Path:
        return Path(self.args.save) / f"global_dataset_state_dict_{rollout_id}.json"


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


@dataclass(frozen=True)
class DynamicFilterOutput:
    """`rollout/filter_hub/base_types.py`."""

    keep: bool
    reason: str | None = None


def arguments(**values: object) -> Namespace:
    """The parsed arguments that are read, with the frameworks' defaults."""
    defaults: dict[str, Any] = {
        "rollout_global_dataset": True, "rollout_shuffle": False, "input_key": "text", "label_key": "label",
        "multimodal_keys": None, "metadata_key": None, "tool_key": None, "apply_chat_template": False,
        "apply_chat_template_kwargs": None, "hf_checkpoint": "none", "n_samples_per_prompt": 4, "rollout_batch_size": 8,
        "rollout_max_response_len": 16, "rollout_max_context_len": None, "rollout_temperature": 1.0,
        "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_stop": None, "rollout_stop_token_ids": None,
        "eval_datasets": None, "eval_max_prompt_len": None, "eval_reward_key": None, "reward_key": None,
        "start_rollout_id": 0, "update_weights_interval": 1, "save_interval": None, "max_weight_staleness": None,
        "dynamic_sampling_filter_path": None, "rollout_sample_filter_path": None, "async_max_concurrent_samples": None,
        "async_data_buffer_capacity_factor": 2.0, "async_unused_samples_handler": "drop",
    }  # fmt: skip
    return Namespace(**{**defaults, **values})


_CONTENTS: dict[str, tuple[Any, ...]] = {
    "utils.types": (Sample,),
    "utils.data": (Dataset,),
    "utils.processing_utils": (load_tokenizer,),
    "rollout.base_types": (RolloutFnTrainOutput, RolloutFnEvalOutput),
    "rollout.fully_async_data_buffer": (DataBufferConstructorInput, DataBufferInput),
}


def modules(name: str) -> dict[str, ModuleType]:
    """The stand-ins for package `name`, by the names under which they are imported."""
    made: dict[str, ModuleType] = {}
    for path, contents in _CONTENTS.items():
        parts = (name, *path.split("."))
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            made.setdefault(full, ModuleType(full, "A stand-in."))
            if depth < len(parts):
                made[full].__path__ = []
        for thing in contents:
            setattr(made[".".join(parts)], thing.__name__, thing)
    return made


def install(name: str) -> None:
    """Put the stand-ins for `name` in place. Raises RuntimeError where the package itself is installed."""
    if importlib.util.find_spec(name) is not None:
        raise RuntimeError(f"{name} is installed: use it")
    sys.modules.update(modules(name))
