"""Pulls that commit and checkpoint: the same as by the calls of these names, made before the pull."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import redis

from buffer_wire.payloads.keys import key_prefix
from rollout_buffer.v1 import batches_pb2
from tests.service.refusals import refused
from tests.support.rpc import Rpc, RunRpc, connect, failure, failure_of
from tests.support.service import running_service
from tests.support.store_server import StoreServer, store_server

GROUPS = 2


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def rpc(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rpc]:
    with running_service(tmp_path_factory.mktemp("service"), store=store.url) as running:
        client = connect(running.address)
        yield client
        client.channel.close()


@pytest.fixture(scope="module")
def stored(store: StoreServer) -> Iterator[Any]:
    """A plain client of the store."""
    with redis.Redis(unix_socket_path=str(store.socket)) as client:
        yield client


@dataclass
class Trainer:
    """Trainer that does as another one does, by separate calls or by pulls alone."""

    run: RunRpc
    stored: Any
    at_once: bool

    def pull(self, step: int, commit: int | None, checkpoint: int | None) -> Any:
        """Pull; what the calls say, and what is left in the run and in the store."""
        said: Any
        try:
            said = self._at_once(step, commit, checkpoint) if self.at_once else self._apart(step, commit, checkpoint)
        except grpc.RpcError as error:
            refusal = failure_of(error)
            said = refusal.reason, refusal.attributes
        run = self.run.get()
        progress = run.next_step, run.committed_steps, run.checkpointed_steps
        payloads = sum(1 for _ in self.stored.scan_iter(f"{key_prefix(self.run.run_id)}*"))
        return said, progress, run.groups, payloads

    def _at_once(self, step: int, commit: int | None, checkpoint: int | None) -> Any:
        return self._said(*self.run.pull(step, commit_through_step=commit, checkpoint_through_step=checkpoint))

    def _apart(self, step: int, commit: int | None, checkpoint: int | None) -> Any:
        committed = 0 if commit is None else self.run.commit(commit).committed_steps
        checkpointed = 0 if checkpoint is None else self.run.checkpoint(checkpoint).checkpointed_steps
        info, groups = self.run.pull(step)
        info.committed_steps, info.checkpointed_steps = committed, checkpointed
        return self._said(info, groups)

    def _said(self, info: batches_pb2.BatchInfo, groups: list[batches_pb2.DeliveredGroup]) -> Any:
        info.waited_ms = 0
        return info, [group.group for group in groups]


def test_random_progress_is_that_of_separate_calls(rpc: Rpc, stored: Any) -> None:
    draw = random.Random(18)
    trainers = [
        Trainer(rpc.create(batch_groups=GROUPS, max_queued_groups=99), stored, which) for which in (False, True)
    ]
    reasons, next_step = set(), 0
    for turn in range(60):
        if draw.random() < 0.7:
            for trainer in trainers:
                trainer.run.fill(GROUPS, f"x{turn}-")
        term = 2 if draw.random() < 0.05 else 1
        step = next_step + draw.choice((-1, 0, 0, 0, 0, 1))
        commit, checkpoint = (draw.choice((None, draw.randrange(next_step + 2))) for _ in range(2))
        if draw.random() < 0.5:
            commit = checkpoint = next_step - 1
        if min(step, commit or 0, checkpoint or 0) < 0:
            continue
        for trainer in trainers:
            trainer.run.term = term
        apart, at_once = (trainer.pull(step, commit, checkpoint) for trainer in trainers)
        assert at_once == apart, (turn, step, commit, checkpoint)
        said, (next_step, *_), *_ = apart
        reasons.add(said[0] if isinstance(said[0], str) else "")
    assert reasons == {"", "batch_not_ready", "not_committed", "replay_gap", "stale_term", "step_ahead"}


def test_a_refused_commit_ends_the_call(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, max_queued_groups=3)
    run.fill(3)
    run.pull(0)
    refused(run, lambda: run.pull(1, commit_through_step=1, checkpoint_through_step=0), "step_ahead", step="1")
    refused(run, lambda: run.pull(1, checkpoint_through_step=0), "not_committed", committed_steps="0")
    refused(run, lambda: run.pull(1, commit_through_step=1 << 53), "invalid_field", field="commit_through_step")
    info, _ = run.pull(1, commit_through_step=0, checkpoint_through_step=0)
    assert (info.step, info.replayed, info.committed_steps, info.checkpointed_steps) == (1, False, 1, 1)


def test_a_pull_that_waits_in_vain_has_committed(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.fill(1)
    run.pull(0)

    def pull() -> tuple[batches_pb2.BatchInfo, object]:
        return run.pull(1, commit_through_step=0, checkpoint_through_step=0)

    assert failure(pull).reason == "batch_not_ready"
    assert (run.get().committed_steps, run.get().checkpointed_steps) == (1, 1)
    run.fill(1, "y")
    assert pull()[0].checkpointed_steps == 1
