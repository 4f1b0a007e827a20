"""`rollout-buffer run record` against a real service: what happened to a run's groups, as tables."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from rollout_buffer.v1 import runs_pb2
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect
from tests.support.service import running_service
from tests.support.store_server import StoreServer, store_server

WAIT_S = 30.0


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, store: StoreServer) -> Iterator[str]:
    with running_service(tmp_path_factory.mktemp("service"), store=store.url) as service:
        yield service.address


@pytest.fixture(scope="module")
def rpc(address: str) -> Iterator[Rpc]:
    client = connect(address)
    yield client
    client.channel.close()


def command(
    run: RunRpc, address: str, folder: Path, *options: str, within: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    recorder = (sys.executable, "-m", "buffer_cli", "run", "record", run.run_id, str(folder))
    return subprocess.Popen(
        [*within, *recorder, "--address", address, *options],
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RB_")},
    )


def record(run: RunRpc, address: str, folder: Path, *options: str) -> str:
    process = command(run, address, folder, *options)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, told
    return told


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    if not (folder / table).exists():
        return []
    read: list[dict[str, Any]] = ds.dataset(folder / table, format="parquet").to_table().to_pylist()
    return sorted(read, key=lambda row: [int(part) for part in row["event_id"].split("-")])


def test_what_happened_to_the_groups_of_a_run(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=3, record_groups=True)
    pushed = run.fill(4)
    run.pull(0)
    run.commit(0)
    record(run, address, tmp_path)

    groups, events = rows(tmp_path, "groups"), rows(tmp_path, "events")
    names = [f"{group.header.task_id}/0" for group in pushed]
    assert [row["group_id"] for row in groups] == names
    assert all(row["state"] == "queued" for row in groups)
    sample = pushed[0].header.samples[0]
    assert groups[0]["response_lengths"][0] == sample.tokens - sample.prompt_len
    assert [(row["kind"], row["state"], row["group_ids"]) for row in events] == [
        ("moved", "dropped_overflow", names[:1]),
        ("micro_batch", None, names[1:3]),
        ("trained", None, []),
    ]
    assert (events[1]["step"], events[1]["micro_batch"], events[2]["step"]) == (0, 0, 1)


def test_a_second_recording_goes_on_and_whole_groups_hold_the_tokens(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(1, "a")
    record(run, address, tmp_path, "--groups")
    run.fill(2, "b")
    assert "3 groups" in record(run, address, tmp_path, "--groups")
    assert "3 groups" in record(run, address, tmp_path, "--groups")
    groups = rows(tmp_path, "groups")
    assert len(groups) == 3
    assert all(len(row["samples"][0]["token_ids"]) == len(row["samples"][0]["loss_mask"]) for row in groups)


def test_a_run_that_keeps_no_events_is_told_how_to(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2)
    run.fill(1)
    told = record(run, address, tmp_path)
    assert f"rollout-buffer run policy {run.run_id} --set record_groups=true" in told
    assert rows(tmp_path, "groups") == []


def test_groups_whose_events_were_trimmed_are_counted_as_missing(
    rpc: Rpc, address: str, store: StoreServer, tmp_path: Path
) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(2, "a")
    assert "missing" not in record(run, address, tmp_path)
    run.fill(4, "b")
    store.trim_records(run.run_id, keep=1)
    assert "at least 3 of 6 accepted groups are missing" in record(run, address, tmp_path)
    assert [row["group_id"] for row in rows(tmp_path, "groups")] == ["a0/0", "a1/0", "b3/0"]
    assert "at least 3 of 6" in record(run, address, tmp_path), "it is said again"


def test_groups_from_before_events_were_kept_are_missing_too(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10)
    run.fill(3, "a")
    run.update_policy(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(1, "b")
    assert "at least 3 of 4 accepted groups are missing" in record(run, address, tmp_path)


def test_a_run_that_was_created_anew_is_not_mixed_into_the_folder(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(2, "a")
    record(run, address, tmp_path)
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)
    policy = runs_pb2.RunPolicy(batch_groups=2, max_queued_groups=10, record_groups=True)
    rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run.run_id, policy=policy), timeout=TIMEOUT_S)
    run.fill(2, "a")
    process = command(run, address, tmp_path)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "holds an earlier run" in told
    assert len(rows(tmp_path, "groups")) == 2


def test_following_ends_cleanly_on_a_signal(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(2)
    process = command(run, address, tmp_path, "--follow")
    deadline = time.monotonic() + WAIT_S
    while len(rows(tmp_path, "groups")) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "2 groups, 0 events" in told


NO_ROOM = ("sh", "-c", 'ulimit -S -f 0 && exec "$@"', "sh")
"""No file that the command writes may grow: a full disk, for it alone."""


def test_following_waits_for_room_on_the_disk(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(2)
    with command(run, address, tmp_path, "--follow", within=NO_ROOM) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting: "), "it says why"
        assert rows(tmp_path, "groups") == []
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        deadline = time.monotonic() + WAIT_S
        while len(rows(tmp_path, "groups")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
        assert (process.returncode, "2 groups" in told) == (0, True), told
    assert len(rows(tmp_path, "groups")) == 2


def test_without_room_on_the_disk_a_recording_ends_with_an_error(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=10, record_groups=True)
    run.fill(2)
    process = command(run, address, tmp_path, within=NO_ROOM)
    _, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, told.startswith("error: "), "Traceback" in told) == (1, True, False), told
    record(run, address, tmp_path)
    assert len(rows(tmp_path, "groups")) == 2


def test_an_unknown_run_is_an_error(rpc: Rpc, address: str, tmp_path: Path) -> None:
    run = rpc.create(batch_groups=2)
    process = command(RunRpc(rpc, "nobody"), address, tmp_path)
    _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "nobody" in told
    assert run.get().run_id == run.run_id


def test_without_pyarrow_it_says_what_to_install(address: str, tmp_path: Path) -> None:
    program = "import sys; sys.modules['pyarrow'] = None; from buffer_cli.main import app; app()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "run", "record", "r", str(tmp_path), "--address", address],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "run record writes Parquet, for which pyarrow has to be installed: the extra `record`\n"
