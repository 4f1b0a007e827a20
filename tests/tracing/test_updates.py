"""Traces of versions in a trainer: which steps and groups they have, whatever comes between pull and publish."""

from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from buffer_wire.tracing.contexts import RunTraces
from buffer_wire.tracing.sdk import Tracer
from tests.trainer_client.stand_ins import batch_of
from trainer_client.session.tracing import MAX_STEPS, Updates

RUN = RunTraces("r", 7)


class Run(NamedTuple):
    """Part of a run's state that a trace asks for."""

    run_id: str = "r"
    created_ms: int = 7


class Start(NamedTuple):
    """Part of a resume."""

    term: int = 1


class Traced:
    """A session's traces, and what was recorded."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = Tracer("trainer", self.exporter)
        run: Any = Run()
        start: Any = Start()
        self.updates = Updates(run, start, 0, self.tracer)

    def step(self, number: int, groups: int = 2, *, next_version: int = 1) -> None:
        with self.updates.pulling(next_version):
            pass
        self.updates.got(batch_of(number, groups=groups))

    def publish(self, version: int) -> None:
        with self.updates.publishing(version):
            pass

    def trace(self, trace_id: int) -> list[ReadableSpan]:
        self.tracer.close()
        return [one for one in self.exporter.get_finished_spans() if one.context and one.context.trace_id == trace_id]


def facts(span: ReadableSpan, *names: str) -> list[object]:
    return [(span.attributes or {}).get(f"rollout_buffer.{name}") for name in names]


def test_all_steps_since_the_last_publish_are_of_a_versions_trace() -> None:
    traced = Traced()
    traced.step(0)
    traced.step(1)
    traced.publish(1)
    traced.step(2, next_version=2)
    traced.publish(2)
    first, second = (traced.trace(RUN.update(1, version).trace_id) for version in (1, 2))
    assert sorted(span.name for span in first) == ["publish", "pull", "pull", "train", "train", "update"]
    assert sorted(span.name for span in second) == ["publish", "pull", "train", "update"]
    assert [facts(span, "version", "steps") for span in first if span.name == "update"] == [[1, 2]]


def test_a_version_with_another_number_than_was_expected_has_the_waits_all_the_same() -> None:
    traced = Traced()
    traced.step(0, next_version=1)
    traced.publish(7)
    assert sorted(span.name for span in traced.trace(RUN.update(1, 7).trace_id)) == [
        "publish",
        "pull",
        "train",
        "update",
    ]


def test_groups_that_were_given_back_are_not_trained() -> None:
    traced = Traced()
    traced.step(0, groups=3)
    traced.updates.rejected(["s0g1/0"])
    traced.publish(1)
    (train,) = [span for span in traced.trace(RUN.update(1, 1).trace_id) if span.name == "train"]
    kept = [RUN.group("s0g0/0").trace_id, RUN.group("s0g2/0").trace_id]
    assert [link.context.trace_id for link in train.links] == kept
    assert traced.trace(RUN.group("s0g1/0").trace_id) == []
    (of_group,) = traced.trace(kept[0])
    assert train.context is not None
    assert [link.context.span_id for link in of_group.links] == [train.context.span_id]
    assert facts(of_group, "group", "step", "version") == ["s0g0/0", 0, 1]


def test_a_publish_that_fails_leaves_its_steps_to_the_next_one() -> None:
    traced = Traced()
    traced.step(0)
    with pytest.raises(RuntimeError, match="no disk"), traced.updates.publishing(1):
        raise RuntimeError("no disk")
    traced.publish(2)
    (failed,) = traced.trace(RUN.update(1, 1).trace_id)[1:] or traced.trace(RUN.update(1, 1).trace_id)
    assert (failed.name, failed.status.description) == ("publish", "no disk")
    assert "train" in {span.name for span in traced.trace(RUN.update(1, 2).trace_id)}


def test_steps_without_a_publish_have_traces_of_their_own_and_are_not_kept_for_ever() -> None:
    traced = Traced()
    for number in range(MAX_STEPS + 1):
        traced.step(number, groups=1)
    assert {span.name for span in traced.trace(RUN.step(1, 0).trace_id)} == {"update", "pull", "train"}
    assert traced.trace(RUN.step(1, 1).trace_id) == []


def test_off_nothing_is_kept() -> None:
    run: Any = Run()
    start: Any = Start()
    updates = Updates(run, start, 0)
    with updates.pulling(1):
        updates.got(batch_of(0))
    with updates.publishing(1):
        pass
    updates.close()
    assert updates._steps == {}
