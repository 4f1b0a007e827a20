"""Every bound of a group: the error names the field and the limit."""

from collections.abc import Callable

import numpy as np
import pytest

from buffer_wire import layout, limits
from buffer_wire.errors import InvalidField
from buffer_wire.validate import check_group
from rollout_buffer.v1 import groups_pb2 as pb
from tests.wire.groups import make_header

pytestmark = pytest.mark.matrix


def _set(path: str, value: object) -> Callable[[pb.GroupHeader], object]:
    def change(header: pb.GroupHeader) -> None:
        target: object = header
        *parents, last = path.split(".")
        for name in parents:
            attr, _, index = name.partition("#")
            target = getattr(target, attr)
            if index:
                target = target[int(index)]  # type: ignore[index]
        setattr(target, last, value)

    return change


BROKEN: list[tuple[str, Callable[[pb.GroupHeader], object]]] = [
    ("task_id", _set("task_id", "")),
    ("task_id", _set("task_id", "no spaces")),
    ("task_id", _set("task_id", "x" * 129)),
    ("environment", _set("environment", "x" * 65)),
    ("worker_id", _set("worker_id", "x" * 129)),
    ("metadata_json", _set("metadata_json", "x" * (256 * 1024 + 1))),
    ("samples", lambda h: h.ClearField("samples")),
    ("samples[1].tokens", _set("samples#1.tokens", 0)),
    ("samples[1].tokens", _set("samples#1.tokens", 4_194_305)),
    ("samples[0].prompt_len", _set("samples#0.prompt_len", 5)),
    ("samples[0].loss_tokens", _set("samples#0.loss_tokens", 5)),
    ("samples[0].reward", _set("samples#0.reward", float("nan"))),
    ("samples[0].reward", _set("samples#0.reward", float("inf"))),
    ("samples[0].finish_reason", _set("samples#0.finish_reason", pb.FINISH_REASON_ABORTED)),
    ("samples[0].finish_reason", _set("samples#0.finish_reason", pb.FINISH_REASON_UNSPECIFIED)),
    ("samples[0].spans[0]", _set("samples#0.spans#0.start", 2)),
    ("samples[0].spans", _set("samples#0.spans#0.end", 4)),
    ("samples[0].spans", lambda h: h.samples[0].ClearField("spans")),
    ("samples[0].spans[0].version.term", _set("samples#0.spans#0.version.term", 0)),
    ("samples[0].spans[0].version.version", _set("samples#0.spans#0.version.version", 1 << 43)),
    ("samples[1].spans[0].version.version", _set("samples#1.spans#0.version.version", (1 << 64) - 1)),
    ("samples[0].spans[1]", lambda h: h.samples[0].spans.add(start=2, end=3)),
    ("samples[0].spans[1].version.term", lambda h: h.samples[0].spans.add(start=5, end=6)),
    ("samples[0].turns[0]", lambda h: h.samples[0].turns.add(role="user", start=3, end=9)),
    ("columns", lambda h: h.columns.pop()),
    ("columns[0].name", _set("columns#0.name", "tokens")),
    ("columns[0].dtype", _set("columns#0.dtype", pb.D_TYPE_INT64)),
    ("columns[1].dtype", _set("columns#1.dtype", pb.D_TYPE_FLOAT16)),
    ("columns[2].dtype", _set("columns#2.dtype", pb.D_TYPE_INT32)),
    ("columns[0]", _set("columns#0.axis", pb.AXIS_SAMPLE)),
    ("columns[3].name", lambda h: h.columns.add(name="Bad Name", dtype=pb.D_TYPE_INT8, axis=pb.AXIS_TOKEN)),
    ("columns[3].name", lambda h: h.columns.add(name="logprobs", dtype=pb.D_TYPE_INT8, axis=pb.AXIS_TOKEN)),
    ("columns[3].dtype", lambda h: h.columns.add(name="x", axis=pb.AXIS_TOKEN)),
    ("columns[3].axis", lambda h: h.columns.add(name="x", dtype=pb.D_TYPE_INT8)),
    (
        "columns[3].rows",
        lambda h: h.columns.add(name="x", dtype=pb.D_TYPE_INT8, axis=pb.AXIS_RAGGED, rows=[1]),
    ),
    (
        "columns[3].item_shape",
        lambda h: h.columns.add(name="x", dtype=pb.D_TYPE_INT8, axis=pb.AXIS_TOKEN, item_shape=[1] * 5),
    ),
]


@pytest.mark.parametrize(("field", "change"), BROKEN, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BROKEN)])
def test_a_broken_bound_is_refused_by_name(field: str, change: Callable[[pb.GroupHeader], object]) -> None:
    header, columns = make_header([5, 7])
    change(header)
    with pytest.raises(InvalidField) as caught:
        check_group(header, len(layout.write_payload(columns)))
    assert caught.value.attributes["field"] == field
    assert caught.value.attributes["limit"]


def test_a_valid_group_passes() -> None:
    header, columns = make_header([5, 7])
    check_group(header, len(layout.write_payload(columns)))


@pytest.mark.parametrize("difference", [-1, 1, 8])
def test_a_payload_of_the_wrong_length_is_refused(difference: int) -> None:
    header, columns = make_header([5, 7])
    with pytest.raises(InvalidField, match="columns take"):
        check_group(header, len(layout.write_payload(columns)) + difference)


def test_spans_may_not_run_backwards() -> None:
    header, columns = make_header([5])
    sample = header.samples[0]
    sample.spans[0].end = 3
    late = sample.spans.add(start=3, end=5)
    late.version.term, late.version.version = 1, 1
    with pytest.raises(InvalidField, match="not below"):
        check_group(header, len(layout.write_payload(columns)))


def test_the_largest_version_passes_for_many_tokens() -> None:
    header, columns = make_header([5, 7])
    for sample in header.samples:
        sample.spans[0].version.version = limits.MAX_VERSION
    summary = check_group(header, len(layout.write_payload(columns)))
    assert summary.version_tokens == limits.MAX_VERSION * 10
    assert summary.tail == (1, limits.MAX_VERSION)


def test_what_the_service_needs_to_know_is_summed_up_on_the_way() -> None:
    header, columns = make_header([5, 7])
    header.samples[0].reward = -2.0
    header.samples[0].spans[0].end = 3
    header.samples[0].spans.add(start=3, end=5, version=header.samples[0].spans[0].version)
    header.samples[0].spans[1].version.version = 9
    summary = check_group(header, len(layout.write_payload(columns)))
    assert (summary.tokens, summary.loss_tokens) == (12, 10)
    assert (summary.head, summary.tail) == ((1, 2), (1, 9))
    assert list(summary.response_lengths) == [4, 6]
    assert list(summary.rewards) == [-2.0, 1.0]
    assert summary.version_tokens == 2 * 2 + 2 * 9 + 6 * 2


def test_a_partial_rollout_may_hold_unfinished_and_empty_samples() -> None:
    header, columns = make_header([5, 7])
    header.samples[0].finish_reason = pb.FINISH_REASON_ABORTED
    header.samples[1].prompt_len = 7
    header.samples[1].loss_tokens = 0
    header.samples[1].finish_reason = pb.FINISH_REASON_ABORTED
    header.samples[1].ClearField("spans")
    check_group(header, len(layout.write_payload(columns)), partial_rollout=True)


def test_declared_sizes_beyond_memory_are_refused_without_allocating() -> None:
    header, columns = make_header([5])
    header.columns.add(name="x", dtype=pb.D_TYPE_FLOAT64, axis=pb.AXIS_TOKEN, item_shape=[1 << 29])
    with pytest.raises(InvalidField, match="columns take"):
        check_group(header, len(layout.write_payload(columns)))


def test_numpy_has_a_dtype_for_every_wire_dtype() -> None:
    assert set(layout.NUMPY_DTYPES) == set(pb.DType.values()) - {pb.D_TYPE_UNSPECIFIED}
    assert all(isinstance(d, np.dtype) for d in layout.NUMPY_DTYPES.values())


def rows(*samples: tuple[int, bool, str, float]) -> pb.GroupHeader:
    """A header of samples of 5 tokens, by trajectory, trainable, policy and reward. Sample i is of version i."""
    header, _ = make_header([5] * len(samples))
    for i, (sample, (trajectory, trainable, policy, reward)) in enumerate(zip(header.samples, samples, strict=True)):
        sample.trajectory, sample.policy, sample.reward = trajectory, policy, reward
        sample.spans[0].version.version = i
        if not trainable:
            sample.trainable, sample.loss_tokens = False, 0
    return header


def test_only_rows_that_are_trainable_decide_about_a_group() -> None:
    header = rows((1, False, "", 9.0), (1, True, "", 1.0), (2, True, "", 0.0), (2, True, "", 0.0))
    header.samples[0].ClearField("spans")
    summary = check_group(header, None)
    assert (summary.tokens, summary.loss_tokens) == (20, 12)
    assert (summary.head, summary.tail, summary.version_tokens) == ((1, 1), (1, 3), 4 * (1 + 2 + 3))
    assert (summary.trajectories, summary.mean_reward, summary.equal_rewards) == (2, 0.5, False)
    assert list(summary.response_lengths) == [4, 4, 4]


EQUAL: list[tuple[list[tuple[int, bool, str, float]], bool]] = [
    ([(1, True, "", 1.0), (1, True, "", 1.0)], False),  # One trajectory: nothing to compare it with.
    ([(1, True, "", 1.0), (1, True, "", 1.0), (2, True, "", 1.0)], True),
    ([(1, True, "", 1.0), (1, True, "", 0.0), (2, True, "", 0.5)], False),
    ([(1, True, "", 1.0), (1, False, "", 0.0), (2, True, "", 1.0)], True),
    ([(1, True, "a", 1.0), (1, True, "b", -1.0), (2, True, "a", 1.0), (2, True, "b", -1.0)], True),
    ([(1, True, "a", 1.0), (1, True, "b", -1.0), (2, True, "a", -1.0), (2, True, "b", 1.0)], False),
    ([(0, True, "", 1.0), (0, False, "", 0.0), (0, True, "", 1.0)], True),
]


@pytest.mark.parametrize(("samples", "equal"), EQUAL)
def test_rewards_are_equal_by_trajectory_and_policy(samples: list[tuple[int, bool, str, float]], equal: bool) -> None:
    assert check_group(rows(*samples), None).equal_rewards is equal


BROKEN_ROWS: list[tuple[str, pb.GroupHeader]] = [
    ("samples[0].trajectory", rows((2, True, "", 0.0))),
    ("samples[1].trajectory", rows((1, True, "", 0.0), (0, True, "", 0.0))),
    ("samples[1].trajectory", rows((0, True, "", 0.0), (1, True, "", 0.0))),
    ("samples[1].trajectory", rows((1, True, "", 0.0), (3, True, "", 0.0))),
    ("samples[2].trajectory", rows((1, True, "", 0.0), (2, True, "", 0.0), (1, True, "", 0.0))),
    ("samples[0].policy", rows((1, True, "x" * 65, 0.0))),
    ("samples[0].policy", rows((0, True, "a\nb", 0.0))),
    ("samples", rows((1, False, "", 0.0), (2, False, "", 0.0))),
]


@pytest.mark.parametrize(("field", "header"), BROKEN_ROWS, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BROKEN_ROWS)])
def test_broken_rows_are_refused_by_name(field: str, header: pb.GroupHeader) -> None:
    with pytest.raises(InvalidField) as caught:
        check_group(header, None)
    assert caught.value.attributes["field"] == field


def test_what_is_not_trainable_counts_in_no_loss_and_its_spans_are_checked_where_it_has_some() -> None:
    header = rows((1, True, "", 0.0), (1, False, "", 0.0))
    header.samples[1].loss_tokens = 1
    with pytest.raises(InvalidField, match="not trainable"):
        check_group(header, None)
    check_group(header, None, partial_rollout=True)  # There the mask says what the model wrote.
    header.samples[1].loss_tokens = 0
    header.samples[1].spans[0].end = 4
    with pytest.raises(InvalidField, match="tiling"):
        check_group(header, None)
