"""Stages against a real service: columns and rewards that others add reach the trainer."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import batches_pb2
from tests.support.push import Pusher, arrays_for
from tests.support.service import ServiceProcess
from trainer_client import BufferClient, ClientOptions, Policy
from trainer_client.batch import Group
from trainer_client.client.pulling import PullSpec
from trainer_client.collate import collate
from trainer_client.stages import Added, Stage

OPTIONS = ClientOptions(timeout_s=30)


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[BufferClient]:
    with BufferClient(service.address, OPTIONS) as made:
        yield made


def serve(service: ServiceProcess, run_id: str, name: str, make: Callable[[Group], object], most: int) -> int:
    with Stage(service.address, run_id, name, options=OPTIONS) as stage:
        return stage.serve(make, most=most)  # type: ignore[arg-type]


def ranks_of(group: Group) -> dict[str, list[np.ndarray]]:
    return {"ranks": [np.arange(sample.tokens, dtype=np.float32) for sample in group.samples]}


def test_what_stages_add_comes_with_the_batch(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=2, max_queued_groups=4, stages=["rewards", "reference", "values"]))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(*(arrays_for(f"t{i}", group_size=2) for i in range(2)))
    assert serve(service, run_id, "rewards", lambda group: Added(rewards=[0.25, 0.75], version=3), 2) == 2
    assert serve(service, run_id, "reference", ranks_of, 2) == 2

    def values(group: Group) -> Added:
        ranks = [sample.extras["ranks"] for sample in group.samples]
        best = list(np.array([[1], [2]], np.float32))
        return Added(tokens={"values": [2 * each for each in ranks]}, samples={"best": best})

    assert serve(service, run_id, "values", values, 2) == 2
    batch = client.pull(run_id, term=1, step=0, timeout_s=10)
    for group in batch.groups:
        np.testing.assert_array_equal(group.rewards, np.array([0.25, 0.75], np.float32))
        assert [(one.stage, one.version) for one in group.stages] == [("rewards", 3), ("reference", 0), ("values", 0)]
        for sample in group.samples:
            np.testing.assert_array_equal(sample.extras["values"], 2 * np.arange(sample.tokens))
    tensors = collate(batch, extras="all")
    assert set(tensors.extras) == {"ranks", "values", "best"}
    assert client.ledger(run_id).balanced
    assert [(one.name, one.waiting, one.leased, one.added) for one in client.run(run_id).stages] == [
        (name, 0, 0, 2) for name in ("rewards", "reference", "values")
    ]


def test_a_trainer_that_knows_no_stages_is_refused_by_name_and_the_batch_is_anothers(
    service: ServiceProcess, client: BufferClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_run(run_id, Policy(batch_groups=1, stages=["reference"]))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(arrays_for("a"))
    assert serve(service, run_id, "reference", ranks_of, 1) == 1
    to_wire = PullSpec.to_wire

    def as_of_the_first_release(spec: PullSpec, *args: Any, **kwargs: Any) -> batches_pb2.PullBatchRequest:
        request = to_wire(spec, *args, **kwargs)
        request.ClearField("reads_stages")
        return request

    with monkeypatch.context() as older:
        older.setattr(PullSpec, "to_wire", as_of_the_first_release)
        with pytest.raises(InvalidField, match="stage reference has added columns to group a/0") as refused:
            client.pull(run_id, term=1, step=0, timeout_s=10)
    assert refused.value.attributes["field"] == "reads_stages"
    (group,) = client.pull(run_id, term=1, step=0, timeout_s=10).groups
    assert [one.stage for one in group.stages] == ["reference"]


def test_large_groups_and_large_columns_go_in_parts(service: ServiceProcess, client: BufferClient, run_id: str) -> None:
    client.create_run(run_id, Policy(batch_groups=1, stages=["wide"]))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(arrays_for("large", response_len=600_000))

    def wide(group: Group) -> dict[str, list[np.ndarray]]:
        return {"wide": [np.full((sample.tokens, 4), 7, np.float32) for sample in group.samples]}

    assert serve(service, run_id, "wide", wide, 1) == 1
    (group,) = client.pull(run_id, term=1, step=0, timeout_s=30).groups
    assert all((sample.extras["wide"] == 7).all() and len(sample.extras["wide"]) > 600_000 for sample in group.samples)


def test_a_function_that_raises_gives_its_groups_back(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, Policy(batch_groups=1, max_queued_groups=4, stages=["reference"], max_attempts=2))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(arrays_for("a"), arrays_for("b"))

    def broken(group: Group) -> object:
        raise ZeroDivisionError(group.task_id)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            serve(service, run_id, "reference", broken, 2)
    (stage,) = client.run(run_id).stages
    assert (stage.waiting, stage.leased, stage.failed) == (1, 0, 2)
    assert client.ledger(run_id).groups.discarded.groups == 1
    with pytest.raises(InvalidField, match="reference"):
        serve(service, run_id, "misspelt", ranks_of, 1)


def test_a_worker_that_is_interrupted_gives_its_groups_back_as_no_failure(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    client.create_run(run_id, Policy(batch_groups=1, max_queued_groups=4, stages=["reference"], max_attempts=1))
    with Pusher(service.address, run_id) as pusher:
        pusher.push(arrays_for("a"), arrays_for("b"))

    def interrupted(group: Group) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(service, run_id, "reference", interrupted, 2)
    (stage,) = client.run(run_id).stages
    assert (stage.waiting, stage.leased, stage.failed) == (2, 0, 0)
