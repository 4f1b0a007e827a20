"""`rollout-buffer run` as an operator meets it, against a real service."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_cli.calls import Calls
from buffer_cli.options import CallOptions
from buffer_cli.run import runs
from rollout_buffer.v1 import groups_pb2, runs_pb2, tasks_pb2
from tests.support.rpc import Rpc, RunRpc, connect, failure, make_group, make_task
from tests.support.service import ServiceProcess, running_service


class Command:
    """`rollout-buffer run` against one service."""

    def __init__(self, address: str) -> None:
        self._around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
        self._around |= {"RB_ADDRESS": address, "COLUMNS": "200"}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "buffer_cli", "run", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env=self._around,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def run(service: ServiceProcess) -> Command:
    return Command(service.address)


def test_a_run_is_created_from_a_preset_and_what_is_set(run: Command, rpc: Rpc) -> None:
    made = run(
        "create", "made", "--preset", "areal(1)", "--set", "batch_groups=8", "--set", "environments.math.share=3"
    )
    assert "run made created" in made
    policy = RunRpc(rpc, "made").get().policy
    assert (policy.preset, policy.batch_groups, policy.max_queued_groups, policy.max_lookahead) == (
        "areal(1)",
        8,
        16,
        1,
    )
    assert list(policy.environments) == [runs_pb2.EnvironmentRule(environment="math", share=3)]
    again = run(
        "create", "made", "--preset", "areal(1)", "--set", "batch_groups=8", "--set", "environments.math.share=3"
    )
    assert "exists already" in again
    assert "exists with another policy" in run("create", "made", code=1)


def test_a_policy_is_read_and_changed_field_by_field(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=4, max_staleness=2)
    name = made.run_id
    assert "max_staleness" in run("policy", name)
    before = made.get().policy
    changed = run("policy", name, "--set", "environments.math.share=3", "--set", "max_staleness=none")
    assert changed.splitlines() == ["max_staleness: 2 -> none", "environments.math.share: none -> 3"]
    after = made.get().policy
    assert not after.HasField("max_staleness")
    assert (after.batch_groups, after.lease_ttl_ms) == (before.batch_groups, before.lease_ttl_ms)
    assert run("policy", name, "--set", "environments.math.share=3") == "nothing changes\n"
    values = json.loads(run("policy", name, "--preset", "queue_drop(3)", "--json"))
    assert (values["preset"], values["max_queued_groups"]) == ("queue_drop(3)", "12")


def test_what_somebody_else_changes_meanwhile_stays(
    service: ServiceProcess, rpc: Rpc, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rpc.create(batch_groups=4)
    read = Calls.get

    def read_and_lose_time(calls: Calls, run_id: str) -> runs_pb2.GetRunResponse:
        reply = read(calls, run_id)
        made.update_policy(batch_groups=4, max_attempts=9)
        return reply

    monkeypatch.setattr(Calls, "get", read_and_lose_time)
    options = CallOptions(address=service.address, timeout_s=20)
    runs.policy(made.run_id, options, "", ["retry_backoff_ms=70"], as_json=False)
    policy = made.get().policy
    assert (policy.max_attempts, policy.retry_backoff_ms) == (9, 70)
    assert "retry_backoff_ms: 500 -> 70" in capsys.readouterr().out


def test_a_policy_that_is_refused_says_why_and_stays(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=4)
    before = made.get().policy
    assert "can never hold a batch of 64 groups" in run("policy", made.run_id, "--set", "batch_groups=64", code=1)
    assert "policy.lease_ttl_ms is 5" in run("policy", made.run_id, "--set", "lease_ttl_ms=5", code=1)
    assert "--set lease is" in run("policy", made.run_id, "--set", "lease=5", code=2)
    assert made.get().policy == before
    assert "there is no run 'nobody'" in run("policy", "nobody", "--set", "batch_groups=1", code=1)


def test_runs_are_listed_with_where_they_stand(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=2, max_queued_groups=9)
    made.fill(1)
    listed = run("list")
    lines = listed.splitlines()
    (at,) = [index for index, line in enumerate(lines) if made.run_id in line]
    assert "the feeder: no task is pending" in lines[at]
    assert "1/9" in lines[at + 1]
    found = {item["run_id"]: item for item in json.loads(run("list", "--json"))}
    assert found[made.run_id]["groups"]["queued"]["groups"] == "1"


def test_a_run_is_shown_with_its_environments_and_its_policy(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=2, max_queued_groups=9, filter_equal_rewards=True)
    groups = [make_group(f"x{i}") for i in range(3)]
    groups[0].header.environment = "code"
    for group in groups[:2]:
        group.header.samples[0].reward = 1.0
    made.push(groups)
    shown = run("show", made.run_id)
    for words in (
        "groups by environment",
        "code",
        "sums",
        "1 for equal_rewards",
        "filter_equal_rewards",
        "max_queued_groups",
    ):
        assert words in shown
    values = json.loads(run("show", made.run_id, "--json"))
    ledgers = {entry["environment"]: entry["groups"] for entry in values["environments"]}
    assert ledgers["code"]["queued"]["groups"] == "1"
    assert ledgers["sums"]["filtered"]["groups"] == "1"
    assert values["statistics"]["filtered_equal_rewards"] == "1"


def test_a_run_is_held_and_goes_on(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=1)
    made.submit([make_task("a")])
    assert "is paused" in run("pause", made.run_id)
    assert made.get().paused == "operator"
    assert made.lease().wait == tasks_pb2.LEASE_WAIT_PAUSED
    assert "paused: operator" in run("list")
    assert "goes on" in run("continue", made.run_id)
    assert [lease.task.task_id for lease in made.lease().leases] == ["a"]


def test_a_run_is_drained(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=1)
    made.fill(1)
    assert "is being drained" in run("drain", made.run_id)
    assert made.get().draining
    assert made.pull(0)[0].total_groups == 1
    assert failure(lambda: made.pull(1)).reason == "run_paused"
    assert "the run is drained" in run("show", made.run_id)


def test_a_run_is_deleted_only_when_that_is_certain(run: Command, rpc: Rpc) -> None:
    made = rpc.create(batch_groups=2)
    made.fill(1)
    assert "--yes" in run("delete", made.run_id, code=2)
    assert made.get().groups.queued.groups == 1
    assert "is deleted" in run("delete", made.run_id, "--yes")
    assert failure(made.get).reason == "unknown_run"
    assert "there is no run" in run("delete", made.run_id, "--yes", code=1)


def test_a_service_bounds_what_its_runs_may_ask_for(tmp_path: Path) -> None:
    with running_service(tmp_path, max_run_groups=128, max_run_bytes=1 << 30) as bounded:
        run = Command(bounded.address)
        run("create", "modest")
        client = connect(bounded.address)
        policy = RunRpc(client, "modest").get().policy
        assert (policy.quota_groups, policy.quota_tokens, policy.quota_bytes) == (128, 0, 1 << 30)
        refused = run("create", "greedy", "--set", "quota_groups=129", code=1)
        assert "policy.quota_groups is 129" in refused
        assert "at most 128, the service's max_run_groups" in refused
        made = client.create(batch_groups=32)
        acks = made.push([make_group(f"x{i}") for i in range(3)])
        assert {ack.outcome for ack in acks} == {groups_pb2.PUSH_OUTCOME_QUEUED}
        client.channel.close()
