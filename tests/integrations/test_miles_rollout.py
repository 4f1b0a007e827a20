"""The rollout function for Miles and slime: real service, simulated engines, stand-ins for the frameworks' classes."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import BatchNotReady, InvalidField, StaleTerm
from tests.integrations.miles_contract import installed, job, prompts, types_of
from tests.support.service import ServiceProcess
from tests.workers.process import worker_process
from trainer_client import BufferClient
from trainer_client.integrations import miles, slime
from trainer_client.integrations.miles.rollout import AsyncRolloutWorker
from trainer_client.integrations.miles.settings import Settings

MILES, SLIME = types_of("miles"), types_of("slime")
Sample = MILES.Sample
LOGGER = "trainer_client.integrations.miles"
ENGINE = (
    "--simulate", "--tokens-per-s", "4000", "--vocab-size", "1000", "--length-median", "6", "--lease-wait-s", "1",
    "--reward", "tests.integrations.miles_contract:length_reward",
)  # fmt: skip


@pytest.fixture(autouse=True)
def contract() -> Iterator[None]:
    with installed("miles"), installed("slime"):
        yield
        miles.stop_global_worker()


def until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s} s until {what}"
        time.sleep(0.05)


def generate(args: Any, rollout_id: int, source: Any, *, evaluation: bool = False, by: Any = miles) -> Any:
    """Generate as the frameworks call it."""
    return by.generate_rollout_fully_async(args, rollout_id, source, evaluation=evaluation)


def contents(output: Any) -> list[list[dict[str, Any]]]:
    return [[sample.to_dict() for sample in group] for group in output.samples]


def test_rollouts_hold_whole_groups_in_order_and_every_field(
    service: ServiceProcess, client: BufferClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop as train_async.py runs it: each rollout is asked for before the one ahead of it is trained."""
    caplog.set_level(logging.INFO, LOGGER)
    it = job(tmp_path, service.address, "fields", rollout_shuffle=True)
    source = it.source()
    outputs: list[Any] = []
    with worker_process(service.address, "fields", tmp_path, *ENGINE):
        for rollout_id in range(4):
            outputs.append(generate(it.args, rollout_id, source))
            if rollout_id:
                assert miles.publish_weights(it.args, rollout_id - 1) == rollout_id
                # A repeat, of a program that was killed right after it, changes nothing.
                assert miles.publish_weights(it.args, rollout_id - 1) == rollout_id
    seen = set()
    assert {type(output) for output in outputs} == {MILES.RolloutFnTrainOutput}
    for output in outputs:
        assert [len(group) for group in output.samples] == [2, 2, 2]
        firsts = [group[0].index for group in output.samples]
        assert firsts == sorted(firsts)
        for group in output.samples:
            assert group[0].group_index not in seen
            seen.add(group[0].group_index)
            assert [sample.index for sample in group] == [group[0].index, group[0].index + 1]
            assert group[0].index == 2 * group[0].group_index
            for sample in group:
                check(sample)
    # The version that trains on a rollout counts the updates that still come before it.
    assert [output.metrics["rollout/fully_async/train_version"] for output in outputs] == [0, 1, 2, 3]
    run = client.run("fields")
    assert (run.committed_steps, run.published.version) == (3, 3)
    assert run.ledger.balanced
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["Creating new global async worker...", "Continuous async rollout worker started"]
    assert said.count("Creating new global async worker...") == 1
    assert said[2] == "Global worker queue size: 0"
    assert "Staleness stats: recycled=0, avg_staleness=0.0, max_staleness=0" in said


def check(sample: Any) -> None:
    assert sample.prompt == f"what is {sample.label}?"
    assert sample.metadata == {"row": int(sample.label or "")}
    assert "".join(map(chr, sample.tokens)) == f"{sample.prompt}{sample.response}"
    length = sample.response_length
    assert 1 <= length == len(sample.response) <= 16
    assert sample.loss_mask == [1] * length
    assert sample.rollout_log_probs is not None
    assert len(sample.rollout_log_probs) == length
    assert all(logprob < 0 for logprob in sample.rollout_log_probs)
    assert sample.reward == int(sample.label or "") + length
    assert sample.status is Sample.Status.COMPLETED or (sample.status is Sample.Status.TRUNCATED and length == 16)
    assert sample.weight_versions
    assert sample.oldest_weight_version is not None


def test_limit_of_staleness_holds_and_recycled_prompts_come_again(
    service: ServiceProcess,
    client: BufferClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue of groups that began at version 0, and updates that follow each other quickly."""
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setenv("MAX_INFLIGHT_GROUPS", "24")
    it = job(tmp_path, service.address, "stale", max_weight_staleness=1, rollout_buffer_publish="rollout")
    source = it.source()
    with worker_process(service.address, "stale", tmp_path, *ENGINE):
        outputs = [generate(it.args, 0, source)]
        until(lambda: client.run("stale").ledger.groups.queued.groups >= 9, "nine groups are queued")
        outputs += [generate(it.args, rollout_id, source) for rollout_id in range(1, 6)]
        run = client.run("stale")
    assert run.policy.max_staleness == 1
    assert run.policy.max_queued_groups == 1000
    assert [output.metrics["rollout/fully_async/train_version"] for output in outputs] == list(range(6))
    for version, output in enumerate(outputs):
        for group in output.samples:
            for sample in group:
                assert version - sample.oldest_weight_version <= 1
    recycled = sum(output.metrics["rollout/fully_async/recycled_groups"] for output in outputs)
    # Six of the nine were left when version 2 trained.
    assert run.ledger.groups.recycled.groups >= recycled >= 6
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Staleness stats")]
    assert sum(int(line.split("recycled=")[1].split(",")[0]) for line in lines) == recycled
    assert run.ledger.groups.dropped_stale.groups == 0
    assert run.ledger.balanced


def test_restarted_process_gets_the_same_samples_and_no_prompt_twice(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    it = job(tmp_path, service.address, "restart", rollout_shuffle=True)
    source = it.source()
    with worker_process(service.address, "restart", tmp_path, *ENGINE):
        first = []
        for rollout_id in range(4):
            first.append(generate(it.args, rollout_id, source))
            miles.publish_weights(it.args, rollout_id)
            if rollout_id == 1:
                # The checkpoint from which the next process starts; prompts were drawn far beyond it.
                source.save(1)
                assert miles.checkpoint_saved(it.args, 1) == 2
        miles.stop_global_worker()

        it.args.start_rollout_id = 2
        source = it.source()
        source.load(1)
        again = [generate(it.args, rollout_id, source) for rollout_id in (2, 3)]
        assert client.run("restart").committed_steps == 2
        for rollout_id in (2, 3):
            miles.publish_weights(it.args, rollout_id)
        beyond = [generate(it.args, rollout_id, source) for rollout_id in (4, 5)]
        miles.publish_weights(it.args, 4)
    assert [contents(output) for output in again] == [contents(output) for output in first[2:]]
    assert [output.metrics["rollout/fully_async/replayed"] for output in (*again, *beyond)] == [1.0, 1.0, 0.0, 0.0]
    groups = [group[0].group_index for output in (*first, *beyond) for group in output.samples]
    assert len(set(groups)) == len(groups) == 18
    # Nothing between them is lost either: what was not trained is queued, pending or being generated.
    assert max(groups) < client.run("restart").cursor


def test_evaluation_is_served_from_the_datasets(service: ServiceProcess, client: BufferClient, tmp_path: Path) -> None:
    config = MILES.EvalDatasetConfig(
        "held-out", str(prompts(tmp_path, 5, "held_out")), n_samples_per_eval_prompt=3, temperature=0.0,
        max_response_len=4, metadata_overrides={"split": "test"},
    )  # fmt: skip
    it = job(tmp_path, service.address, "evals", eval_datasets=[config], eval_reward_key="score")
    source = it.source()
    with worker_process(service.address, "evals", tmp_path, *ENGINE):
        trained = generate(it.args, 0, source)
        miles.publish_weights(it.args, 0)
        output = generate(it.args, 0, source, evaluation=True)
    assert isinstance(output, MILES.RolloutFnEvalOutput)
    made = output.data["held-out"]
    assert [sample.index for sample in made["samples"]] == list(range(15))
    assert [sample.label for sample in made["samples"]] == [str(i // 3) for i in range(15)]
    for sample, reward, truncated in zip(made["samples"], made["rewards"], made["truncated"], strict=True):
        assert sample.metadata == {"row": int(sample.label), "split": "test"}
        assert sample.reward == {"score": reward}
        assert reward == int(sample.label) + sample.response_length
        assert truncated == (sample.status is Sample.Status.TRUNCATED)
        assert sample.response_length <= 4
        assert not truncated or sample.response_length == 4
        assert sample.weight_versions == ["1"]
    assert output.metrics == {"eval/held-out/failed_prompts": 0}
    assert len(trained.samples) == 3
    assert client.evaluations("evals") == ()


def test_evaluation_of_which_nothing_comes_is_an_error(service: ServiceProcess, tmp_path: Path) -> None:
    config = MILES.EvalDatasetConfig(
        "hard", str(prompts(tmp_path, 2, "hard")), n_samples_per_eval_prompt=1, max_response_len=4
    )
    it = job(tmp_path, service.address, "hard", eval_datasets=[config])
    unable = (*ENGINE[:-1], "tests.workers.reward_functions:broken", "--max-sample-attempts", "1")
    with (
        worker_process(service.address, "hard", tmp_path, *unable),
        pytest.raises(
            miles.EvaluationFailed, match=r"all 2 prompts of 'hard' at rollout 0 failed.*the judge does not know us"
        ),
    ):
        generate(it.args, 0, it.source(), evaluation=True)


def test_wait_without_workers_is_warned_of_and_ends(
    service: ServiceProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    it = job(tmp_path, service.address, "alone", rollout_buffer_no_progress_s=0.5)
    it.args.rollout_buffer_timeout_s = 5
    with pytest.raises(BatchNotReady, match="worker"):
        generate(it.args, 0, it.source())
    said = [record.getMessage() for record in caplog.records]
    assert "Warning: No progress for 0.5s. Queue size: 0, Collected: 0/3" in said
    assert any("waiting for" in line and "worker" in line for line in said)


def test_training_that_does_not_publish_is_told(service: ServiceProcess, tmp_path: Path) -> None:
    it = job(tmp_path, service.address, "forgot")
    source = it.source()
    with worker_process(service.address, "forgot", tmp_path, *ENGINE):
        for rollout_id in (0, 1):
            generate(it.args, rollout_id, source)
        with pytest.raises(miles.WeightsNotPublished, match=r"publish_weights\(args"):
            generate(it.args, 2, source)
        miles.publish_weights(it.args, 0)
        assert len(generate(it.args, 2, source).samples) == 3


def test_hook_publishes_what_was_saved_and_engines_load_it(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    """--save-interval 1 --update-weights-interval 2: every other save is an update."""
    it = job(tmp_path, service.address, "hook", update_weights_interval=2)
    source = it.source()
    with pytest.raises(InvalidField, match="--save-hf"):
        miles.post_save_hook(it.args, 0, "checkpoint", None)
    it.args.save_hf = str(tmp_path / "hf" / "{rollout_id}")
    # A critic's save, which has no such directory.
    miles.post_save_hook(it.args, 1, "checkpoint", None)
    with worker_process(service.address, "hook", tmp_path, *ENGINE):
        for rollout_id in range(2):
            generate(it.args, rollout_id, source)
            saved = tmp_path / "hf" / str(rollout_id)
            saved.mkdir(parents=True)
            (saved / "model.safetensors").write_bytes(bytes([rollout_id]) * 64)
            miles.post_save_hook(it.args, rollout_id, "checkpoint", str(saved))
        run = client.wait_for_engines("hook", 1, timeout_s=60)
        [sample, *_] = generate(it.args, 2, source).samples[0]
    assert (run.published.version, run.committed_steps) == (1, 2)
    assert sample.oldest_weight_version is not None


def test_updates_every_other_rollout_are_counted(service: ServiceProcess, client: BufferClient, tmp_path: Path) -> None:
    it = job(
        tmp_path, service.address, "interval", update_weights_interval=2, rollout_buffer_publish="rollout",
        rollout_buffer_first_rollout=11, start_rollout_id=11,
    )  # fmt: skip
    source = it.source()
    with worker_process(service.address, "interval", tmp_path, *ENGINE):
        outputs = [generate(it.args, rollout_id, source) for rollout_id in range(11, 17)]
    # Updates follow rollouts 11, 13 and 15.
    assert [output.metrics["rollout/fully_async/train_version"] for output in outputs] == [0, 1, 1, 2, 2, 3]
    run = client.run("interval")
    assert (run.published.version, run.committed_steps) == (2, 3)


def test_loop_of_train_py_asks_for_a_rollout_after_the_update(
    service: ServiceProcess, client: BufferClient, tmp_path: Path
) -> None:
    it = job(tmp_path, service.address, "sync", rollout_buffer_lookahead=0, rollout_buffer_publish="rollout")
    source = it.source()
    with worker_process(service.address, "sync", tmp_path, *ENGINE):
        outputs = [generate(it.args, rollout_id, source) for rollout_id in range(3)]
    assert [output.metrics["rollout/fully_async/train_version"] for output in outputs] == [0, 1, 2]
    run = client.run("sync")
    # Rollouts 0 and 1 are trained when 2 is asked for.
    assert (run.published.version, run.committed_steps) == (2, 2)


def test_second_trainer_takes_the_run_over(service: ServiceProcess, tmp_path: Path) -> None:
    it = job(tmp_path, service.address, "zombie")
    with worker_process(service.address, "zombie", tmp_path, *ENGINE):
        source = it.source()
        generate(it.args, 0, source)
        other = AsyncRolloutWorker(it.framework, it.args, it.source(), Settings.of(it.args))
        try:
            other.start(0)
            other.rollout(0)
            with pytest.raises(StaleTerm):
                generate(it.args, 0, source)
        finally:
            other.stop()


def test_sample_filter_and_reward_key_of_the_arguments_are_applied(service: ServiceProcess, tmp_path: Path) -> None:
    it = job(
        tmp_path, service.address, "filter", reward_key="score",
        rollout_sample_filter_path="tests.integrations.test_miles_rollout.remove_the_first",
    )  # fmt: skip
    with worker_process(service.address, "filter", tmp_path, *ENGINE):
        output = generate(it.args, 0, it.source())
    for group in output.samples:
        assert [sample.remove_sample for sample in group] == [True, False]
        assert all(set(sample.reward) == {"score"} for sample in group)


def remove_the_first(args: Any, data: list[list[Any]]) -> None:
    for group in data:
        group[0].remove_sample = True


@pytest.mark.parametrize("has_outputs", [True, False])
def test_slime_gets_its_own_forms(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_outputs: bool
) -> None:
    run_id = f"slime-{has_outputs}"
    config = SLIME.EvalDatasetConfig(
        "few", str(prompts(tmp_path, 2, "few")), n_samples_per_eval_prompt=1, max_response_len=4
    )
    it = job(tmp_path, service.address, run_id, "slime", eval_datasets=[config])
    if not has_outputs:
        # As slime was before it had rollout/base_types.py.
        monkeypatch.setitem(sys.modules, "slime.rollout.base_types", None)
    with worker_process(service.address, run_id, tmp_path, *ENGINE):
        made = generate(it.args, 0, it.source(), by=slime)
        assert slime.publish_weights(it.args, 0) == 1
        evaluated = generate(it.args, 0, it.source(), evaluation=True, by=slime)
    if has_outputs:
        assert isinstance(made, SLIME.RolloutFnTrainOutput)
        assert isinstance(evaluated, SLIME.RolloutFnEvalOutput)
        made, evaluated = made.samples, evaluated.data
    assert [len(group) for group in made] == [2, 2, 2]
    assert len(evaluated["few"]["rewards"]) == 2
