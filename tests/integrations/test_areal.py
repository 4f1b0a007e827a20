"""AReaL's PPOTrainer on the buffer, whole: its scheduler, an FSDP actor in a process of its own, its disk update.

Needs areal (make test-areal).
"""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("areal") is None:
    pytest.skip("areal is not installed (make test-areal)", allow_module_level=True)

from safetensors.torch import load_file

from buffer_wire.errors import InvalidField
from tests.integrations.areal_training import GROUP_SIZE, POLICY, STEPS, config
from tests.support.recorded_groups import ReplayWorker, recorded_tasks
from tests.support.service import ServiceProcess
from trainer_client import BufferClient
from trainer_client.integrations.areal import BufferController, BufferPPOTrainer, BufferSource

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1500)]


def journalled(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_killed_trainer_recovers_by_areals_own_checkpoint_and_trains_on_the_same_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.integrations.areal_training", service.address, run_id, str(tmp_path)]
    with ReplayWorker(service.address, run_id, patience_s=1400):
        # Step 3 was trained and published, and is in no checkpoint: these are made after every second step.
        assert subprocess.run([*command, "3"], timeout=700, check=False).returncode == -signal.SIGKILL
        first = journalled(tmp_path)
        assert [entry["global_step"] for entry in first] == [0, 1, 2]
        assert client.run(run_id).published.version == 3
        assert subprocess.run([*command, "0"], timeout=700, check=False).returncode == 0
    second = journalled(tmp_path)[len(first) :]

    assert [entry["global_step"] for entry in second] == [2, 3, 4, 5]
    assert (first[2]["tasks"], first[2]["bytes"]) == (second[0]["tasks"], second[0]["bytes"])
    tasks = [task for entry in first[:2] + second for task in entry["tasks"]]
    assert len(set(tasks)) == len(tasks) == 2 * STEPS
    # AReaL's own clock goes on, and no token is of a version that it does not have yet.
    assert [entry["version"] for entry in first + second] == [1, 2, 3, 3, 4, 5, 6]
    for entry in first + second:
        assert entry["version"] - 1 - (POLICY.max_staleness or 0) <= entry["newest"] < entry["version"]
    update = "ppo_actor/update"
    for entry in first + second:
        stats = entry["stats"]
        assert stats[f"{update}/version_stats/sample_staleness_theta_max"] == stats["rollout_buffer/staleness_max"]
    # The first step is on-policy: what SGLang said of its tokens is what AReaL's actor says of them.
    stats = first[0]["stats"]
    assert stats[f"{update}/old_logp/avg"] == pytest.approx(stats[f"{update}/compute_logp/prox_logp_gt/avg"], abs=1e-4)
    assert all(entry["stats"][f"{update}/grad_norm"] > 0 for entry in first + second)
    assert [entry["stats"]["rollout_buffer/step"] for entry in second] == [2, 3, 4, 5]

    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (STEPS, STEPS)
    assert state.ledger.balanced
    published = [load_file(file) for file in sorted((tmp_path / "weights").glob("*/model.safetensors"))]
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert all(any(not weights[name].equal(start[name]) for name in start if name in weights) for weights in published)
    assert published


class Loader:
    batch_size = 2


@pytest.fixture
def controller(client: BufferClient, run_id: str, tmp_path: Path) -> Iterator[BufferController]:
    tasks = recorded_tasks(None, group_size=GROUP_SIZE)
    source = BufferSource(client=client, run_id=run_id, publisher=None, tasks=tasks, policy=POLICY)
    made = BufferController(source, config(tmp_path).rollout, scheduler=None)
    yield made
    made.destroy()


def test_batches_go_through_areals_own_dispatch_and_back(
    controller: BufferController, service: ServiceProcess, run_id: str
) -> None:
    from areal.infra.controller.train_controller import _dispatch_tensors
    from areal.infra.rpc.serialization import deserialize_value, serialize_value
    from areal.utils.data import concat_batch, split_batch

    with ReplayWorker(service.address, run_id):
        made = controller.prepare_batch(Loader(), group_size=GROUP_SIZE)
    assert [trajectory["rewards"].shape for trajectory in made] == [(GROUP_SIZE,), (GROUP_SIZE,)]
    shares, _ = _dispatch_tensors(made, 2)
    assert [len(share) for share in shares] == [1, 1]
    batch, meta = concat_batch(deserialize_value(serialize_value(made)))
    again = split_batch(batch, meta)
    assert again is not None
    for before, after in zip(made, again, strict=True):
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"should_accept_fn": "my:function"}, "dynamic_filter_fn"), ({"dynamic_bs": True}, "dynamic_bs")],
)
def test_what_a_run_cannot_give_is_refused_before_it_is_taken_over(
    asked: dict[str, Any], named: str, controller: BufferController
) -> None:
    with pytest.raises(InvalidField, match=rf"^{named}"):
        controller.prepare_batch(Loader(), group_size=GROUP_SIZE, **asked)
    assert controller.session is None


def test_policy_that_adds_groups_to_a_step_is_refused(client: BufferClient, run_id: str, tmp_path: Path) -> None:
    policy = replace(POLICY, max_uses=2, reuse_share_milli=500, reuse_max_staleness=2)
    source = BufferSource(client=client, run_id=run_id, publisher=None, tasks=[], policy=policy)
    made = BufferController(source, config(tmp_path).rollout, scheduler=None)
    with pytest.raises(InvalidField, match=r"^policy.max_uses"):
        made.prepare_batch(Loader(), group_size=GROUP_SIZE)


def test_groups_of_another_size_than_areal_normalizes_by_are_refused(
    controller: BufferController, service: ServiceProcess, run_id: str
) -> None:
    with ReplayWorker(service.address, run_id), pytest.raises(InvalidField, match=r"^group_size.*n_samples, 3"):
        controller.prepare_batch(Loader(), group_size=3)


def test_a_config_that_the_buffer_does_not_serve_is_refused_before_anything_starts(
    client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    asked = config(tmp_path)
    source = BufferSource(client=client, run_id=run_id, publisher=None)
    with pytest.raises(InvalidField, match=r"^actor\.weight_update_mode"):
        BufferPPOTrainer(replace(asked, actor=replace(asked.actor, weight_update_mode="xccl")), buffer=source)
