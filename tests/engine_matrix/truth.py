"""The truth about versions: weights of version v always emit one token, whatever is drawn, and that token tells v.

So what a token's span says can be compared with what made it. Neighbouring versions never share a token, nor any two
within VERSIONS of each other. With a `salt` of its own a run shares the tokens of its versions with no other run. So
weights which an engine has kept from another one show as well.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_model import TinyModelShape, constant_tensors, write_constant_model
from trainer_client.batch import Batch, Group, Sample

SHAPE = TinyModelShape()
FIRST = 100
VERSIONS = 256


def token_of(version: int, salt: int) -> int:
    """Return what weights of this version emit."""
    return FIRST + (version + salt) % VERSIONS


def write_version(directory: Path, version: int, salt: int, *, shape: TinyModelShape = SHAPE) -> Path:
    """The model of a version; `directory`."""
    return write_constant_model(directory, token_of(version, salt), shape=shape)


def tensors_of(version: int, salt: int) -> dict[str, Any]:
    """Make the same weights as a state dict."""
    import torch

    tensors = constant_tensors(token_of(version, salt), shape=SHAPE)
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


@dataclass(slots=True)
class Seen:
    """Sums over everything that a trainer was given."""

    salt: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Response tokens."""
    spanning_samples: int = 0
    """Samples with tokens of more than one version."""
    mislabelled: int = 0
    """Tokens whose span names another version than the one that made them."""
    overstated: int = 0
    """Mislabelled tokens whose span names an older version than the one that made them."""
    elsewhere: int = 0
    """Mislabelled tokens that are not the first of their span."""
    wrong: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Mislabelled tokens by the version that their span names and the one that made them, modulo VERSIONS."""
    task_ids: list[str] = field(default_factory=list)
    """Task ids in the order of delivery."""

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        for group in batch.groups:
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Count a group."""
        self.groups += 1
        self.task_ids.append(group.header.task_id)
        for sample in group.samples:
            self._add_sample(sample)

    def _add_sample(self, sample: Sample) -> None:
        tokens = np.asarray(sample.token_ids[sample.prompt_len :])
        claimed = np.full(len(tokens), -1)
        starts = [span.start - sample.prompt_len for span in sample.spans]
        for start, span in zip(starts, sample.spans, strict=True):
            claimed[start : span.end - sample.prompt_len] = span.version.version
        wrong = np.flatnonzero(tokens != FIRST + (claimed + self.salt) % VERSIONS)
        versions = [span.version.version for span in sample.spans]
        assert versions == sorted(versions), f"versions fall within a sample: {sample.spans}"
        self.samples += 1
        self.tokens += len(tokens)
        self.spanning_samples += len(set(versions)) > 1
        self.mislabelled += len(wrong)
        for at in wrong:
            self.wrong[int(claimed[at]) % VERSIONS, (int(tokens[at]) - FIRST - self.salt) % VERSIONS] += 1
            behind = (int(claimed[at]) + self.salt - (int(tokens[at]) - FIRST)) % VERSIONS
            self.overstated += behind > VERSIONS // 2
            self.elsewhere += int(at) not in starts


def twice(task_ids: Iterable[str]) -> set[str]:
    """List those that appear more than once."""
    seen: set[str] = set()
    return {task_id for task_id in task_ids if task_id in seen or seen.add(task_id)}  # type: ignore[func-returns-value]
