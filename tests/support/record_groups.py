"""Makes tests/support/data/recorded_groups.bin.gz: a real service, worker and SGLang server on the CPU.

First the tasks of version 0 are generated, while nothing else is published. Then the spanning ones, while one version
after another is published until all are done.
"""

import itertools
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tests.support.recorded_groups import (
    GROUPS,
    RECORDING,
    SPANNING_GROUPS,
    recorded_tasks,
    spanning_tasks,
    write_recorded_model,
    write_recording,
)
from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.workers.process import worker_process
from trainer_client import BufferClient, Policy, SessionOptions, Submission, Task
from trainer_client.batch import Group
from trainer_client.publish import FilesPublisher
from trainer_client.session.session import TrainerSession

RUN_ID = "recording"
TIMEOUT_S = 600.0
LAST_VERSION = 200


def record() -> None:
    """Record, and say what is in the file."""
    with tempfile.TemporaryDirectory(prefix="recording-") as name:
        folder = Path(name)
        base = write_recorded_model(folder / "model")
        engine = (
            "--launch", str(base), "--sglang-python", str(sglang_python()), "--engine-flag=--dtype",
            "--engine-flag=float32", "--ready-timeout-s", "500", "--groups-per-engine", "16", "--pause-mode", "retract",
            # The last one counts.
            "--reward", "examples.plain.reward:even_share",
        )  # fmt: skip
        policy = Policy(batch_groups=64, max_queued_groups=128, overflow_action="block", lease_ttl_ms=600_000)
        options = SessionOptions(pull_timeout_s=TIMEOUT_S)
        with (
            running_service(folder / "service") as service,
            BufferClient(service.address) as client,
            FilesPublisher(folder / "published", serve="http") as publisher,
            worker_process(service.address, RUN_ID, folder, *engine),
            client.session(RUN_ID, policy=policy, publisher=publisher, options=options) as session,
        ):
            _submit(session, list(recorded_tasks()), cursor=0)
            groups = _in_order(next(session).groups)
            spanning = _in_order(_while_publishing(session))
    write_recording(iter(groups + spanning))
    spread = sum(group.head_version < group.tail_version for group in spanning)
    print(
        f"{RECORDING}: {RECORDING.stat().st_size:,} bytes, {len(groups)} groups of version 0, "
        f"{len(spanning)} of newer versions, {spread} of them over several"
    )


def _while_publishing(session: TrainerSession) -> list[Group]:
    _submit(session, list(spanning_tasks()), cursor=GROUPS)
    deadline = time.monotonic() + TIMEOUT_S
    for version in itertools.count(1):
        assert version <= LAST_VERSION, "the engine generates nothing while versions are published"
        assert time.monotonic() < deadline, "the spanning groups are not generated in time"
        session.publish(partial(write_recorded_model, version=version), wait_for=1)
        if session.state().ledger.groups.queued.groups == SPANNING_GROUPS:
            break
    session.batch_groups = SPANNING_GROUPS
    return list(next(session).groups)


def _submit(session: TrainerSession, tasks: list[Task], *, cursor: int) -> None:
    submission = Submission(term=session.term, expected_cursor=cursor, cursor=cursor + len(tasks), tasks=tasks)
    session.client.submit_tasks(RUN_ID, submission)


def _in_order(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.task_id)
