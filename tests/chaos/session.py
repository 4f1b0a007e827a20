"""A trainer of a bout's second run: a session of the client, whose groups the product's own workers generate.

python -m tests.chaos.session FOLDER NAME LIFE: it goes on from its last checkpoint. What it trains on, and what its
evaluations gave, it writes to a journal, a line of JSON each. For simulated engines the model is as many bytes as its
version says. For real ones it always emits the version's own token.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer_wire.errors import EvaluationNotReady, UnknownRun
from buffer_wire.status import ServiceUnreachable
from tests.chaos.client import BOUT, ENOUGH, Place
from tests.engine_matrix.truth import FIRST, VERSIONS, write_version
from tests.faults.kinds_of_work import digest
from trainer_client import (
    Batch,
    BufferClient,
    ClientOptions,
    Evaluation,
    Group,
    Policy,
    Sample,
    SamplingParams,
    SessionOptions,
    Task,
    TrainerSession,
)
from trainer_client.publish import FilesPublisher

JOURNAL = "session.journal"
BATCH_GROUPS, MAX_STALENESS = 4, 4
MAX_USES, REUSE_MAX_STALENESS = 2, 8
TASKS = 20_000
CHECKPOINT_EVERY, EVALUATE_EVERY = 5, 10
EVALUATED = 3
"""Tasks of one evaluation."""
EVALUATION_S = 15.0
"""Longest wait for one: who has its weights may be gone, and then it is left."""
WORD = b"weights "


def second_run(run_id: str) -> str:
    """Name of a bout's second run."""
    return f"{run_id}-session"


def _policy(replicated: Mapping[str, Any], *, reuses: bool) -> Policy:
    reuse: dict[str, Any] = {"max_uses": MAX_USES, "reuse_share_milli": 250, "reuse_max_staleness": REUSE_MAX_STALENESS}
    return Policy(
        batch_groups=BATCH_GROUPS,
        max_queued_groups=3 * BATCH_GROUPS,
        overflow_action="block",
        max_staleness=MAX_STALENESS,
        stale_action="recycle",
        lease_ttl_ms=3_000,
        retry_backoff_ms=20,
        max_attempts=1_000,
        record_groups=True,
        **(reuse if reuses else {}),
        **replicated,
    )


def _tasks(prefix: str, count: int) -> list[Task]:
    sampling = SamplingParams(max_new_tokens=32)
    return [
        Task(task_id=f"{prefix}{i:05d}", group_size=2, sampling=sampling, prompt_token_ids=[1 + i % 7, 2])
        for i in range(count)
    ]


def _versions(group: Group) -> tuple[int, int]:
    """Oldest and newest version of its tokens."""
    found = [span.version.version for sample in group.samples for span in sample.spans]
    return min(found), max(found)


def _facts(batch: Batch, *, real: bool) -> dict[str, Any]:
    info = batch.info
    return {
        "step": info.step,
        "train_version": info.train_version,
        "groups": {
            f"{group.task_id}/{group.incarnation}": [digest(group), group.prior_uses, *_versions(group)]
            for group in batch.groups
        },
        "mislabelled": sum(_mislabelled(it) for group in batch.groups for it in group.samples) if real else 0,
    }


def _mislabelled(sample: Sample) -> int:
    """Number of tokens that older weights made than their span says; newer ones may have when an engine is killed.

    0 for a sample that a trainer's resume goes through: what is newer is no matter of numbers there.
    """
    if len({span.version.term for span in sample.spans}) > 1:
        return 0
    return sum(
        0 < (span.version.version - (int(token) - FIRST)) % VERSIONS <= VERSIONS // 2
        for span in sample.spans
        for token in sample.token_ids[span.start : span.end]
    )


class Journal:
    """Lines that are in the file before the service is told of what they say."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, kind: str) -> list[Any]:
        """Values of a kind so far."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [
            value for line in lines if line.endswith("}") for name, value in json.loads(line).items() if name == kind
        ]

    def write(self, **line: object) -> None:
        """Append a line."""
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


def _evaluate(session: TrainerSession, journal: Journal) -> None:
    """Read and delete the evaluations that there are, then submit one of the published version."""
    for state in session.client.evaluations(session.run_id):
        with session.client.evaluation(session.run_id, state.eval_id) as evaluation:
            try:
                read = [_results(evaluation) for _ in range(2)]
            except (EvaluationNotReady, ServiceUnreachable) as error:
                journal.write(evaluation_left=str(error))
                continue
            facts = {"id": state.eval_id, "version": evaluation.version.version, "tasks": EVALUATED}
            journal.write(evaluated={**facts, "read": read, "failures": len(evaluation.state().failures)})
    name = f"e{session.term}-{session.version}"
    session.evaluate(_tasks(name, EVALUATED), eval_id=name)


def _results(evaluation: Evaluation) -> dict[str, Any]:
    found = evaluation.groups(EVALUATION_S)
    return {f"{group.task_id}#{at}": [digest(group), *_versions(group)] for at, group in enumerate(found)}


def _save(folder: Path, version: int, *, real: bool) -> None:
    if real:
        write_version(folder, version, 0)
    else:
        (folder / "model.safetensors").write_bytes(WORD * version)


def _exists(client: BufferClient, run_id: str) -> bool:
    try:
        client.run(run_id)
    except UnknownRun:
        return False
    return True


def train(place: Place) -> None:
    """Train until the bout is to end."""
    journal = Journal(place.folder / JOURNAL)
    told = json.loads((place.folder / BOUT).read_text())
    real, upgraded = told["real"], told["upgraded"]
    hosts = told["hosts"]
    turned = hosts[place.life % len(hosts) :] + hosts[: place.life % len(hosts)]
    with (
        BufferClient("ipv4:" + ",".join(turned), ClientOptions(timeout_s=90, attempt_timeout_s=5)) as client,
        FilesPublisher(place.folder / "published") as publisher,
        client.session(
            second_run(place.run_id),
            # The nemesis changes that of a run that there is.
            policy=None
            if _exists(client, second_run(place.run_id))
            else _policy(told["replicated"], reuses=not upgraded),
            tasks=_tasks("t", TASKS),
            publisher=publisher,
            next_step=max(journal.of("checkpoint"), default=None),
            options=SessionOptions(pull_timeout_s=90, max_pending_tasks=24, chunk_tasks=8),
        ) as session,
    ):
        for batch in session:
            journal.write(trained=_facts(batch, real=real))
            version = session.version + 1
            session.publish(lambda folder, version=version: _save(folder, version, real=real))  # type: ignore[misc]
            if session.next_step % CHECKPOINT_EVERY == 0:
                journal.write(checkpoint=session.next_step)
                session.checkpoint()
            # The last release knows no evaluations.
            if session.next_step % EVALUATE_EVERY == 0 and not upgraded:
                _evaluate(session, journal)
            if place.has(ENOUGH):
                state = session.state()
                groups = state.ledger.groups
                journal.write(
                    end={
                        "balanced": state.ledger.balanced,
                        "committed_steps": state.committed_steps,
                        "trained": groups.trained.groups,
                        "lost": groups.lost.groups,
                        "failed": state.ledger.tasks.failed,
                    }
                )
                # Its tasks are not used up: it does not wait for them.
                sys.stdout.flush()
                os._exit(0)


if __name__ == "__main__":
    train(Place(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
