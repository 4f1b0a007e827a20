from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.layout import read_payload
from rollout_buffer.v1 import groups_pb2
from rollout_workers.engine.token_rows import TokenRows
from rollout_workers.engine.types import FinishReason, GeneratedSample
from rollout_workers.errors import GenerationFailed
from rollout_workers.generation.sample import Span
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.versions import BASE, Version
from tests.workers.building import generated, lease, task

PROMPT = np.array([1, 2, 3], np.int32)


def version_of(label: str) -> Version:
    return Version.parse(label) or BASE


def progress_of(*lengths: int, finish: str = "stop", **more: Any) -> GroupProgress:
    progress = GroupProgress(lease(task(group_size=len(lengths), **more)), PROMPT)
    for i, length in enumerate(lengths):
        progress.samples[i].append(generated(i, list(range(10, 10 + length)), finish=finish), version_of)  # type: ignore[arg-type]
    return progress


def test_group_lays_prompt_and_response_of_each_sample_end_to_end() -> None:
    progress = progress_of(2, 1, metadata_json='{"answer": 7}', environment="sums")
    header, payload = progress.to_group([1.0, 0.5], "w")
    columns = read_payload(header, b"".join(payload))
    assert columns["token_ids"].tolist() == [1, 2, 3, 10, 11, 1, 2, 3, 10]
    assert columns["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert columns["logprobs"].tolist() == pytest.approx([0, 0, 0, -0.1, -0.11, 0, 0, 0, -0.1])
    assert [s.tokens for s in header.samples] == [5, 4]
    assert [s.loss_tokens for s in header.samples] == [2, 1]
    assert [s.reward for s in header.samples] == [1.0, 0.5]
    assert (header.metadata_json, header.environment, header.worker_id) == ('{"answer": 7}', "sums", "w")
    span = header.samples[0].spans[0]
    assert (span.version.term, span.version.version, span.start, span.end) == (1, 0, 3, 5)


def test_spans_of_one_version_join_over_engine_calls() -> None:
    progress = GroupProgress(lease(task(group_size=1)), PROMPT)
    sample = progress.samples[0]
    sample.append(generated(0, [5, 6], ("1.1", 0, 2), finish="abort"), version_of)
    sample.append(generated(0, [7, 8], ("1.1", 0, 1), ("1.2", 1, 2), finish="length"), version_of)
    assert sample.spans == [Span(Version(1, 1), 0, 3), Span(Version(1, 2), 3, 4)]
    assert sample.output_ids.tolist() == [5, 6, 7, 8]
    assert sample.finish == "length"


def test_lower_version_of_a_newer_term_is_newer() -> None:
    sample = GroupProgress(lease(task(group_size=1)), PROMPT).samples[0]
    sample.append(generated(0, [5], ("1.9", 0, 1), finish="abort"), version_of)
    sample.append(generated(0, [6], ("2.3", 0, 1)), version_of)
    assert [span.version for span in sample.spans] == [Version(1, 9), Version(2, 3)]


def test_falling_version_is_refused_and_changes_nothing() -> None:
    sample = GroupProgress(lease(task(group_size=1)), PROMPT).samples[0]
    sample.append(generated(0, [5], ("1.2", 0, 1), finish="abort"), version_of)
    with pytest.raises(ValueError, match=r"1\.1 follow tokens of 1\.2"):
        sample.append(generated(0, [6], ("1.1", 0, 1)), version_of)
    assert sample.output_ids.tolist() == [5]


def test_partial_rollout_micro_batch_trip_keeps_tokens_logprobs_spans_and_finished_samples() -> None:
    first = GroupProgress(lease(task(group_size=3)), PROMPT)
    first.samples[0].append(generated(0, [5, 6], ("1.1", 0, 1), ("1.2", 1, 2)), version_of)
    first.samples[1].append(generated(1, [7], ("1.2", 0, 1), finish="abort"), version_of)
    partial_rollout = first.to_partial_rollout("w")
    assert partial_rollout is not None
    assert [s.finish_reason for s in partial_rollout.header.samples] == [
        groups_pb2.FINISH_REASON_STOP,
        groups_pb2.FINISH_REASON_ABORTED,
        groups_pb2.FINISH_REASON_ABORTED,
    ]

    second = GroupProgress(lease(task(group_size=3), attempt=2, partial_rollout=partial_rollout), PROMPT)
    assert second.take_partial_rollout() is None
    assert second.unfinished == [1, 2]
    assert second.newest_of(range(3)) == Version(1, 2)
    for before, after in zip(first.samples, second.samples, strict=True):
        assert before.output_ids.tolist() == after.output_ids.tolist()
        assert before.logprobs.tolist() == after.logprobs.tolist()
        assert before.spans == after.spans

    second.samples[1].append(generated(1, [8, 9], ("1.3", 0, 2)), version_of)
    second.samples[2].append(generated(2, [4], ("1.3", 0, 1)), version_of)
    header, payload = second.to_group([0, 0, 0], "w2")
    assert header.lease_id == "t1/0/2"
    token_ids = read_payload(header, b"".join(payload))["token_ids"]
    assert token_ids.tolist() == [1, 2, 3, 5, 6, 1, 2, 3, 7, 8, 9, 1, 2, 3, 4]
    assert [(s.version.version, s.start, s.end) for s in header.samples[1].spans] == [(2, 3, 4), (3, 4, 6)]


def with_masks(index: int, *masks: list[int], finish: FinishReason = "stop") -> GeneratedSample:
    """Its tokens are the first of each mask."""
    new = generated(index, [mask[0] for mask in masks], finish=finish)
    return replace(new, columns={"sampling_mask": TokenRows.of(masks)})


def test_rows_of_an_engines_column_belong_to_the_tokens_it_made_over_partial_rollouts_and_turns() -> None:
    of = task(group_size=2, columns=["sampling_mask"])
    first = GroupProgress(lease(of), PROMPT)
    first.samples[0].append(with_masks(0, [5, 9], [6], finish="abort"), version_of)
    first.samples[0].interject(np.array([30, 31], np.int32))
    partial_rollout = first.to_partial_rollout("w")

    second = GroupProgress(lease(of, attempt=2, partial_rollout=partial_rollout), PROMPT)
    assert second.take_partial_rollout() is None
    second.samples[0].append(with_masks(0, [7, 8, 9]), version_of)
    second.samples[1].append(with_masks(1, [4], [3, 1]), version_of)
    header, payload = second.to_group([0, 0], "w2")
    columns = read_payload(header, b"".join(payload))
    assert [column.name for column in header.columns[3:]] == ["sampling_mask", "sampling_mask_counts"]
    assert columns["sampling_mask"].tolist() == [5, 9, 6, 7, 8, 9, 4, 3, 1]
    assert columns["sampling_mask"].dtype == columns["sampling_mask_counts"].dtype == np.int32
    assert list(header.columns[3].rows) == [6, 3]
    assert columns["token_ids"].tolist() == [1, 2, 3, 5, 6, 30, 31, 7, 1, 2, 3, 4, 3]
    assert columns["sampling_mask_counts"].tolist() == [0, 0, 0, 2, 1, 0, 0, 3, 0, 0, 0, 1, 2]


def test_rows_of_a_sample_that_starts_anew_are_forgotten() -> None:
    progress = GroupProgress(lease(task(group_size=1, columns=["sampling_mask"])), PROMPT)
    progress.samples[0].append(with_masks(0, [5, 9], finish="abort"), version_of)
    progress.start_anew(0, "engine_behind")
    progress.samples[0].append(with_masks(0, [4, 2, 1]), version_of)
    header, payload = progress.to_group([0], "w")
    assert read_payload(header, b"".join(payload))["sampling_mask"].tolist() == [4, 2, 1]


def test_partial_rollout_without_the_columns_of_its_task_is_not_used() -> None:
    partial_rollout = progress_of(2, 2, finish="abort").to_partial_rollout("w")
    of = task(group_size=2, columns=["sampling_mask"])
    progress = GroupProgress(lease(of, partial_rollout=partial_rollout), PROMPT)
    assert "lacks the column sampling_mask" in (progress.take_partial_rollout() or "")
    assert progress.tokens == 0


@pytest.mark.parametrize("counts", [[0, 0, 0, 2, 2], [0, 0, 0, -1, 4], [3, 0, 0, 0, 0]])
def test_partial_rollout_whose_counts_are_not_those_of_its_rows_is_not_used(counts: list[int]) -> None:
    of = task(group_size=1, columns=["sampling_mask"])
    progress = GroupProgress(lease(of), PROMPT)
    progress.samples[0].append(with_masks(0, [5, 9], [6], finish="abort"), version_of)
    partial_rollout = progress.to_partial_rollout("w")
    assert partial_rollout is not None
    # The counts are the last column.
    partial_rollout.payload = partial_rollout.payload[: -4 * len(counts)] + np.array(counts, np.int32).tobytes()
    progress = GroupProgress(lease(of, partial_rollout=partial_rollout), PROMPT)
    assert "by the counts" in (progress.take_partial_rollout() or "")


def test_nothing_generated_is_no_partial_rollout() -> None:
    assert GroupProgress(lease(), PROMPT).to_partial_rollout("w") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda group: group.header.samples.add(tokens=3, prompt_len=3, finish_reason=3), "columns take"),
        (lambda group: setattr(group, "payload", group.payload[:-1]), "payload"),
        (lambda group: setattr(group.header.samples[0].spans[0], "end", 99), "spans"),
    ],
)
def test_damaged_partial_rollout_is_not_used(change: "object", why: str) -> None:
    partial_rollout = progress_of(2, 2, finish="abort").to_partial_rollout("w")
    assert partial_rollout is not None
    change(partial_rollout)  # type: ignore[operator]
    progress = GroupProgress(lease(task(group_size=2), partial_rollout=partial_rollout), PROMPT)
    assert why in (progress.take_partial_rollout() or "")
    assert progress.tokens == 0


def test_partial_rollout_of_another_prompt_or_size_is_not_used() -> None:
    partial_rollout = progress_of(2, 2, finish="abort").to_partial_rollout("w")
    other_prompt = GroupProgress(
        lease(task(group_size=2), partial_rollout=partial_rollout), np.array([1, 2, 4], np.int32)
    )
    assert other_prompt.take_partial_rollout() == "its prompt is not the task's"
    other_size = GroupProgress(lease(task(group_size=3), partial_rollout=partial_rollout), PROMPT)
    assert "the task asks for 3" in (other_size.take_partial_rollout() or "")


def test_unfinished_or_empty_sample_makes_no_group() -> None:
    progress = progress_of(1, 1)
    progress.samples[1].finish = None
    with pytest.raises(GenerationFailed, match="sample 1 is not finished"):
        progress.to_group([0, 0], "w")
    with pytest.raises(GenerationFailed, match="sample 0 ended without a token"):
        progress_of(0).to_group([0], "w")


def test_group_that_breaks_the_contract_is_caught_before_it_is_sent() -> None:
    with pytest.raises(InvalidField, match="reward"):
        progress_of(1).to_group([float("nan")], "w")


@pytest.mark.parametrize("label", ["", "0", "default", "1", "0.3", "1.02", "1.2.3", "1.-2", "x1.2"])
def test_labels_that_no_worker_gave_are_no_versions(label: str) -> None:
    assert Version.parse(label) is None


def test_label_micro_batch_trip() -> None:
    assert Version.parse(Version(2, 17).label) == Version(2, 17)
