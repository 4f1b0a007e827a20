"""Broadcast updates: every member gets exactly what was sent, and whoever fails is left out within the deadlines."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from buffer_wire.errors import CollectiveFailed, InvalidField, NotReady
from tests.trainer_client.fleet import Fleet, FleetEngine, fleet_of
from trainer_client import CollectiveManifest, FilesManifest, Waiting, WeightVersion
from trainer_client.publish import CollectivePublisher, FilesPublisher
from trainer_client.publish.collective import update

TIMEOUT_S = 3.0
SLACK_S = 2.0


def state(value: float) -> dict[str, torch.Tensor]:
    big = torch.full((300, 700), value, dtype=torch.bfloat16)
    return {"big": big, "strided": torch.full((8, 4), value).t(), "one": torch.tensor(value)}


def sums(value: float) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in state(value).items()}


@pytest.fixture(scope="module")
def started() -> Iterator[Fleet]:
    with fleet_of("e0", "e1") as fleet:
        yield fleet


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """Two engines that live; whatever befell them in an earlier test is undone."""
    for engine in started.engines:
        engine.settle()
        if engine.engine.process.poll() is not None:
            engine.restart()
        engine.mute, engine.state, engine.on_phase = False, "ready", lambda _: None
        engine.received.clear()
        engine.reported_at = time.monotonic()
    return Fleet(*started.engines)


@pytest.fixture
def publisher() -> Iterator[CollectivePublisher]:
    with CollectivePublisher(timeout_s=TIMEOUT_S, slack_s=SLACK_S) as made:
        yield made


def membership(fleet: Fleet) -> int:
    return fleet.plans[-1].membership


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


def test_an_engine_that_refuses_is_left_out_by_name_and_asked_again(
    fleet: Fleet, publisher: CollectivePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(phase: str) -> None:
        raise RuntimeError("no such backend")

    e0, e1 = fleet.engines
    e1.on_phase = refuse
    began = time.monotonic()
    publisher.offer(state(1), fleet.publication())
    assert time.monotonic() - began < TIMEOUT_S
    n = membership(fleet)
    assert [seen[:2] for seen in fleet.phases()] == [
        ("prepare", n - 1), ("abandoned", n - 1), ("prepare", n), ("broadcast", n),
    ]  # fmt: skip
    assert fleet.phases()[-1][2] == ("e0",)
    assert "e1: cannot join: no such backend" in caplog.text
    assert (e0.received, e1.received) == ([sums(1)], [])
    e1.on_phase = lambda _: None
    publisher.offer(state(2), fleet.publication())
    assert [engine.received[-1] for engine in fleet.engines] == [sums(2), sums(2)]


def test_an_engine_whose_worker_is_gone_costs_one_deadline_and_no_other_engine(
    fleet: Fleet, publisher: CollectivePublisher
) -> None:
    waits: list[Waiting] = []
    fleet.engines[0].mute = True
    began = time.monotonic()
    publisher.offer(state(1), fleet.publication(on_wait=waits.append))
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S + 3
    # e1 waited for e0 in the group all the time, and is not to blame.
    assert [phase[2] for phase in fleet.phases()][-2:] == [("e1",), ("e1",)]
    assert fleet.engines[1].received == [sums(1)]
    assert any(waiting.on == "the engines e0, e1" for waiting in waits)
    # As long as nothing is heard of it, it is not waited for again.
    began = time.monotonic()
    publisher.offer(state(2), fleet.publication())
    assert time.monotonic() - began < TIMEOUT_S
    fleet.engines[0].mute, fleet.engines[0].reported_at = False, time.monotonic()
    publisher.offer(state(3), fleet.publication())
    assert [engine.received[-1] for engine in fleet.engines] == [sums(3), sums(3)]


def kill_at(phase: str, engine: FleetEngine, how: signal.Signals) -> None:
    def strike(seen: str) -> None:
        if seen == phase:
            os.kill(engine.engine.process.pid, how)
            if how == signal.SIGKILL:
                engine.engine.process.wait()

    engine.on_phase = strike


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["prepare", "broadcast"])
def test_an_engine_that_is_killed_is_left_out_and_rejoins_when_it_is_back(
    fleet: Fleet, publisher: CollectivePublisher, phase: str
) -> None:
    publisher.offer(state(1), fleet.publication())
    e0, e1 = fleet.engines
    kill_at(phase, e0, signal.SIGKILL)
    began = time.monotonic()
    publisher.offer(state(2), fleet.publication())
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert fleet.phases()[-1] == ("broadcast", membership(fleet), ("e1",))
    assert e1.received[-1] == sums(2)
    e0.on_phase = lambda _: None
    e0.restart()
    publisher.offer(state(3), fleet.publication())
    assert fleet.phases()[-1] == ("broadcast", membership(fleet), ("e0", "e1"))
    assert [engine.received[-1] for engine in fleet.engines] == [sums(3), sums(3)]


@pytest.mark.faults
def test_an_engine_that_dies_with_its_worker_while_it_should_receive_is_found_by_its_silence(
    fleet: Fleet, publisher: CollectivePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "REACTION_S", 2.0)
    publisher.offer(state(1), fleet.publication())
    e0, e1 = fleet.engines

    def vanish(phase: str) -> None:
        if phase == "broadcast":
            e0.mute = True
            e0.engine.close()
            raise RuntimeError

    e0.on_phase = vanish
    began = time.monotonic()
    publisher.offer(state(2), fleet.publication())
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S + 2 * 2.0
    assert fleet.phases()[-1] == ("broadcast", membership(fleet), ("e1",))
    assert e1.received[-1] == sums(2)


@pytest.mark.faults
def test_an_engine_that_stands_still_ends_at_the_deadline(
    fleet: Fleet, publisher: CollectivePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "REACTION_S", 2.0)
    publisher.offer(state(1), fleet.publication())
    e0, e1 = fleet.engines
    kill_at("broadcast", e0, signal.SIGSTOP)
    try:
        began = time.monotonic()
        # Too much for the buffers in between: the sending itself stands still.
        large = {"large": torch.ones(8 << 20)}
        publisher.offer(large, fleet.publication())
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S + 2 * 2.0 + 5
        assert fleet.phases()[-1] == ("broadcast", membership(fleet), ("e1",))
        assert e1.received[-1] == {"large": 8 << 20}
    finally:
        e0.engine.process.kill()
        e0.engine.process.wait()


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


def test_engines_that_all_left_their_group_are_asked_again_in_a_new_one(
    fleet: Fleet, publisher: CollectivePublisher
) -> None:
    publisher.offer(state(1), fleet.publication())
    first = membership(fleet)

    def refuse(phase: str) -> None:
        if fleet.plans[-1].established:
            raise RuntimeError("not in the group any more")

    for engine in fleet.engines:
        engine.on_phase = refuse
    assert publisher.offer(state(2), fleet.publication()) == CollectiveManifest(membership(fleet))
    assert membership(fleet) > first
    assert [engine.received[-1] for engine in fleet.engines] == [sums(2)] * 2


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


def test_when_all_engines_fail_the_error_names_them_all(fleet: Fleet) -> None:
    def refuse(phase: str) -> None:
        raise RuntimeError("out of memory")

    for engine in fleet.engines:
        engine.on_phase = refuse
    with CollectivePublisher(timeout_s=TIMEOUT_S) as publisher, pytest.raises(CollectiveFailed) as raised:
        publisher.offer(state(1), fleet.publication())
    assert set(raised.value.attributes["engines"].split(",")) == {"e0", "e1"}
    assert "out of memory" in str(raised.value)
    # Nobody was asked twice: they were asked in a new group.
    assert [phase for phase, *_ in fleet.phases()] == ["prepare", "abandoned"]


def test_a_source_that_fails_or_changes_its_mind_frees_the_engines(
    fleet: Fleet, publisher: CollectivePublisher
) -> None:
    calls = iter(range(100))

    def fickle() -> Iterator[tuple[str, torch.Tensor]]:
        width = 4 if next(calls) < 1 else 5
        yield "a", torch.ones(3)
        yield "b", torch.ones(width)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)
        if next(calls) >= 10:
            raise OSError("the gathering failed")
        yield "b", torch.ones(4)

    with pytest.raises(InvalidField, match=r"source\['b'\] is .*shape=\(5,\)"):
        publisher.offer(fickle, fleet.publication())
    assert fleet.phases()[-1][0] == "abandoned"
    assert [engine.received for engine in fleet.engines] == [[], []]
    for _ in range(8 - next(calls)):
        next(calls)
    with pytest.raises(OSError, match="the gathering failed"):
        publisher.offer(failing, fleet.publication())
    publisher.offer(state(2), fleet.publication())
    assert [engine.received for engine in fleet.engines] == [[sums(2)], [sums(2)]]


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


def test_an_interrupt_ends_the_wait_and_abandons_the_plan(fleet: Fleet, publisher: CollectivePublisher) -> None:
    fleet.engines[0].mute = True

    def stop(waiting: Waiting) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publisher.offer(state(1), fleet.publication(on_wait=stop))
    assert [seen[0] for seen in fleet.phases()] == ["prepare", "abandoned"]


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
