"""SkyRL's FullyAsyncRayPPOTrainer on the buffer: its loop on a local Ray, with a policy worker on the CPU.

Needs skyrl (make test-skyrl).
"""

import asyncio
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("skyrl") is None:
    pytest.skip("skyrl is not installed (make test-skyrl)", allow_module_level=True)

from safetensors.torch import load_file

from buffer_wire.errors import InvalidField
from tests.integrations.skyrl_training import BATCH_GROUPS, GROUP_SIZE, POLICY, STEPS, Watched, config, trainer_of
from tests.support.recorded_groups import ReplayWorker, recorded_tasks
from tests.support.service import ServiceProcess
from trainer_client import BufferClient, Policy
from trainer_client.integrations.skyrl import BufferSource

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1500)]


def journalled(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_killed_trainer_resumes_by_skyrls_own_checkpoint_and_trains_on_the_same_groups(
    service: ServiceProcess, client: BufferClient, run_id: str, tmp_path: Path
) -> None:
    program = [sys.executable, "-W", "ignore", "-m", "tests.integrations.skyrl_training"]

    def train(passes: int, dies_after: int) -> int:
        command = [*program, service.address, run_id, str(tmp_path), str(passes), str(dies_after)]
        return subprocess.run(command, timeout=450, check=False).returncode

    with ReplayWorker(service.address, run_id, patience_s=1400):
        # Step 3 was trained and published, and is in no checkpoint: the kill comes before that of the pass's end.
        assert train(passes=1, dies_after=3) == -signal.SIGKILL
        first = journalled(tmp_path)
        assert client.run(run_id).published.version == 3
        assert train(passes=2, dies_after=0) == 0
        # SkyRL's last checkpoint calls itself step 7.
        assert (tmp_path / "checkpoints" / "global_step_7").is_dir()
        assert train(passes=3, dies_after=0) == 0
    later = journalled(tmp_path)[len(first) :]

    assert [entry["global_step"] for entry in first] == [1, 2, 3]
    assert [entry["global_step"] for entry in later] == [3, 4, 5, 6, 7, 8, 9]
    assert (first[2]["tasks"], first[2]["bytes"]) == (later[0]["tasks"], later[0]["bytes"])
    tasks = [task for entry in first[:2] + later for task in entry["tasks"]]
    assert len(set(tasks)) == len(tasks) == BATCH_GROUPS * STEPS * 3
    for entry in first + later:
        figures = entry["figures"]
        assert figures["rollout_buffer/step"] == entry["global_step"] - 1
        assert figures["async/staleness_max"] == figures["rollout_buffer/staleness_max"] <= (POLICY.max_staleness or 0)
        assert figures["policy/grad_norm"] > 0
    # The first step is on-policy: what SGLang said of its tokens is what SkyRL's worker says of them.
    assert first[0]["figures"]["policy/minibatch_rollout_logprobs_abs_diff_mean"] == pytest.approx(0, abs=1e-4)
    assert first[0]["figures"]["loss/avg_final_rewards"] == pytest.approx(
        first[0]["figures"]["rollout_buffer/reward_mean"]
    )

    state = client.run(run_id)
    assert (state.published.version, state.committed_steps) == (STEPS * 3, STEPS * 3)
    assert state.ledger.balanced
    published = [load_file(file) for file in sorted((tmp_path / "weights").glob("*/model.safetensors"))]
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert all(any(not weights[name].equal(start[name]) for name in start if name in weights) for weights in published)
    assert published


Make = Callable[..., Watched]


@pytest.fixture
def make(client: BufferClient, run_id: str, tmp_path: Path) -> Make:
    """Trainer without models: its dispatch is a stand-in that publishes nothing."""

    def made(policy: Policy = POLICY, group_size: int = GROUP_SIZE, **changes: object) -> Watched:
        tasks = recorded_tasks(None, group_size=group_size)
        source = BufferSource(client=client, run_id=run_id, publisher=None, tasks=tasks, policy=policy)
        trainer = trainer_of(source, tmp_path, config(tmp_path, **changes))

        async def synced() -> None:
            pass

        trainer.dispatch = SimpleNamespace(  # type: ignore[assignment]
            save_weights_for_sampler=synced, get_lcm_dp_size=lambda: 1
        )
        return trainer

    return made


def test_groups_of_another_size_than_skyrl_compares_end_the_loop_with_a_refusal(
    make: Make, service: ServiceProcess, run_id: str
) -> None:
    trainer = make(group_size=3)
    with ReplayWorker(service.address, run_id), pytest.raises(InvalidField, match=r"^group_size.*n_samples_per_prompt"):
        asyncio.run(trainer.train())
    assert trainer.session is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_uses": 2, "reuse_share_milli": 500, "reuse_max_staleness": 2}, "max_uses"),
        ({"batch_groups": 3}, "batch_groups"),
        ({"batches_per_publish": 2}, "batches_per_publish"),
        ({"stages": ["values"]}, "stages"),
    ],
)
def test_policy_that_skyrls_steps_cannot_follow_is_refused(make: Make, changes: dict[str, Any], named: str) -> None:
    trainer = make(replace(POLICY, **changes))
    with pytest.raises(InvalidField, match=rf"^policy\.{named}"):
        asyncio.run(trainer.train())
    assert trainer.session is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainer.eval_interval", 5),
        ("trainer.fully_async.sample_full_batch", "true"),
        ("trainer.policy.model.lora.rank", 8),
        ("generator.step_wise_trajectories", "true"),
    ],
)
def test_config_that_the_buffer_does_not_serve_is_refused_by_name(make: Make, option: str, value: object) -> None:
    with pytest.raises(InvalidField, match=rf"^{re.escape(option)}"):
        make(**{option: value})
