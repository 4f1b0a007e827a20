"""Contract of Miles and slime, which this package fulfils: samples, outputs, data sources, loaders.

Read from radixark/miles at 31f1ca9 and THUDM/slime at 624b824 (both 21 August 2026): `utils/types.py` (Sample),
`rollout/base_types.py` (RolloutFnTrainOutput, RolloutFnEvalOutput), `rollout/data_source.py`, `utils/data.py`,
`utils/processing_utils.py`, and of Miles `rollout/fully_async_data_buffer.py`.

Invariant: the classes are the framework's own, imported when a function of this package is first called; nothing here
replaces them. An older slime without `rollout/base_types.py` gets the plain lists that it expects.
"""

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from buffer_wire.errors import InvalidField

Prompt: TypeAlias = str | list[dict[str, str]]
Args: TypeAlias = Namespace
"""Parsed arguments of the framework."""


class Status(Protocol):
    """Members of the enum `Sample.Status` that are used here."""

    COMPLETED: Enum
    TRUNCATED: Enum
    ABORTED: Enum


class Sample(Protocol):
    """Fields of the framework's `Sample` that are read or set here; per-token ones cover the response alone."""

    Status: ClassVar[Status]
    group_index: int | None
    index: int | None
    prompt: Prompt
    tokens: list[int]
    """Token ids of prompt and response, [T]."""
    multimodal_inputs: object
    response: str
    response_length: int
    label: str | None
    reward: float | dict[str, object] | None
    loss_mask: list[int] | None
    weight_versions: list[str]
    rollout_log_probs: list[float] | None
    status: Enum
    metadata: dict[str, object]


PromptGroup: TypeAlias = Sequence[Sample]

_DATASET_SETTINGS = (
    "label_key", "multimodal_keys", "metadata_key", "tool_key", "apply_chat_template",
    "apply_chat_template_kwargs",
)  # fmt: skip
"""Arguments of `Dataset` that an entry of `args.eval_datasets` may set for itself."""


def chosen(config: object, name: str, args: Args, other: str) -> Any:  # noqa: ANN401 - whatever the framework has there
    """Return the config's own value of `name`, else the value of `other` among the arguments; None where neither is."""
    value = getattr(config, name, None)
    return getattr(args, other, None) if value is None else value


class DataSource(Protocol):
    """Source of prompts."""

    def get_samples(self, num_samples: int) -> Sequence[Sequence[object]]:
        """Return the next groups of the framework's samples.

        Samples of one group have the same prompt, each its own index.
        """


class Tokenizer(Protocol):
    """Methods of a tokenizer that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text to token ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""


class EvalDataset(Protocol):
    """Dataset of an evaluation: one entry of `args.eval_datasets`."""

    name: str
    path: str
    n_samples_per_eval_prompt: int

    def inject_metadata(self, sample_metadata: object) -> dict[str, object]:
        """Return the metadata of a sample, with the dataset's overrides."""


class DatasetOf(Protocol):
    """Prompts as the framework's `Dataset` holds them."""

    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Framework:
    """Framework: Miles or slime, by its package name."""

    name: str

    def module(self, path: str) -> ModuleType:
        """Import `<name>.<path>`. Raises ImportError that says where this has to run."""
        try:
            return importlib.import_module(f"{self.name}.{path}")
        except ImportError as error:
            raise ImportError(
                f"trainer_client.integrations.{self.name} runs inside {self.name}'s own processes, where "
                f"'{self.name}.{path}' can be imported; here it cannot: {error}"
            ) from error

    @property
    def sample(self) -> Callable[..., Sample]:
        """Class `Sample` of the framework."""
        return cast("Callable[..., Sample]", self.module("utils.types").Sample)

    def train_output(self, samples: list[list[Sample]], metrics: Mapping[str, float]) -> object:
        """Make RolloutFnTrainOutput, or return the list alone for a slime that has none."""
        types = self._base_types
        return samples if types is None else types.RolloutFnTrainOutput(samples=samples, metrics=dict(metrics))

    def eval_output(self, data: dict[str, dict[str, object]], metrics: Mapping[str, float]) -> object:
        """Make RolloutFnEvalOutput, or return the dict alone for a slime that has none."""
        types = self._base_types
        if types is None:
            return data
        return types.RolloutFnEvalOutput(data=data, metrics=dict(metrics))

    @property
    def _base_types(self) -> ModuleType | None:
        self.module("utils.types")
        try:
            return importlib.import_module(f"{self.name}.rollout.base_types")
        except ModuleNotFoundError:
            return None

    def tokenizer(self, args: Args) -> Tokenizer:
        """Load the tokenizer of `--hf-checkpoint`, as the framework does."""
        options: MutableMapping[str, object] = {"trust_remote_code": True}
        if (template := getattr(args, "chat_template_path", None)) is not None:
            options["chat_template_path"] = template
        load = self.module("utils.processing_utils").load_tokenizer
        return cast("Tokenizer", load(args.hf_checkpoint, **options))

    def dataset(self, args: Args, config: EvalDataset, tokenizer: Tokenizer) -> DatasetOf:
        """Read the prompts of an evaluation as the framework's own evaluation does; text only."""
        made = self.module("utils.data").Dataset(
            path=config.path,
            tokenizer=tokenizer,
            processor=None,
            max_length=args.eval_max_prompt_len,
            prompt_key=chosen(config, "input_key", args, "input_key"),
            **{name: chosen(config, name, args, name) for name in _DATASET_SETTINGS},
        )
        return cast("DatasetOf", made)


MILES = Framework("miles")
SLIME = Framework("slime")


def load_function(path: str | None) -> Callable[..., object] | None:
    """Import the function that an argument of the framework names as "module.function"; None for None.

    Raises InvalidField when there is no such function.
    """
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        return cast("Callable[..., object]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidField("function path", path, f"module.function, importable from here ({error})") from error
