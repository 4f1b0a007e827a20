"""`rollout-buffer inspect` as an operator meets it, against a real service."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer_cli.inspect.text import as_html, segments
from rollout_buffer.v1 import common_pb2, groups_pb2, runs_pb2
from tests.support.commands import command
from tests.support.rpc import RunRpc, connect, make_group, make_task
from tests.support.service import ServiceProcess

COMMANDS = ("tasks", "task", "leases", "groups", "group", "batches", "waits", "wandb")


@pytest.fixture(scope="module")
def run(service: ServiceProcess) -> Iterator[RunRpc]:
    """The service's only run: five pending tasks and one lease, a batch, a group that is queued."""
    rpc = connect(service.address)
    # The lease outlives the tests, however slow the machine is.
    made = rpc.create(batch_groups=2, max_queued_groups=8, max_lookahead=4, lease_ttl_ms=3_600_000)
    made.submit([make_task(f"t{i}", environment="math") for i in range(6)])
    made.lease(1)
    made.fill(2)
    made.pull(0)
    made.push([make_group("long", lengths=(5, 40), rewards=(0.0, 1.0))])
    yield made
    rpc.channel.close()


def inspect(service: ServiceProcess, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    shown = command("inspect", *arguments, "--address", service.address)
    assert shown.returncode == code, shown.stdout + shown.stderr
    assert "Traceback" not in shown.stderr
    return shown


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_explains_itself(name: str) -> None:
    shown = command("inspect", *([name] if name else []), "--help")
    assert shown.returncode == 0
    assert "Usage:" in shown.stdout


def test_lists_are_tables_for_people(service: ServiceProcess, run: RunRpc) -> None:
    pending = inspect(service, "tasks").stdout
    assert [name for name in ("t0", "t1", "t5") if name in pending] == ["t1", "t5"]
    assert "t0/0/1" in inspect(service, "leases", "--worker", "worker").stdout
    assert "no task is leased" in inspect(service, "leases", "--worker", "nobody").stdout
    assert "long/0" in inspect(service, "groups").stdout
    assert "x1/0" in inspect(service, "groups", "--step", "0").stdout
    assert "delivered" in inspect(service, "batches").stdout
    assert "no task is ended" in inspect(service, "tasks", "--state", "ended", "--run", run.run_id).stdout


def test_lists_are_objects_for_programs_and_go_on_where_they_ended(service: ServiceProcess, run: RunRpc) -> None:
    first = json.loads(inspect(service, "tasks", "--json", "--limit", "3").stdout)
    assert [task["task_id"] for task in first["tasks"]] == ["t1", "t2", "t3"]
    token = first["next_page_token"]
    rest = json.loads(inspect(service, "tasks", "--json", "--limit", "0", "--page-token", token).stdout)
    assert [task["task_id"] for task in rest["tasks"]] == ["t4", "t5"]
    assert (rest["next_page_token"], rest["run"]) == ("", run.run_id)
    assert "3 shown" in inspect(service, "tasks", "--limit", "3").stdout


def test_single_things_are_facts(service: ServiceProcess, run: RunRpc) -> None:
    task = inspect(service, "task", "t0").stdout
    assert "t0/0/1" in task
    assert "instance-1" in task
    group = inspect(service, "group", "long/0", "--samples", "--tokens", "1", "--first", "38").stdout
    assert "responses of 4 to 39" in group
    assert "tokens 38 to 39 of 40" in group
    assert json.loads(inspect(service, "group", "long/0", "--json").stdout)["header"]["samples"] == []
    values = json.loads(inspect(service, "group", "long/0", "--samples", "--tokens", "1", "--json").stdout)
    assert base64.b64decode(values["loss_mask"]) == bytes([1] * 40)
    assert "no group" in inspect(service, "group", "none/0", code=1).stderr
    assert "--state" in inspect(service, "tasks", "--state", "done", code=2).stderr


def test_waits_say_who_waits_and_which_rule_binds(service: ServiceProcess, run: RunRpc) -> None:
    told = inspect(service, "waits").stdout
    assert "step 1 needs 2 groups for a batch, 1 queued: the next pull waits" in told
    assert "by max_lookahead" in told
    assert "worker" in told
    assert "rollout_buffer_open_rpcs" in told
    values = json.loads(inspect(service, "waits", "--json").stdout)
    assert values["waits_on"].startswith("generation")
    run.update_policy(batch_groups=2, max_queued_groups=8, max_inflight_groups=3)
    assert "2 of 5 due tasks may be leased (room for groups: 2 by max_inflight" in inspect(service, "waits").stdout
    run.update_policy(batch_groups=2, max_queued_groups=8, max_inflight_groups=1)
    assert "nothing is leased: max_inflight_groups binds" in inspect(service, "waits").stdout
    run.rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=20)
    assert "nothing is leased: the run is paused (operator)" in inspect(service, "waits").stdout
    run.rpc.runs.ContinueRun(runs_pb2.ContinueRunRequest(run=run.ref), timeout=20)


def test_without_a_name_the_only_run_is_meant(service: ServiceProcess, run: RunRpc) -> None:
    other = run.rpc.create()
    try:
        refused = inspect(service, "groups", code=2).stderr
        assert "--run" in refused
        assert other.run_id in refused
        assert "no group is queued" in inspect(service, "groups", "--run", other.run_id).stdout
    finally:
        run.rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=other.ref), timeout=20)


def test_tokens_are_text_by_the_models_tokenizer_and_marked_where_they_are_not_trained(
    service: ServiceProcess, run: RunRpc, tmp_path: Path
) -> None:
    words = tokenizer_of_words(tmp_path)
    shown = inspect(service, "group", "long/0", "--tokens", "1", "--count", "6", "--tokenizer", words).stdout
    assert "sample 1, reward 1.000" in shown
    assert "version 1.0" in shown
    missing = inspect(service, "group", "long/0", "--tokens", "1", "--tokenizer", f"{tmp_path}/none", code=2)
    assert "--tokenizer" in missing.stderr


def test_segments_part_where_version_mask_or_prompt_change() -> None:
    def version(number: int) -> common_pb2.WeightVersion:
        return common_pb2.WeightVersion(term=1, version=number)

    spans = [
        groups_pb2.VersionSpan(start=2, end=4, version=version(3)),
        groups_pb2.VersionSpan(start=4, end=6, version=version(4)),
    ]
    sample = groups_pb2.Sample(tokens=6, prompt_len=2, spans=spans)
    parts = list(segments(sample, [9, 8, 7, 6, 5, 4], bytes([0, 0, 1, 1, 0, 1])))
    assert [(part.kind, part.token_ids) for part in parts] == [
        ("the prompt", (9, 8)),
        ("version 1.3", (7, 6)),
        ("not trained on", (5,)),
        ("version 1.4", (4,)),
    ]
    assert parts[1].colour != parts[3].colour == parts[2].colour
    later = list(segments(sample, [6, 5], bytes([1, 1]), first=3))
    assert [part.kind for part in later] == ["version 1.3", "version 1.4"]
    page = as_html(parts, lambda ids: f"<{len(ids)}>")
    assert "&lt;2&gt;" in page
    assert 'title="version 1.4"' in page


def test_samples_are_logged_to_a_table_of_weights_and_biases(
    service: ServiceProcess, run: RunRpc, tmp_path: Path
) -> None:
    there = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    options = ("--address", service.address, "--step", "0", "--tokenizer", tokenizer_of_words(tmp_path))
    logged = command("inspect", "wandb", "math", "--run", run.run_id, *options, **there)
    assert logged.returncode == 0, logged.stderr
    (file,) = tmp_path.rglob("*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["group"], row["sample"]) for row in rows] == [("x0/0", 0), ("x0/0", 1), ("x1/0", 0), ("x1/0", 1)]
    assert {row["reward"] for row in rows} == {0.5}
    assert all(row["response"].strip() for row in rows)
    # The run's copy names media by their kind; what they hold is in the artifact that is sent.
    assert rows[0]["tokens"] == "Html"


def tokenizer_of_words(folder: Path) -> str:
    """A tokenizer whose token N is the word `wN`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    made = Tokenizer(WordLevel({f"w{number}": number for number in range(1_000)}, unk_token="w0"))
    made.save(str(folder / "tokenizer.json"))
    return str(folder)
