"""Four FSDP ranks train from a real service; one is killed in the middle, and all go on from the checkpoint.

One run for all tests: steps 0 to 5 with a checkpoint after step 2, rank 2 killed while the weights of step 5 are
gathered; then all ranks again, from step 3 to 7.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from examples.fsdp.__main__ import LENGTHS, RUN_ID
from examples.fsdp.records import StepRecord, read
from examples.fsdp.tasks import VOCAB_SIZE
from examples.fsdp.trainer import BATCH_GROUPS
from tests.support.service import running_service
from tests.workers.process import worker_process
from trainer_client import BufferClient, RunState

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

RANKS = 4
DYING_RANK, DYING_STEP = 2, 5
CHECKPOINT_EVERY, RESUMED_AT, STEPS = 3, 3, 8
GROUP_TIMEOUT_S = 200.0
START_AND_TRAIN_S = 300.0
DEADLINE_S = 60.0
"""Time for the others to end; far less than the group's own timeout, for a lost connection is noticed at once."""
MOST_IMBALANCE = 0.10
_ROOT = Path(__file__).parents[2]

ByStep = dict[int, list[StepRecord]]
"""The ranks' records of each step, in the order of the ranks."""


@dataclass(frozen=True, slots=True)
class Story:
    """Story of a run."""

    first: ByStep
    second: ByStep
    statuses: list[int]
    """Statuses of the ranks that were not killed, in the first run."""
    said: list[str]
    """Output of them."""
    ended_after_s: float
    """Time from the death of the one to the end of the last."""
    weights_first: dict[int, str]
    """Digest of the published weights, by version."""
    weights_second: dict[int, str]
    run: RunState


def _start(out: Path, address: str, meeting: str, rank: int, *, dies: bool) -> "subprocess.Popen[bytes]":
    program = ["tests.fsdp.dying_rank", str(DYING_STEP)] if dies else ["examples.fsdp.trainer"]
    command = [
        sys.executable, "-m", *program, "--address", address, "--out", str(out), "--steps", str(STEPS),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--keep-versions", str(STEPS), "--timeout-s", str(GROUP_TIMEOUT_S),
        "--rendezvous", str(out / meeting),
    ]  # fmt: skip
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    with (out / f"rank{rank}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=_ROOT)


def _records(out: Path) -> ByStep:
    """Return what the ranks wrote; moved away, so that the next run writes anew."""
    by_rank = []
    for rank in range(RANKS):
        path = out / f"rank{rank}.jsonl"
        by_rank.append({record.step: record for record in read(path)})
        path.unlink()
    assert all(records.keys() == by_rank[0].keys() for records in by_rank)
    return {step: [records[step] for records in by_rank] for step in by_rank[0]}


def _weights(out: Path) -> dict[int, str]:
    """Digests by version, of the newest term that published any."""
    found: dict[int, dict[int, str]] = {}
    for path in (out / "weights").glob("v*-e*-*.json"):
        version, term, digest = path.stem.split("-")
        found.setdefault(int(term[1:]), {})[int(version[1:])] = digest
    return found[max(found)]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("fsdp")
    out = folder / "out"
    out.mkdir()
    engine = (
        "--simulate", "--vocab-size", str(VOCAB_SIZE), "--slots", "256", "--tokens-per-s", "1000",
        *LENGTHS, "--groups-per-engine", "48",
    )  # fmt: skip
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with (
            running_service(folder / "service") as service,
            worker_process(service.address, RUN_ID, folder / "worker", *engine),
            BufferClient(service.address) as client,
        ):
            ranks = [_start(out, service.address, "first", rank, dies=rank == DYING_RANK) for rank in range(RANKS)]
            status = ranks[DYING_RANK].wait(START_AND_TRAIN_S)
            assert status == -signal.SIGKILL, (out / f"rank{DYING_RANK}.log").read_text()
            died = time.monotonic()
            others = [rank for rank in range(RANKS) if rank != DYING_RANK]
            statuses = [ranks[rank].wait(DEADLINE_S) for rank in others]
            ended_after_s = time.monotonic() - died
            said = [(out / f"rank{rank}.log").read_text() for rank in others]
            first, weights_first = _records(out), _weights(out)

            ranks = [_start(out, service.address, "second", rank, dies=False) for rank in range(RANKS)]
            for rank, process in enumerate(ranks):
                assert process.wait(START_AND_TRAIN_S) == 0, (out / f"rank{rank}.log").read_text()
            yield Story(
                first=first,
                second=_records(out),
                statuses=statuses,
                said=said,
                ended_after_s=ended_after_s,
                weights_first=weights_first,
                weights_second=_weights(out),
                run=client.run(RUN_ID),
            )
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_every_step_is_one_batch_over_all_ranks(story: Story) -> None:
    for steps in (story.first, story.second):
        seen: set[int] = set()
        for records in steps.values():
            groups = [sequence for record in records for sequence in record.groups]
            assert len(set(groups)) == len(groups) == BATCH_GROUPS
            assert {record.total_groups for record in records} == {BATCH_GROUPS}
            assert {record.total_tokens for record in records} == {sum(record.tokens for record in records)}
            assert {record.loss for record in records} == {records[0].loss}
            assert not seen.intersection(groups)
            seen.update(groups)


def test_the_ranks_shards_are_balanced_in_tokens(story: Story) -> None:
    steps = {**story.first, **story.second}
    imbalances = []
    for records in steps.values():
        tokens = [record.tokens for record in records]
        imbalances.append(max(tokens) * RANKS / sum(tokens) - 1)
    print(
        f"\nfullest rank above the mean: {max(imbalances):.2%} at most over {len(steps)} steps of {BATCH_GROUPS} groups"
    )
    assert max(imbalances) <= MOST_IMBALANCE


def test_the_others_end_when_a_rank_is_killed_and_say_why(story: Story) -> None:
    assert story.statuses == [1, 1, 1]
    assert story.ended_after_s < DEADLINE_S
    for said in story.said:
        assert "the process group failed on rank" in said
        assert "they go on from the last checkpoint" in said


def test_after_the_restart_every_rank_gets_its_batches_again_byte_for_byte(story: Story) -> None:
    assert sorted(story.first) == list(range(DYING_STEP + 1))
    assert sorted(story.second) == list(range(RESUMED_AT, STEPS))
    replayed = range(RESUMED_AT, DYING_STEP + 1)
    for step in replayed:
        before, after = story.first[step], story.second[step]
        assert [record.groups for record in before] == [record.groups for record in after]
        assert [record.sha256 for record in before] == [record.sha256 for record in after]


def test_the_weights_go_on_exactly(story: Story) -> None:
    for step in range(RESUMED_AT, DYING_STEP + 1):
        # Losses and norms hold every bit, and the weights behind them.
        assert story.first[step] == story.second[step]
    # Version s + 1 is trained on step s. The one that was under way at the death was never published.
    assert sorted(story.weights_first) == list(range(1, DYING_STEP + 1))
    assert sorted(story.weights_second) == list(range(RESUMED_AT + 1, STEPS + 1))
    for version in range(RESUMED_AT + 1, DYING_STEP + 1):
        assert story.weights_first[version] == story.weights_second[version]


def test_nothing_is_lost_or_counted_twice(story: Story) -> None:
    assert story.run.committed_steps == STEPS
    assert story.run.ledger.balanced
