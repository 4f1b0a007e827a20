"""Recordings as Parquet: every event once, also after a crash between two files."""

from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from buffer_cli.run.recording import CURSOR, Recording
from buffer_wire.layout import column_of, write_payload
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2


def accepted(number: int, group: groups_pb2.Group | None = None) -> runs_pb2.Record:
    return runs_pb2.Record(
        event_id=f"{number}-0",
        accepted=runs_pb2.GroupAccepted(
            time_ms=1_000 + number,
            group_id=f"t{number}/0",
            sequence=number,
            environment="math",
            response_lengths=[3, 4],
            rewards=[0.5, 1.0],
            tokens=11,
            bytes=100,
            head_version=number,
            tail_version=number + 1,
            mean_version_milli=1_000 * number + 250,
            state="queued",
            group=group,
        ),
    )


def closed(number: int, *groups: int) -> runs_pb2.Record:
    ids = [f"t{group}/0" for group in groups]
    event = runs_pb2.MicroBatchClosed(time_ms=2_000, step=0, micro_batch=1, train_version=7, group_ids=ids)
    return runs_pb2.Record(event_id=f"{number}-0", micro_batch=event)


def rows(folder: Path, table: str) -> list[dict[str, object]]:
    if not (folder / table).exists():
        return []
    read = ds.dataset(folder / table, format="parquet").to_table().to_pylist()
    return sorted(read, key=lambda row: int(row["event_id"].partition("-")[0]))


def whole_group() -> groups_pb2.Group:
    tokens = np.arange(5, dtype=np.int32)
    logprobs = np.array([0, 0, -1, -2, -3], np.float32)
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    columns = [
        column_of("token_ids", tokens, groups_pb2.AXIS_TOKEN),
        column_of("logprobs", logprobs, groups_pb2.AXIS_TOKEN),
        column_of("loss_mask", mask, groups_pb2.AXIS_TOKEN),
    ]
    span = groups_pb2.VersionSpan(version=common_pb2.WeightVersion(term=1, version=4), start=2, end=5)
    sample = groups_pb2.Sample(
        tokens=5, prompt_len=2, loss_tokens=3, finish_reason=groups_pb2.FINISH_REASON_STOP, spans=[span]
    )
    header = groups_pb2.GroupHeader(task_id="t1", samples=[sample], columns=columns)
    return groups_pb2.Group(header=header, payload=write_payload([tokens, logprobs, mask]))


def test_groups_and_what_became_of_them_are_two_tables(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "run", whole=False)
    recording.append([accepted(1), accepted(2), closed(3, 1, 2)])
    trained = runs_pb2.StepsTrained(time_ms=3_000, committed_steps=1)
    moved = runs_pb2.GroupMoved(time_ms=2_500, group_id="t4/0", state="dropped_stale")
    recording.append([runs_pb2.Record(event_id="4-0", moved=moved), runs_pb2.Record(event_id="5-0", trained=trained)])

    groups, events = rows(tmp_path, "groups"), rows(tmp_path, "events")
    assert [row["group_id"] for row in groups] == ["t1/0", "t2/0"]
    assert groups[0]["response_lengths"] == [3, 4]
    assert groups[0]["mean_version_milli"] == 1_250
    assert "samples" not in groups[0]
    assert [row["kind"] for row in events] == ["micro_batch", "moved", "trained"]
    assert (events[0]["group_ids"], events[0]["micro_batch"], events[0]["train_version"]) == (["t1/0", "t2/0"], 1, 7)
    assert (events[1]["group_ids"], events[1]["state"]) == (["t4/0"], "dropped_stale")
    assert events[2]["step"] == 1


def test_what_is_recorded_of_tasks_is_among_the_events(tmp_path: Path) -> None:
    new = runs_pb2.TaskSubmitted(time_ms=1, task_id="t1", metadata_json='{"index":7}')
    failed = runs_pb2.TaskFailed(time_ms=2, group_id="t1/0", error="no such tool")
    records = [runs_pb2.Record(event_id="1-0", submitted=new), runs_pb2.Record(event_id="2-0", failed=failed)]
    Recording(tmp_path, "run", whole=False).append(records)
    first, second = rows(tmp_path, "events")
    assert (first["kind"], first["group_ids"], first["metadata"]) == ("submitted", ["t1/0"], '{"index":7}')
    assert (second["kind"], second["group_ids"], second["error"]) == ("failed", ["t1/0"], "no such tool")


def test_rewards_are_by_trajectory_too_where_samples_are_rows_of_some(tmp_path: Path) -> None:
    of_rows = accepted(1)
    of_rows.accepted.MergeFrom(runs_pb2.GroupAccepted(rewards=[0.25], trajectory_rewards=[0.75, 0.25]))
    given = runs_pb2.GroupRewarded(group_id="t1/0", rewards=[1.0, 0.5, 0.0], trajectory_rewards=[0.75, 0.0])
    written = runs_pb2.Record(event_id="3-0", rewarded=given)
    Recording(tmp_path, "run", whole=False).append([of_rows, accepted(2), written])
    first, second = rows(tmp_path, "groups")
    assert (first["rewards"], first["trajectory_rewards"]) == ([0.5, 1.0, 0.25], [0.75, 0.25])
    assert (second["rewards"], second["trajectory_rewards"]) == ([0.5, 1.0], None)
    (event,) = rows(tmp_path, "events")
    assert (event["rewards"], event["trajectory_rewards"]) == ([1.0, 0.5, 0.0], [0.75, 0.0])


def test_whole_groups_have_their_arrays_and_gone_ones_null(tmp_path: Path) -> None:
    Recording(tmp_path, "run", whole=True).append([accepted(1, whole_group()), accepted(2)])
    first, second = rows(tmp_path, "groups")
    assert second["samples"] is None
    samples = first["samples"]
    assert isinstance(samples, list)
    (sample,) = samples
    assert sample["token_ids"] == [0, 1, 2, 3, 4]
    assert sample["logprobs"] == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert (sample["prompt_len"], sample["finish_reason"]) == (2, "stop")
    assert sample["spans"] == [{"term": 1, "version": 4, "start": 2, "end": 5}]


def test_a_recording_goes_on_where_it_ended(tmp_path: Path) -> None:
    Recording(tmp_path, "run", whole=False).append([accepted(1)])
    again = Recording(tmp_path, "run", whole=False)
    assert (again.after, again.groups) == ("1-0", 1)
    again.append([accepted(2)])
    assert [row["group_id"] for row in rows(tmp_path, "groups")] == ["t1/0", "t2/0"]


def test_a_portion_that_a_crash_cut_short_is_not_there_twice(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "run", whole=False)
    recording.append([accepted(1)])
    cursor = (tmp_path / CURSOR).read_bytes()
    recording.append([accepted(2), closed(3, 1, 2), accepted(4)])
    # The crash: files are written, the cursor is not.
    (tmp_path / CURSOR).write_bytes(cursor)

    again = Recording(tmp_path, "run", whole=False)
    assert again.after == "1-0"
    again.append([accepted(2)])
    again.append([closed(3, 1, 2), accepted(4), accepted(5)])
    assert [row["group_id"] for row in rows(tmp_path, "groups")] == ["t1/0", "t2/0", "t4/0", "t5/0"]
    assert [row["event_id"] for row in rows(tmp_path, "events")] == ["3-0"]


def test_a_folder_of_an_earlier_run_of_the_name_is_refused(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "run", whole=False)
    recording.check_run(created_ms=7_000)
    recording.append([accepted(1)])
    again = Recording(tmp_path, "run", whole=False)
    again.check_run(created_ms=7_000)
    with pytest.raises(ValueError, match="holds an earlier run 'run', which was deleted"):
        again.check_run(created_ms=8_000)


@pytest.mark.parametrize(("run_id", "whole"), [("another", False), ("run", True)])
def test_a_folder_of_another_recording_is_refused(tmp_path: Path, run_id: str, whole: bool) -> None:
    Recording(tmp_path, "run", whole=False).append([accepted(1)])
    with pytest.raises(ValueError, match="holds a recording of run 'run'"):
        Recording(tmp_path, run_id, whole=whole)
