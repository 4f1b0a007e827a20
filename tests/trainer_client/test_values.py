"""Policies, tasks and manifests on their way into messages and back."""

import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2
from trainer_client import (
    ClientOptions,
    Environment,
    FilesManifest,
    Policy,
    SamplingParams,
    SessionOptions,
    Task,
    WeightFile,
    manifest_of,
)
from trainer_client.tasks import tasks_to_wire

pytestmark = pytest.mark.matrix

FULL = Policy(
    batch_groups=8,
    max_queued_groups=16,
    max_queued_tokens=1000,
    max_queued_bytes=1 << 30,
    overflow_action="block",
    max_staleness=0,
    stale_action="recycle",
    max_inflight_groups=3,
    reserve_queue_space=False,
    max_lookahead=2,
    lease_ttl_ms=5000,
    max_attempts=2,
    retry_backoff_ms=0,
    failure_budget=0,
    max_pending_tasks=9,
    prefetch_batches=1,
    batches_per_publish=2,
    retained_steps=4,
    preset="miles",
    order="stalest_first",
    environments={
        "easy": 1,
        "hard": Environment(share=0, priority=3),
        "": Environment(priority=0, starts_per_minute=90, start_burst=4),
    },
    staleness_measure="mean",
    max_incarnations=3,
    cancel_stale_leases=False,
    filter_equal_rewards=True,
    filter_min_response_tokens=1,
    filter_max_response_tokens=0,
    filter_min_mean_reward_milli=-5,
    filter_max_mean_reward_milli=5,
    min_acceptance_milli=0,
    batch_tokens=100,
    equal_shards=True,
    micro_batch_groups=2,
    max_version_spread=0,
    quota_groups=40,
    quota_tokens=4000,
    quota_bytes=1 << 40,
    max_retained_bytes=7,
    record_groups=True,
    wait_replicas=1,
    wait_timeout_ms=50,
    max_unavailable_engines=2,
    fresh_start_ms=100,
    stale_wait_ms=10,
    order_window_groups=5,
    longest_first=True,
    target_staleness_milli=1_500,
    target_measure="token",
    stages=("rewards", "reference"),
    max_uses=2,
    reuse_share_milli=500,
    reuse_max_staleness=0,
)


def test_every_field_of_the_wire_policy_can_be_stated() -> None:
    assert {field.name for field in fields(Policy)} == set(runs_pb2.RunPolicy.DESCRIPTOR.fields_by_name)


def test_a_policy_survives_the_way_there_and_back() -> None:
    assert Policy.from_wire(FULL.to_wire()) == FULL
    assert None not in [getattr(FULL, field.name) for field in fields(FULL)]
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_environments_are_stated_by_name_a_number_being_the_share() -> None:
    wire = FULL.to_wire()
    assert [(rule.environment, rule.HasField("share"), rule.share) for rule in wire.environments] == [
        ("easy", True, 1),
        ("hard", True, 0),
        ("", False, 0),
    ]
    assert [(rule.HasField("priority"), rule.priority) for rule in wire.environments] == [
        (False, 0),
        (True, 3),
        (True, 0),
    ]
    assert Policy(environments={"easy": 1}) == Policy(environments={"easy": Environment(share=1)})


def test_what_is_unset_is_not_sent() -> None:
    assert Policy().to_wire().ListFields() == []
    assert Policy.from_wire(runs_pb2.RunPolicy()) == Policy()
    # Zero is a value, not an absence.
    assert Policy(max_staleness=0).to_wire().HasField("max_staleness")


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(batch_groups=-1), "policy.batch_groups"),
        (Policy(max_staleness="two"), "policy.max_staleness"),  # type: ignore[arg-type]
        (Policy(overflow_action="explode"), "policy.overflow_action"),  # type: ignore[arg-type]
        (Policy(order="random"), "policy.order"),  # type: ignore[arg-type]
        (Policy(environments={"math": -1}), "policy.environments[math]"),
        (Policy(environments={"math": "much"}), "policy.environments[math]"),  # type: ignore[dict-item]
    ],
)
def test_a_policy_that_no_message_can_hold_is_refused_by_field(policy: Policy, field: str) -> None:
    with pytest.raises(InvalidField) as raised:
        policy.to_wire()
    assert raised.value.attributes["field"] == field


@pytest.mark.parametrize(
    ("make", "named", "close"),
    [
        (lambda: Policy(max_stalness=4), "Policy.max_stalness", "max_staleness"),  # type: ignore[call-arg]
        (lambda: Environment(shares=4), "Environment.shares", "share"),  # type: ignore[call-arg]
        (lambda: SamplingParams(max_tokens=4), "SamplingParams.max_tokens", "max_new_tokens"),  # type: ignore[call-arg]
        (lambda: Task(prompt_tokens=[1]), "Task.prompt_tokens", "prompt_token_ids"),  # type: ignore[call-arg]
        (lambda: ClientOptions(timeout=4), "ClientOptions.timeout", "timeout_s"),  # type: ignore[call-arg]
        (lambda: SessionOptions(pull_timeout=4), "SessionOptions.pull_timeout", "pull_timeout_s"),  # type: ignore[call-arg]
    ],
)
def test_a_misspelt_field_is_answered_with_the_nearest_one(make: Callable[[], object], named: str, close: str) -> None:
    with pytest.raises(InvalidField) as refused:
        make()
    assert refused.value.attributes["field"] == named
    assert refused.value.attributes["limit"] == f"one of its fields ({close} is close)"


def test_environments_without_names_are_refused() -> None:
    with pytest.raises(InvalidField, match="by each name") as raised:
        Policy(environments=["math"])  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == "policy.environments"


def test_a_task_becomes_a_message() -> None:
    task = Task(
        group_size=4,
        sampling=SamplingParams(max_new_tokens=9, temperature=0.5, stop=["\n"], stop_token_ids=[2]),
        prompt_token_ids=np.array([1, 2, 3]),
        task_id="a",
        environment="sums",
        priority=3,
        expected_tokens=70,
        metadata={"answer": "12", "hard": True},
    )
    (wire,) = tasks_to_wire([task])
    assert list(wire.prompt_token_ids) == [1, 2, 3]
    assert (wire.task_id, wire.group_size, wire.environment, wire.priority) == ("a", 4, "sums", 3)
    assert wire.expected_tokens == 70
    assert wire.metadata_json == '{"answer":"12","hard":true}'
    assert wire.sampling.HasField("temperature")
    assert not wire.sampling.HasField("top_p")
    assert not wire.sampling.HasField("top_k")
    assert not wire.sampling.HasField("seed")


def test_every_sampling_parameter_and_the_columns_travel() -> None:
    sampling = SamplingParams(max_new_tokens=9, seed=0, min_p=0.0, repetition_penalty=1.5, min_new_tokens=3)
    (wire,) = tasks_to_wire([Task(group_size=1, sampling=sampling, prompt_token_ids=[1], columns=["sampling_mask"])])
    asked = wire.sampling
    assert asked.HasField("seed")  # 0 is a seed
    assert asked.HasField("min_p")
    assert (asked.seed, asked.min_p, asked.repetition_penalty, asked.min_new_tokens) == (0, 0.0, 1.5, 3)
    assert list(wire.columns) == ["sampling_mask"]


def test_a_chat_task_becomes_a_message() -> None:
    sampling = SamplingParams(max_new_tokens=1)
    (wire,) = tasks_to_wire([Task(group_size=1, sampling=sampling, messages=[{"role": "user", "content": "hi"}])])
    assert [(message.role, message.content) for message in wire.messages] == [("user", "hi")]
    assert wire.metadata_json == ""


SAMPLING = SamplingParams(max_new_tokens=1)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Task(group_size=-1, sampling=SAMPLING), "out of range"),
        (Task(group_size=1, sampling=SAMPLING, metadata={"x": float("nan")}), "metadata: "),
        (Task(group_size=1, sampling=SAMPLING, metadata={"x": object()}), "metadata: "),
        (Task(group_size=1, sampling=SAMPLING, messages=[{"role": "user"}]), "content"),
        (Task(group_size=1, sampling=SAMPLING, prompt_token_ids="hi"), "prompt_token_ids is text"),  # type: ignore[arg-type]
        ({"prompt": "hi"}, "a trainer_client.Task"),
    ],
)
def test_a_task_that_no_message_can_hold_is_refused_by_position(bad: Task, why: str) -> None:
    with pytest.raises(InvalidField, match=why) as raised:
        tasks_to_wire([Task(group_size=1, sampling=SAMPLING), bad])
    assert raised.value.attributes["field"] == "tasks[1]"


def test_the_same_manifest_gives_the_same_bytes() -> None:
    manifest = FilesManifest("/w/v1", (WeightFile("a", 1, b"x" * 32), WeightFile("b/c", 2, b"y" * 32)))
    assert manifest.to_wire().SerializeToString() == manifest.to_wire().SerializeToString()
    assert [file.name for file in manifest.to_wire().files.files] == ["a", "b/c"]


def test_a_directory_becomes_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(b"two")
    (tmp_path / "a.bin").write_bytes(b"")
    manifest = manifest_of(tmp_path)
    assert manifest.base_url == str(tmp_path)
    assert [(file.name, file.size_bytes) for file in manifest.files] == [("a.bin", 0), ("sub/b.bin", 3)]
    assert manifest.files[0].sha256.hex().startswith("e3b0c442")


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_directory_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidField):
        manifest_of(tmp_path / name)
