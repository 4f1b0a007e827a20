"""The recording is what its description says, and its replay is what a trainer would have received."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.support import recorded_groups
from tests.support.recorded_groups import (
    GROUPS,
    SPANNING_GROUPS,
    ReplayWorker,
    recorded_tasks,
    spanning_tasks,
    write_recorded_model,
)
from tests.support.service import running_service
from trainer_client import BufferClient, Group, Policy, Sample, SamplingParams, SessionOptions, Task
from trainer_client.batch import Batch

TOLERANCE = 1e-5
"""Tolerance of a float32 log-probability, computed by SGLang's kernels and by transformers'."""


@pytest.fixture(scope="module")
def groups() -> dict[str, Group]:
    return dict(recorded_groups.recorded_groups())


def model(folder: Path, version: int) -> Qwen3ForCausalLM:
    write_recorded_model(folder, version=version)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def own_logprobs(model: Qwen3ForCausalLM, sample: Sample) -> np.ndarray:
    """The model's log-softmax at tokens 1 to T − 1."""
    token_ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=token_ids).logits[:, :-1].log_softmax(-1)
    found: np.ndarray = logprobs.gather(-1, token_ids[:, 1:, None]).squeeze(-1)[0].numpy()
    return found


def test_every_task_is_recorded_under_its_own_id_and_prompt(groups: dict[str, Group]) -> None:
    tasks = [*recorded_tasks(), *spanning_tasks()]
    assert [task.task_id for task in tasks] == list(groups)
    for task in tasks:
        group = groups[task.task_id]
        assert len(group.samples) == task.group_size
        for sample in group.samples:
            assert sample.token_ids[: sample.prompt_len].tolist() == task.prompt_token_ids
            response = sample.token_ids[sample.prompt_len :]
            assert sample.reward == pytest.approx(float(np.mean(response % 2 == 0)))
            assert len(response) <= task.sampling.max_new_tokens
            assert (len(response) == task.sampling.max_new_tokens) or sample.finish_reason == "stop"


def test_recorded_logprobs_are_the_models_own(groups: dict[str, Group], tmp_path: Path) -> None:
    weights = model(tmp_path, version=0)
    for group in list(groups.values())[:GROUPS]:
        assert group.tail_version == 0
        for sample in group.samples:
            counted = sample.loss_mask.astype(bool)[1:]
            np.testing.assert_allclose(
                sample.logprobs[1:][counted], own_logprobs(weights, sample)[counted], rtol=0, atol=TOLERANCE
            )


def test_tokens_of_a_later_version_have_the_logprobs_of_its_weights(groups: dict[str, Group], tmp_path: Path) -> None:
    spanning = [sample for group in list(groups.values())[GROUPS:] for sample in group.samples]
    assert len(spanning) == 4 * SPANNING_GROUPS
    assert sum(len(sample.spans) > 1 for sample in spanning) >= SPANNING_GROUPS
    newest = max(sample.spans[-1].version.version for sample in spanning)
    for version in (1, newest):
        weights = model(tmp_path / str(version), version=version)
        of_version = [(sample, span) for sample in spanning for span in sample.spans if span.version.version == version]
        assert of_version
        for sample, span in of_version:
            own = own_logprobs(weights, sample)[span.start - 1 : span.end - 1]
            np.testing.assert_allclose(sample.logprobs[span.start : span.end], own, rtol=0, atol=TOLERANCE)


def same_data(batch: Batch, groups: dict[str, Group]) -> None:
    for group in batch.groups:
        recorded = groups[f"recorded-{int(group.task_id[-5:]) % GROUPS:05d}"]
        for sample, original in zip(group.samples, recorded.samples, strict=False):
            np.testing.assert_array_equal(sample.token_ids, original.token_ids)
            np.testing.assert_array_equal(sample.logprobs, original.logprobs)
            np.testing.assert_array_equal(sample.loss_mask, original.loss_mask)
            assert (sample.reward, sample.finish_reason) == (original.reward, original.finish_reason)


def test_replay_gives_each_task_its_group_in_order_and_reports_each_version(
    groups: dict[str, Group], tmp_path: Path
) -> None:
    policy = Policy(batch_groups=32, max_queued_groups=32, overflow_action="block")
    with (
        running_service(tmp_path) as service,
        BufferClient(service.address) as client,
        ReplayWorker(service.address, "r"),
        client.session("r", policy=policy, tasks=recorded_tasks(None, group_size=4)) as session,
    ):
        for batch in itertools.islice(session, 3):
            same_data(batch, groups)
            first = 32 * batch.step
            assert [group.task_id for group in batch.groups] == [f"recorded-{first + i:05d}" for i in range(32)]
            assert {len(group.samples) for group in batch.groups} == {4}
            assert 0 <= batch.info.staleness_max <= 2
            # The queue is full, so the worker's pushes are blocked: the engine reports all the same.
            session.publish(wait_for=1, timeout_s=30)
        assert batch.groups[-1].head_version > 0
        engine = client.run("r").engines[0]
        assert (engine.engine_id, engine.state, engine.loaded.version) == ("e0", "ready", 3)


def test_spanning_groups_keep_the_distances_between_their_versions(groups: dict[str, Group], tmp_path: Path) -> None:
    published = threading.Event()

    def tasks() -> Iterator[Task]:
        assert published.wait(60), "nothing was published"
        yield from spanning_tasks()

    with (
        running_service(tmp_path) as service,
        BufferClient(service.address) as client,
        ReplayWorker(service.address, "r"),
        client.session("r", policy=Policy(batch_groups=SPANNING_GROUPS), tasks=tasks()) as session,
    ):
        session.publish(version=20)
        published.set()
        batch = next(session)
    assert {group.tail_version for group in batch.groups} == {20}
    for group in batch.groups:
        recorded = groups[group.task_id]
        behind = group.tail_version - recorded.tail_version
        for sample, original in zip(group.samples, recorded.samples, strict=True):
            expected = [span.version.version + behind for span in original.spans]
            assert [span.version.version for span in sample.spans] == expected


def test_a_prompt_that_was_not_recorded_ends_the_replay_with_an_error(tmp_path: Path) -> None:
    other = Task(task_id="other", prompt_token_ids=[9, 9], group_size=2, sampling=SamplingParams(max_new_tokens=4))
    with running_service(tmp_path) as service, BufferClient(service.address) as client:
        client.create_run("r", Policy(batch_groups=1))
        with (
            pytest.raises(Exception, match=r"prompt of task other.*recorded_tasks"),
            ReplayWorker(service.address, "r") as worker,
            client.session("r", tasks=[other], options=SessionOptions(pull_timeout_s=2)),
        ):
            worker._thread.join(30)
