"""Broadcast updates that fail: whoever fails is left out within the deadlines, and asked again."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from buffer_wire.errors import CollectiveFailed, InvalidField
from tests.trainer_client.fleet import Fleet, FleetEngine
from tests.trainer_client.publish.broadcasts import SLACK_S, TIMEOUT_S, membership, state, sums
from trainer_client import CollectiveManifest, Waiting
from trainer_client.publish import CollectivePublisher
from trainer_client.publish.collective import update


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


def test_an_interrupt_ends_the_wait_and_abandons_the_plan(fleet: Fleet, publisher: CollectivePublisher) -> None:
    fleet.engines[0].mute = True

    def stop(waiting: Waiting) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publisher.offer(state(1), fleet.publication(on_wait=stop))
    assert [seen[0] for seen in fleet.phases()] == ["prepare", "abandoned"]
