"""Contexts that every process derives alike, and those that callers bring along."""

import pytest

from buffer_wire.tracing.contexts import Context, RunTraces

RUN = RunTraces("math", 1_700_000_000_000)


def test_every_process_derives_the_same_context_of_a_group() -> None:
    # Known answers: processes of other versions have to find the same trace.
    root = RUN.group("t1/0")
    assert root.traceparent == "00-5e61692e0cc13d96b81ad7a741bdf1be-9455600623473004-01"
    assert RUN.group("t1/0").child("queue") == root.child("queue")
    assert root.child("queue").trace_id == root.trace_id
    assert root.child("queue").span_id != root.child("train").span_id != root.span_id


@pytest.mark.parametrize(
    "other",
    [RUN.group("t1/1"), RUN.group("t10/0"), RunTraces("math", 1_700_000_000_001).group("t1/0"), RUN.update(1, 0)],
)
def test_other_groups_runs_and_versions_have_other_traces(other: Context) -> None:
    assert other.trace_id != RUN.group("t1/0").trace_id


def test_a_context_travels_as_a_traceparent() -> None:
    context = RUN.update(1, 2).child("publish")
    assert Context.parse(context.traceparent) == context
    assert Context.parse(f"01-{'a' * 32}-{'b' * 16}-03-more") == Context(int("a" * 32, 16), int("b" * 16, 16))


@pytest.mark.parametrize(
    "field",
    [
        "",
        "00",
        f"00-{'a' * 32}-{'b' * 16}-00",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-01-{'c' * 300}",
    ],
    ids=["empty", "short", "not sampled", "no trace", "no span", "forbidden version", "upper case", "too long"],
)
def test_what_is_no_sampled_context_is_none(field: str) -> None:
    assert Context.parse(field) is None
