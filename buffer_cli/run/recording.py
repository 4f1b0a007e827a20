"""Recordings as Parquet: a folder with the tables `groups` and `events`, many files each.

Invariant: the folder holds every event up to its cursor exactly once, also after a crash at any moment. A portion's
files are named by the cursor they start from and written aside, then renamed; the cursor moves last. A portion that
was cut short is written again under the same names.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffer_wire.layout import LOGPROBS, LOSS_MASK, TOKEN_IDS, read_payload
from rollout_buffer.v1 import groups_pb2, runs_pb2

CURSOR = "cursor.json"

_SPAN = pa.struct([("term", pa.uint32()), ("version", pa.uint64()), ("start", pa.uint32()), ("end", pa.uint32())])
_SAMPLE = pa.struct(
    [
        ("prompt_len", pa.uint32()),
        ("finish_reason", pa.string()),
        ("spans", pa.list_(_SPAN)),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)

GROUPS = pa.schema(
    [
        ("event_id", pa.string()),
        ("time_ms", pa.uint64()),
        ("group_id", pa.string()),
        ("sequence", pa.uint64()),
        ("environment", pa.string()),
        ("state", pa.string()),
        ("response_lengths", pa.list_(pa.uint32())),
        ("rewards", pa.list_(pa.float32())),
        ("tokens", pa.uint64()),
        ("bytes", pa.uint64()),
        ("head_version", pa.uint64()),
        ("tail_version", pa.uint64()),
        ("mean_version_milli", pa.uint64()),
        ("trajectory_rewards", pa.list_(pa.float32())),
    ]
)
"""One row per accepted group. `trajectory_rewards` is null where each sample is a trajectory of its own.

With whole groups there is a column `samples` too, null where the payload was gone.
"""

WHOLE_GROUPS = GROUPS.append(pa.field("samples", pa.list_(_SAMPLE)))

EVENTS = pa.schema(
    [
        ("event_id", pa.string()),
        ("time_ms", pa.uint64()),
        ("kind", pa.string()),
        ("group_ids", pa.list_(pa.string())),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("step", pa.uint64()),
        ("micro_batch", pa.uint32()),
        ("train_version", pa.uint64()),
        ("metadata", pa.string()),
        ("error", pa.string()),
        ("rewards", pa.list_(pa.float32())),
        ("trajectory_rewards", pa.list_(pa.float32())),
    ]
)
"""Events of groups and tasks: kind `submitted` (a task with metadata; its first group's id), `moved` (state says where
to), `micro_batch` (they entered a step), `trained` (every step below `step` is committed; group_ids is empty),
`rewarded` (a stage wrote the group's rewards) and `failed` (the group never comes).
"""


class Recording:
    """A folder that a recording is written to. Raises ValueError when it holds another run's."""

    def __init__(self, folder: Path, run_id: str, *, whole: bool) -> None:
        self._folder = folder
        self._run_id = run_id
        self._schema = WHOLE_GROUPS if whole else GROUPS
        self.after = ""
        """Id of the last event in the folder, "" for none."""
        self._created_ms = 0
        """Creation of the run; 0: not known yet."""
        self.groups = self.events = 0
        """Rows in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        cursor = folder / CURSOR
        if cursor.exists():
            stored = json.loads(cursor.read_text())
            if (stored["run_id"], stored["whole"]) != (run_id, whole):
                kind = "whole groups" if stored["whole"] else "headers"
                raise ValueError(f"{folder} holds a recording of run {stored['run_id']!r} ({kind}); choose another")
            self.after, self.groups, self.events = stored["after"], stored["groups"], stored["events"]
            # Folders of earlier versions do not have it.
            self._created_ms = stored.get("created_ms", 0)

    def check_run(self, created_ms: int) -> None:
        """Raises ValueError for a run that was created at another time than the one that is in the folder."""
        if self._created_ms not in {0, created_ms}:
            raise ValueError(
                f"{self._folder} holds an earlier run {self._run_id!r}, which was deleted since; choose another folder"
            )
        self._created_ms = created_ms

    def append(self, records: Sequence[runs_pb2.Record]) -> None:
        """Write the next events of the recording; they are in the folder for good when this returns. Raises OSError."""
        if not records:
            return
        accepted = [_group_row(record) for record in records if record.WhichOneof("event") == "accepted"]
        others = [_event_row(record) for record in records if record.WhichOneof("event") != "accepted"]
        name = f"{self.after or '0-0'}.parquet"
        self._write("groups", name, accepted, self._schema)
        self._write("events", name, others, EVENTS)
        after, groups, events = records[-1].event_id, self.groups + len(accepted), self.events + len(others)
        state = {
            "run_id": self._run_id,
            "created_ms": self._created_ms,
            "whole": self._schema is WHOLE_GROUPS,
            "after": after,
            "groups": groups,
            "events": events,
        }
        _write_aside(self._folder / CURSOR, lambda path: path.write_text(json.dumps(state)))
        # Only now: after a write that failed the same portion is written again, in place of what is there of it.
        self.after, self.groups, self.events = after, groups, events

    def _write(self, table: str, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
        path = self._folder / table / name
        path.parent.mkdir(exist_ok=True)
        if rows:
            content = pa.Table.from_pylist(rows, schema=schema)
            _write_aside(path, lambda aside: pq.write_table(content, aside, compression="zstd"))
        else:
            path.unlink(missing_ok=True)


def _write_aside(path: Path, write: Any) -> None:  # noqa: ANN401 - any callable that fills a file
    # The name is one that readers of *.parquet pass over.
    aside = path.with_name(f".{path.name}.part")
    write(aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)


def _group_row(record: runs_pb2.Record) -> dict[str, Any]:
    event = record.accepted
    row = {name: getattr(event, name) for name in GROUPS.names if name != "event_id"}
    row["event_id"] = record.event_id
    row["response_lengths"] = list(event.response_lengths)
    row |= _rewards(event)
    if event.HasField("group"):
        row["samples"] = list(_samples(event.group))
    return row


def _rewards(event: runs_pb2.GroupAccepted | runs_pb2.GroupRewarded) -> dict[str, list[float] | None]:
    return {"rewards": list(event.rewards), "trajectory_rewards": list(event.trajectory_rewards) or None}


def _samples(group: groups_pb2.Group) -> Iterable[dict[str, Any]]:
    columns = read_payload(group.header, group.payload)
    start = 0
    for sample in group.header.samples:
        stop = start + sample.tokens
        yield {
            "prompt_len": sample.prompt_len,
            "finish_reason": groups_pb2.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower(),
            "spans": [
                {
                    "term": span.version.term,
                    "version": span.version.version,
                    "start": span.start,
                    "end": span.end,
                }
                for span in sample.spans
            ],
            **{name: columns[name][start:stop] for name in (TOKEN_IDS, LOGPROBS, LOSS_MASK)},
        }
        start = stop


def _event_row(record: runs_pb2.Record) -> dict[str, Any]:
    kind = record.WhichOneof("event")
    row: dict[str, Any] = {"event_id": record.event_id, "kind": kind, "group_ids": []}
    if kind == "moved":
        moved = record.moved
        row |= {"time_ms": moved.time_ms, "group_ids": [moved.group_id], "state": moved.state}
        row["reason"] = moved.reason or None
    elif kind == "micro_batch":
        closed = record.micro_batch
        row |= {
            "time_ms": closed.time_ms,
            "group_ids": list(closed.group_ids),
            "step": closed.step,
            "micro_batch": closed.micro_batch,
            "train_version": closed.train_version,
        }
    elif kind == "reused":
        again = record.reused
        row |= {"time_ms": again.time_ms, "group_ids": list(again.group_ids), "step": again.step}
        row["train_version"] = again.train_version
    elif kind == "trained":
        row |= {"time_ms": record.trained.time_ms, "step": record.trained.committed_steps}
    elif kind == "submitted":
        new = record.submitted
        row |= {"time_ms": new.time_ms, "group_ids": [f"{new.task_id}/0"], "metadata": new.metadata_json}
    elif kind == "failed":
        failed = record.failed
        row |= {"time_ms": failed.time_ms, "group_ids": [failed.group_id], "error": failed.error}
    elif kind == "rewarded":
        given = record.rewarded
        row |= {"time_ms": given.time_ms, "group_ids": [given.group_id], **_rewards(given)}
    return row
