"""Broadcast updates: every member gets exactly what was sent, and files stand in where it cannot."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from buffer_wire.errors import InvalidField, NotReady
from tests.trainer_client.fleet import Fleet
from tests.trainer_client.publish.broadcasts import TIMEOUT_S, membership, state, sums
from trainer_client import CollectiveManifest, FilesManifest, WeightVersion
from trainer_client.publish import CollectivePublisher, FilesPublisher


def test_members_hold_what_was_sent_and_the_group_serves_the_next_version(
    fleet: Fleet, publisher: CollectivePublisher
) -> None:
    for value in (1.5, 2.5):
        manifest = publisher.offer(state(value), fleet.publication())
        assert manifest == CollectiveManifest(membership(fleet))
        for engine in fleet.engines:
            assert engine.received[-1] == sums(value)
            assert engine.loaded == WeightVersion(1, fleet.plans[-1].version.version)
    n = membership(fleet)
    assert fleet.phases() == [(phase, n, ("e0", "e1")) for _ in range(2) for phase in ("prepare", "broadcast")]
    assert [plan.established for plan in fleet.plans] == [False, False, True, True]
    assert [member.rank for member in fleet.plans[0].members] == [1, 2]
    assert (fleet.plans[0].world_size, fleet.plans[0].backend) == (3, "gloo")


def test_small_tensors_of_one_dtype_come_in_buckets(fleet: Fleet) -> None:
    def many(value: float) -> dict[str, torch.Tensor]:
        whole = torch.full((3, 5), value)
        return {
            "a": whole,
            "strided": torch.arange(8.0).view(2, 4).t(),
            "flags": torch.ones(3, dtype=torch.bool),  # Three bytes: what came behind them would begin at an odd place.
            "one": torch.tensor(value),
            "large": torch.full((200,), value),
            "b": whole,
        }

    with CollectivePublisher(timeout_s=TIMEOUT_S, bucket_bytes=100) as publisher:
        publisher.offer(many(2.0), fleet.publication())
    assert fleet.plans[-1].bucket_tensors == (2, 1, 1, 1, 1)
    wanted = {name: float(tensor.double().sum()) for name, tensor in many(2.0).items()}
    assert [engine.received[-1] for engine in fleet.engines] == [wanted] * 2


@pytest.mark.parametrize("why", ["a member of an older release", "the option"])
def test_tensors_come_one_by_one_where_buckets_are_not_to_be(fleet: Fleet, why: str) -> None:
    fleet.engines[1].takes_buckets = why == "the option"
    with CollectivePublisher(timeout_s=TIMEOUT_S, bucket_bytes=0 if why == "the option" else 100) as publisher:
        publisher.offer(state(2), fleet.publication())
    assert fleet.plans[-1].bucket_tensors == ()
    assert [engine.received[-1] for engine in fleet.engines] == [sums(2)] * 2


def test_torch_knows_nothing_of_the_group(fleet: Fleet, publisher: CollectivePublisher) -> None:
    publisher.offer(state(1), fleet.publication())
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world.pg_map == {}


def test_a_group_of_the_trainers_own_goes_on(fleet: Fleet, publisher: CollectivePublisher, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1)
    try:
        own = set(dist.distributed_c10d._world.pg_map)
        publisher.offer(state(1), fleet.publication())
        assert set(dist.distributed_c10d._world.pg_map) == own
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()
    publisher.offer(state(2), fleet.publication())
    assert [engine.received[-1] for engine in fleet.engines] == [sums(2), sums(2)]


def test_a_port_that_is_taken_is_named(fleet: Fleet) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with CollectivePublisher(timeout_s=TIMEOUT_S, port=port) as publisher, pytest.raises(OSError, match=f"{port}"):
            publisher.offer(state(1), fleet.publication())
    assert fleet.plans == []


def test_modules_and_functions_are_sources(fleet: Fleet, publisher: CollectivePublisher) -> None:
    module = torch.nn.Linear(3, 2)
    publisher.offer(module, fleet.publication())

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            yield f"p{i}", torch.full((2,), float(i))

    publisher.offer(made, fleet.publication())
    for engine in fleet.engines:
        assert engine.received[0]["weight"] == pytest.approx(float(module.weight.detach().double().sum()), abs=1e-5)
        assert engine.received[1] == {"p0": 0.0, "p1": 2.0, "p2": 4.0}


def test_without_engines_the_files_are_what_is_published(fleet: Fleet, tmp_path: Path) -> None:
    for engine in fleet.engines:
        engine.state = "quarantined"
    with CollectivePublisher(timeout_s=0.3, files=FilesPublisher(tmp_path)) as publisher:
        manifest = publisher.offer(state(4), fleet.publication())
    assert isinstance(manifest, FilesManifest)
    written = load_file(Path(manifest.base_url) / "model.safetensors")
    assert {name: float(tensor.double().sum()) for name, tensor in written.items()} == sums(4)
    assert fleet.plans == []
    with CollectivePublisher(timeout_s=0.3) as without_files, pytest.raises(NotReady) as raised:
        without_files.offer(state(4), fleet.publication())
    assert raised.value.attributes["waits_on"] == "the engines e0 (quarantined), e1 (quarantined)"


def test_files_come_at_intervals_and_when_an_engine_is_outside(fleet: Fleet, tmp_path: Path) -> None:
    files = FilesPublisher(tmp_path, keep=20)
    versions = []
    with CollectivePublisher(files=files, files_every=3, timeout_s=TIMEOUT_S) as publisher:

        def published(value: float) -> bool:
            publication = fleet.publication()
            versions.append(publication.version)
            manifest = publisher.offer(state(value), publication)
            publisher.published(manifest, committed_steps=0)
            assert isinstance(manifest, CollectiveManifest)
            return manifest.fallback is not None

        assert [published(value) for value in range(1, 6)] == [True, False, False, True, False]
        fleet.engines[1].state = "starting"
        assert [published(value) for value in (6, 7)] == [True, True]
        fleet.engines[1].state = "ready"
        assert not published(8)
        publisher.resumed(3)
        assert published(9)
        with_files = [versions[i] for i in (0, 3, 5, 6, 8)]
        assert files.versions == with_files
        assert publisher.manifest_of(with_files[1]).files
        with pytest.raises(InvalidField, match=rf"version is {versions[4]}; .*: {', '.join(map(str, with_files))}"):
            publisher.manifest_of(versions[4])


def test_tensors_of_another_device_need_another_group(
    fleet: Fleet, publisher: CollectivePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.offer(state(1), fleet.publication())
    with monkeypatch.context() as patch:
        # As after a publish from a GPU.
        patch.setattr(publisher._group, "backend", "nccl")
        publisher.offer(state(2), fleet.publication())
    assert [plan.established for plan in fleet.plans] == [False] * 4
    assert [plan.backend for plan in fleet.plans] == ["gloo"] * 4
    assert [engine.received[-1] for engine in fleet.engines] == [sums(2)] * 2


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"a": 3.0}, "source['a']"),
        ({}, "source"),
        (Path("weights"), "source"),
        (lambda: [("a", torch.ones(1)), ("a", torch.ones(1))], "source['a']"),
    ],
)
def test_what_is_no_state_dict_is_refused_before_anyone_is_asked(
    publisher: CollectivePublisher, source: object, field: str
) -> None:
    fleet = Fleet()
    with pytest.raises(InvalidField) as raised:
        publisher.offer(source, fleet.publication())  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == field
    assert fleet.plans == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("regroups", -1), ("files_every", 0), ("timeout_s", 0.0), ("backend", "mpi")],
)
def test_bad_options_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidField) as raised:
        CollectivePublisher(**{option: value})  # type: ignore[arg-type]
    assert raised.value.attributes["field"] == option


def test_a_fixed_port_is_taken_again_for_the_next_group(fleet: Fleet) -> None:
    with CollectivePublisher(timeout_s=TIMEOUT_S) as first:
        first.offer(state(1), fleet.publication())
        port = fleet.plans[-1].master_port
    with CollectivePublisher(timeout_s=TIMEOUT_S, port=port) as publisher:
        for _ in range(2):
            publisher.offer(state(2), fleet.publication())
            assert fleet.plans[-1].master_port == port
            fleet.engines[0].restart()
        lanes = [thread for thread in threading.enumerate() if thread.name.startswith("weights-r.")]
    assert lanes
    for thread in lanes:
        thread.join(10)
        assert not thread.is_alive()
