"""Weight versions as the worker handles them: ordered, hashable, and as the labels that engines carry.

A label is `term.version`, as in `2.17`. An engine that was never updated reports a label of its own; its weights are
BASE.
"""

import re
from dataclasses import dataclass
from typing import Self

from rollout_buffer.v1 import common_pb2

_LABEL = re.compile(r"([1-9]\d{0,9})\.(0|[1-9]\d{0,18})")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """(term, version), ordered by term first: a resume starts a new term, whose version may be lower."""

    term: int
    version: int

    @property
    def label(self) -> str:
        """The name under which an engine holds these weights."""
        return f"{self.term}.{self.version}"

    @classmethod
    def parse(cls, label: str) -> Self | None:
        """The version of a label; None for a label that no worker gave."""
        match = _LABEL.fullmatch(label)
        return cls(int(match[1]), int(match[2])) if match else None

    @classmethod
    def of(cls, wire: common_pb2.WeightVersion) -> Self:
        """Version of a message; terms begin at 1, so an unset one is BASE."""
        return cls(wire.term or 1, wire.version)

    def wire(self) -> common_pb2.WeightVersion:
        """Version as a message."""
        return common_pb2.WeightVersion(term=self.term, version=self.version)

    def __str__(self) -> str:
        return self.label


BASE = Version(1, 0)
"""The weights that engines start with."""
