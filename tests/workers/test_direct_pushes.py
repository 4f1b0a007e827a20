"""Groups whose payloads a worker writes to a real store, for a fake of the service that looks for them there."""

import logging
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from buffer_wire.errors import InvalidField, PermissionDenied, RolloutBufferError, Unauthenticated
from rollout_buffer.v1 import groups_pb2
from tests.support.payload_store import PayloadStore, payload_store
from tests.workers.building import eventually
from tests.workers.fake_service import FakeService
from tests.workers.pushing import pushing

LARGE = 10_000
"""Tokens of a group of 90 KB, which goes directly."""


@pytest.fixture(scope="module")
def store() -> Iterator[PayloadStore]:
    with payload_store() as running:
        yield running


@pytest.fixture
async def storing(store: PayloadStore) -> AsyncIterator[FakeService]:
    """The fake of a service that gives access to the store."""
    service = FakeService(payloads=store)
    await service.start()
    yield service
    await service.stop()
    store.let_in("w")


def nonces(fake: FakeService) -> list[bytes]:
    return [group.stored.nonce for group in fake.stored]


async def test_large_groups_lie_in_the_store_and_small_ones_are_relayed(storing: FakeService) -> None:
    async with pushing(storing, directly=True) as p:
        header, payload = p.group("large", LARGE)
        assert (await p.pusher.push(header, payload)).outcome == "queued"
        assert await p.push_all("small") == ["queued"]
    assert [(group.header.task_id, group.payload) for group in storing.stored] == [("large", b"")]
    assert storing.results()["large"] == groups_pb2.Group(header=header, payload=payload)
    assert p.counters.pushed_bytes["direct"] > 90_000
    assert 0 < p.counters.pushed_bytes["relayed"] < 1_000
    assert storing.troubles == [""]


async def test_groups_that_are_written_together_are_pushed_together(storing: FakeService) -> None:
    async with pushing(storing, directly=True, bundle_bytes=100_000) as p:
        assert set(await p.push_all(*(f"t{i}" for i in range(6)), tokens=LARGE)) == {"queued"}
    assert storing.bundles == [4, 2]


async def test_a_small_group_does_not_wait_for_a_write_that_hangs(storing: FakeService, store: PayloadStore) -> None:
    assert store.process is not None
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["queued"]
        store.process.send_signal(signal.SIGSTOP)
        large = p.push("t2", LARGE)
        try:
            assert await p.push_all("small") == ["queued"]
            assert not large.done()
        finally:
            store.process.send_signal(signal.SIGCONT)
        assert (await large).outcome == "queued"
    assert [group.header.task_id for group in storing.stored] == ["t1", "t2"]


async def test_nor_does_one_behind_a_written_group(storing: FakeService, store: PayloadStore) -> None:
    assert store.process is not None
    storing.outcomes.extend([groups_pb2.PUSH_OUTCOME_REJECTED_FULL] * 2)
    async with pushing(storing, directly=True) as p:
        written = p.push("t1", LARGE)
        await eventually(lambda: p.counters.pushed["rejected_full"] == 1)
        store.process.send_signal(signal.SIGSTOP)
        try:
            hanging = p.push("t2", LARGE)
            await eventually(lambda: len(p.pusher._waiting) == 1)
            # It waits to be joined by the one that hangs.
            assert await p.push_all("small") == ["queued"]
            assert not hanging.done()
        finally:
            store.process.send_signal(signal.SIGCONT)
        assert {(await push).outcome for push in (written, hanging)} == {"queued"}


async def test_payloads_in_the_store_take_their_room_in_the_window(storing: FakeService) -> None:
    async with pushing(storing, directly=True, window_bytes=200_000) as p:
        storing.hold_pushes.clear()
        pushes = [p.push(f"u{i}", LARGE) for i in range(3)]
        await eventually(lambda: storing.held_pushes == 1)
        assert len(p.pusher) == 2
        storing.hold_pushes.set()
        assert {(await push).outcome for push in pushes} == {"queued"}


async def test_a_payload_that_is_missing_is_written_again_under_another_nonce(storing: FakeService) -> None:
    storing.outcomes.append(groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING)
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["queued"]
    assert len(set(nonces(storing))) == 2
    assert p.counters.pushed == {"payload_missing": 1, "queued": 1}
    assert p.counters.pushed_bytes["direct"] > 90_000


async def test_a_group_whose_payload_goes_missing_again_and_again_is_relayed(storing: FakeService) -> None:
    storing.outcomes.extend([groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING] * 2)
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["queued"]
        assert await p.push_all("t2", tokens=LARGE) == ["queued"]
    assert [group.header.task_id for group in storing.stored] == ["t1", "t1", "t2"]
    assert len(storing.results()["t1"].payload) > 90_000
    assert p.counters.pushed_bytes.keys() == {"relayed", "direct"}


async def test_what_a_lost_stream_left_unanswered_is_pushed_again_as_it_was(storing: FakeService) -> None:
    storing.swallow_acks = 1
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["duplicate"]
    assert len(storing.stored) == 2
    assert storing.stored[0] == storing.stored[1]


async def test_a_full_queue_leaves_the_payload_for_the_next_try(storing: FakeService) -> None:
    storing.outcomes.append(groups_pb2.PUSH_OUTCOME_REJECTED_FULL)
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["queued"]
    assert len(nonces(storing)) == 2
    assert len(set(nonces(storing))) == 1


async def test_a_group_without_a_lease_is_written_with_the_revision_that_it_is_pushed_with(
    storing: FakeService,
) -> None:
    async with pushing(storing, directly=True) as p:
        known = storing.revision
        header, payload = p.group("t1", LARGE)
        header.lease_id = ""
        assert (await p.pusher.push(header, payload)).outcome == "queued"
        assert storing.results()["t1"].header.first_revision == known
        header, payload = p.group("t2", LARGE)
        header.lease_id, header.first_revision = "", known
        storing.forgotten = storing.revision = known + 100
        assert (await p.pusher.push(header, payload)).outcome == "queued"
    assert storing.results()["t2"].header.first_revision >= known + 100
    assert [group.header.task_id for group in storing.stored] == ["t1", "t2"]


async def test_a_service_of_before_there_was_access_relays(fake: FakeService) -> None:
    async with pushing(fake, directly=True) as p:
        assert await p.push_all("t1", "t2", tokens=LARGE) == ["queued"] * 2
    assert p.counters.pushed_bytes.keys() == {"relayed"}


@pytest.mark.parametrize(
    "error", [PermissionDenied("m", "t", "trainer", "no"), Unauthenticated("no"), RolloutBufferError("no")]
)
async def test_a_worker_that_is_given_no_access_says_so_once_and_has_its_groups_relayed(
    storing: FakeService, error: RolloutBufferError, caplog: pytest.LogCaptureFixture
) -> None:
    storing.refuse_access = error
    with caplog.at_level(logging.WARNING):
        async with pushing(storing, directly=True) as p:
            assert await p.push_all("t1", "t2", tokens=LARGE) == ["queued"] * 2
            assert await p.push_all("t3", tokens=LARGE) == ["queued"]
    assert p.counters.pushed_bytes.keys() == {"relayed"}
    assert [record.getMessage() for record in caplog.records if "relayed" in record.getMessage()] == [
        f"w, writing for run r, has payloads relayed by the service: no access: {error}"
    ]


async def test_groups_are_relayed_while_the_store_lets_nobody_in_and_go_directly_again(
    storing: FakeService, store: PayloadStore
) -> None:
    async with pushing(storing, directly=True) as p:
        assert await p.push_all("t1", tokens=LARGE) == ["queued"]
        store.cast_out("w")
        assert set(await p.push_all(*(f"a{i}" for i in range(8)), tokens=LARGE)) == {"queued"}
        relayed = p.counters.pushed_bytes["relayed"]
        assert relayed > 8 * 90_000
        store.let_in("w")
        i = 0
        while p.counters.pushed_bytes["relayed"] != relayed or not i:
            relayed, i = p.counters.pushed_bytes["relayed"], i + 1
            assert await p.push_all(f"b{i}", tokens=LARGE) == ["queued"]
    assert any(storing.troubles)
    assert all(group.payload for group in storing.results().values())


async def test_a_service_that_knows_no_parts_is_sent_no_group_larger_than_a_message(
    storing: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_workers.service.pusher.MAX_MESSAGE_BYTES", 10 << 20)
    async with pushing(storing, directly=True) as p:
        result = await p.push("t1", tokens=1_200_000)
        assert await p.push_all("t2", tokens=950_000) == ["queued"]
    assert result.outcome == "refused"
    assert isinstance(result.error, InvalidField)
    assert result.error.attributes["field"] == "payload"
    assert result.error.attributes["limit"] == f"at most a message's {10 << 20} bytes"
    # Under one key.
    assert [group.stored.parts for group in storing.stored] == [0]
