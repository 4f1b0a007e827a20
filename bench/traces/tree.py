"""A trace as a tree of text: each span with its service, its times, and a bar on the trace's time."""

from collections.abc import Iterable, Iterator, Sequence

from bench.traces.receiver import ReceivedSpan

BAR = 24
_SHOWN = {
    "rollout": ("attempt", "outcome", "samples", "tokens", "reward_mean"),
    "generate": ("engine", "version"),
    "queue": ("step", "staleness"),
    "train": ("step", "train_version", "version", "staleness"),
    "pull": ("step",),
    "update": ("version", "steps"),
    "publish": ("version",),
    "load": ("engine", "version"),
}
"""Attributes that the tree shows, by the span's name."""


def trace_of(spans: Iterable[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    """Spans of a trace, in order of their beginning; of those that came twice, the last."""
    own = {span.span_id: span for span in spans if span.trace_id == trace_id}
    return sorted(own.values(), key=lambda span: (span.began_ns, -span.ended_ns))


def rows(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[int, ReceivedSpan]]:
    """The spans of a trace with their depths, each below its parent; one whose parent is missing stands at 0."""
    known = {span.span_id for span in spans}

    def below(parent: str, depth: int) -> Iterator[tuple[int, ReceivedSpan]]:
        for span in spans:
            if span.parent_id == parent or (not depth and span.parent_id not in known):
                yield depth, span
                yield from below(span.span_id, depth + 1)

    yield from below("", 0)


def tree(spans: Sequence[ReceivedSpan]) -> str:
    """The tree of one trace, a line for each span."""
    began = min(span.began_ns for span in spans)
    whole = max(1, max(span.ended_ns for span in spans) - began)
    lines = []
    for depth, span in rows(spans):
        first = int((span.began_ns - began) / whole * BAR)
        last = max(first + 1, -int(-(span.ended_ns - began) / whole * BAR // 1))
        bar = ("·" * first + "█" * (last - first)).ljust(BAR, "·")[:BAR]
        name = "  " * depth + span.name
        start_ms, took_ms = (span.began_ns - began) / 1e6, (span.ended_ns - span.began_ns) / 1e6
        facts = [f"{key}={_short(span.facts[key])}" for key in _SHOWN.get(span.name, ()) if key in span.facts]
        if span.error:
            facts.append(f"error={span.error}")
        line = f"{name:<16} {span.service:<15} {start_ms:>9,.1f} {took_ms:>9,.1f}  {bar}  {' '.join(facts)}"
        lines.append(line.rstrip())
    head = f"{'span':<16} {'service':<15} {'from, ms':>9} {'took, ms':>9}"
    return "\n".join([head, *lines])


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
