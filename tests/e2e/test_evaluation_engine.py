"""Evaluations on a real SGLang server, while the training goes on and publishes.

Version v of the weights always emits token FIRST + v, so which weights made a token can be read off the token.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.service import running_service
from tests.support.sglang_python import sglang_python
from tests.support.tiny_model import write_constant_model
from tests.workers.process import worker_process
from trainer_client import BufferClient, ClientOptions, Group, Policy, SamplingParams, SessionOptions, Task
from trainer_client.publish import FilesPublisher

FIRST = 100
EVALUATED = [
    Task(
        group_size=2,
        sampling=SamplingParams(max_new_tokens=120, temperature=0.7),
        prompt_token_ids=[9, 8, i],
        environment="evaluated",
    )
    for i in range(8)
]


def endless() -> Iterator[Task]:
    for i in itertools.count():
        sampling = SamplingParams(max_new_tokens=60, temperature=0.7)
        yield Task(
            task_id=f"t{i:05d}",
            group_size=2,
            sampling=sampling,
            prompt_token_ids=[5, 6, 7 + i % 5],
            environment="trained",
        )


def weights(version: int) -> Callable[[Path], object]:
    return lambda directory: write_constant_model(directory, FIRST + version)


def tokens_of(group: Group) -> set[int]:
    """Every token of every response."""
    return {int(token) for sample in group.samples for token in sample.token_ids[sample.prompt_len :]}


@pytest.mark.engine
@pytest.mark.timeout(420)
def test_evaluations_are_wholly_of_their_version_while_newer_ones_are_published(tmp_path: Path) -> None:
    base = write_constant_model(tmp_path / "base", FIRST)
    engine = (
        "--launch", str(base), "--sglang-python", str(sglang_python()), "--ready-timeout-s", "180",
        "--groups-per-engine", "4", "--lease-wait-s", "2",
    )  # fmt: skip
    policy = Policy(batch_groups=4, max_queued_groups=8, overflow_action="block", max_staleness=8)
    options = SessionOptions(pull_timeout_s=200)
    with (
        running_service(tmp_path / "service") as service,
        BufferClient(service.address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(tmp_path / "published", serve="http") as publisher,
    ):
        with (
            worker_process(service.address, "r", tmp_path, *engine) as worker,
            client.session("r", policy=policy, tasks=endless(), publisher=publisher, options=options) as session,
        ):
            for batch in itertools.islice(session, 2):
                session.publish(weights(batch.step + 1), wait_for=1, timeout_s=60)
            for _ in range(3):
                # A slow engine may skip a version, and its evaluation would wait for another worker.
                session.wait_for_engines(1, timeout_s=60)
                version = session.version
                evaluation = session.evaluate(EVALUATED)
                session.publish(weights(version + 1))
                groups = list(evaluation.groups(120))
                assert len(groups) == len(EVALUATED)
                assert set.union(*map(tokens_of, groups)) == {FIRST + version}
                for batch in itertools.islice(session, 2):
                    assert {group.environment for group in batch.groups} == {"trained"}
            session.wait_for_engines(1, timeout_s=60)
            # Of a version that this engine has left behind: for the other worker, below.
            older = session.evaluate(EVALUATED, version=session.version - 1, eval_id="older")
            assert older.version.version == session.version - 1
            assert worker.stop() == 0
        ledger = client.ledger("r")
        assert ledger.balanced
        assert set(ledger.environments) == {"trained"}
        with worker_process(service.address, "r", tmp_path / "other", *engine, "--evaluations", "only"):
            found = list(client.evaluation("r", "older").groups(200))
        assert len(found) == len(EVALUATED)
        assert set.union(*map(tokens_of, found)) == {FIRST + older.version.version}
        assert [state.done for state in client.evaluations("r")] == [True] * 4
