"""Spans and their contexts. These are derived from what every process knows, so that none has to be stored or sent.

A group has a trace, and so has a weight version. Their ids are hashes of the run and of the group's id, or of term and
version. So worker, service and trainer write into one trace without a word to each other, and a kill loses no context.
The run is named with its creation time: one that is deleted and made anew has other traces.

Invariants: a context is of a span that is recorded, never of one that sampling left out. Ids are never 0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

TRACEPARENT = "traceparent"
"""Name of the field of W3C Trace Context, in gRPC's metadata and in HTTP."""

Fact: TypeAlias = str | bool | int | float | None

_FIELD = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MOST_CHARS = 256


@dataclass(frozen=True, slots=True)
class Context:
    """Context of a span: the ids of its trace, 128 bits, and its own, 64 bits."""

    trace_id: int
    span_id: int

    @classmethod
    def root(cls, *names: object) -> Self:
        """Context of the root of the trace that these names have."""
        return cls.root_of(xxh3_128_intdigest("\0".join(map(str, names)).encode()) or 1)

    @classmethod
    def root_of(cls, trace_id: int) -> Self:
        """Context of the root of this trace."""
        return cls(trace_id, _span_id("root", trace_id & 0xFFFF_FFFF_FFFF_FFFF))

    @classmethod
    def parse(cls, field: str) -> Self | None:
        """Context that a traceparent names; None for what is none, and for one that is not sampled."""
        found = _FIELD.fullmatch(field) if len(field) <= _MOST_CHARS else None
        if found is None or not int(found[3], 16) & _SAMPLED or field.startswith("ff"):
            return None
        trace_id, span_id = int(found[1], 16), int(found[2], 16)
        return cls(trace_id, span_id) if trace_id and span_id else None

    def child(self, name: str) -> Self:
        """Context of the span of this name below this one: always the same."""
        return type(self)(self.trace_id, _span_id(name, self.span_id))

    @property
    def traceparent(self) -> str:
        """Field of W3C Trace Context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED:02x}"


@dataclass(frozen=True, slots=True)
class RunTraces:
    """Traces of a run, by its id and its creation time in milliseconds since 1970."""

    run_id: str
    created_ms: int
    _groups: bytes = field(init=False, repr=False, compare=False)
    """Bytes that are hashed before a group's id; kept, for each process asks of each group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_groups", f"group\0{self.run_id}\0{self.created_ms}\0".encode())

    def group_trace_id(self, group_id: str) -> int:
        """Id of the trace of a group, `task_id/incarnation`."""
        return xxh3_128_intdigest(self._groups + group_id.encode()) or 1

    def group(self, group_id: str) -> Context:
        """Root of the trace of a group, `task_id/incarnation`."""
        return Context.root_of(self.group_trace_id(group_id))

    def update(self, term: int, version: int) -> Context:
        """Root of the trace of a weight version: the steps that are trained for it, its publish, its loads."""
        return Context.root("update", self.run_id, self.created_ms, term, version)

    def step(self, term: int, step: int) -> Context:
        """Root of the trace of a step that no publish followed."""
        return Context.root("step", self.run_id, self.created_ms, term, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Span that is over: a part of the work, from and until nanoseconds since 1970."""

    name: str
    began_ns: int
    ended_ns: int
    context: Context | None = None
    """Its own ids; None: random ones below `parent`."""
    parent: Context | None = None
    """None: it is the root of its trace."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Attributes by name, those without a dot behind `rollout_buffer.`; those that are None are left out."""
    links: Sequence[Context] = ()
    """Spans of other traces that it belongs with."""
    serves: bool = False
    """True for the answer to a call of another process."""
    error: str = ""
    """Reason for its failure; empty: it did not fail."""

    def below(self, parent: Context) -> Self:
        """This span, below `parent`."""
        return replace(self, parent=parent)


def _span_id(name: str, seed: int) -> int:
    return xxh3_64_intdigest(name.encode(), seed) or 1
