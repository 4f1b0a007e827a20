import asyncio
from pathlib import Path

import pytest

import buffer_wire.connection.access
from buffer_wire.connection.access import Access
from buffer_wire.errors import NotReady, RunPaused, Unauthenticated
from rollout_buffer.v1 import groups_pb2
from rollout_workers.counters import Counters
from rollout_workers.service.client import ServiceClient
from rollout_workers.service.pusher import Pusher
from tests.workers.building import eventually
from tests.workers.fake_service import FakeService
from tests.workers.pushing import Pushing, pushing


async def test_small_groups_travel_together_and_each_is_answered(fake: FakeService) -> None:
    async with pushing(fake) as p:
        assert await p.push_all(*(f"t{i}" for i in range(50))) == ["queued"] * 50
    assert sum(fake.bundles) == 50
    assert len(fake.bundles) <= 2
    assert p.counters.pushed == {"queued": 50}
    assert len(p.pusher) == 0


async def test_filtered_group_is_a_final_answer_of_its_own(fake: FakeService) -> None:
    fake.outcomes.append(groups_pb2.PUSH_OUTCOME_FILTERED)
    async with pushing(fake) as p:
        assert await p.push_all("t1", "t2") == ["filtered", "queued"]
    assert p.counters.pushed == {"filtered": 1, "queued": 1}


async def test_bundles_keep_to_their_size(fake: FakeService) -> None:
    async with pushing(fake, bundle_bytes=100_000) as p:
        # A group of 5,000 tokens takes 45 KB: two to a bundle.
        assert await p.push_all(*(f"t{i}" for i in range(6)), tokens=5_000) == ["queued"] * 6
        assert await p.push_all("large", tokens=50_000) == ["queued"]
    assert fake.bundles == [2, 2, 2, 1]


async def test_group_arrives_as_it_was_made(fake: FakeService) -> None:
    async with pushing(fake) as p:
        header, payload = p.group("t1", 100)
        await p.pusher.push(header, payload)
    assert fake.results()["t1"] == groups_pb2.Group(header=header, payload=payload)


async def test_lost_acknowledgement_is_asked_for_again(fake: FakeService) -> None:
    fake.swallow_acks = 2
    async with pushing(fake) as p:
        assert await p.push_all("t1", "t2") == ["duplicate", "duplicate"]
    assert set(fake.results()) == {"t1", "t2"}


async def test_a_push_without_a_lease_says_over_all_retries_what_was_known_before_its_first_try(
    fake: FakeService,
) -> None:
    fake.swallow_acks = 2
    async with pushing(fake) as p:
        known = fake.revision
        header, payload = p.group("t1")
        header.lease_id = ""
        assert (await p.pusher.push(header, payload)).outcome == "duplicate"
    assert fake.revision > known
    assert fake.results()["t1"].header.first_revision == header.first_revision == known


async def test_a_push_whose_tries_were_all_answered_is_no_repeat(fake: FakeService) -> None:
    async with pushing(fake) as p:
        header, payload = p.group("t1")
        header.lease_id, header.first_revision = "", fake.revision
        fake.revision += 5
        fake.forgotten = fake.revision
        assert (await p.pusher.push(header, payload)).outcome == "queued"
    assert fake.results()["t1"].header.first_revision >= fake.forgotten


async def test_a_push_that_may_be_a_forgotten_repeat_is_given_up_with_what_the_service_says(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = fake.take

    def take_and_forget(group: groups_pb2.Group) -> groups_pb2.PushAck:
        ack = take(group)
        fake.forgotten = fake.revision + 1
        return ack

    monkeypatch.setattr(fake, "take", take_and_forget)
    fake.swallow_acks = 1
    async with pushing(fake) as p:
        header, payload = p.group("t1")
        header.lease_id = ""
        result = await p.pusher.push(header, payload)
    assert result.outcome == "invalid"
    assert result.error is not None
    assert result.error.attributes["field"] == "first_revision"


async def test_nothing_is_lost_when_the_service_is_killed_and_comes_back(fake: FakeService) -> None:
    fake.hold_pushes.clear()
    async with pushing(fake, bundle_bytes=1) as p:
        pushes = [p.push(f"t{i}") for i in range(20)]
        await eventually(lambda: len(p.pusher) == 20 and bool(fake.bundles))
        await fake.stop()
        pushes += [p.push(f"t{i}") for i in range(20, 30)]
        fake.hold_pushes.set()
        await fake.start()
        outcomes = [(await push).outcome for push in pushes]
    assert set(outcomes) <= {"queued", "duplicate"}
    assert set(fake.results()) == {f"t{i}" for i in range(30)}


async def test_full_queue_that_rejects_is_tried_again_later(fake: FakeService) -> None:
    fake.outcomes.extend([groups_pb2.PUSH_OUTCOME_REJECTED_FULL] * 2)
    async with pushing(fake) as p:
        assert await p.push_all("t1") == ["queued"]
    assert p.counters.pushed == {"rejected_full": 2, "queued": 1}


@pytest.mark.parametrize("outcome", ["CLOSED", "FILTERED", "INVALID"])
async def test_final_answers_are_passed_on(fake: FakeService, outcome: str) -> None:
    fake.outcomes.append(groups_pb2.PushOutcome.Value(f"PUSH_OUTCOME_{outcome}"))
    async with pushing(fake) as p:
        result = await p.push("t1")
    assert result.outcome == outcome.lower()
    assert (str(result.error) == "the group breaks a rule") == (outcome == "INVALID")


async def test_paused_run_is_waited_out(fake: FakeService) -> None:
    fake.refuse_pushes.extend([RunPaused("r", "store_rolled_back")] * 2)
    async with pushing(fake) as p:
        assert await p.push_all("t1", "t2") == ["queued", "queued"]


@pytest.mark.parametrize(("told", "connections"), [({}, 1), ({"process": "full"}, 3)])
async def test_who_is_refused_by_a_full_process_comes_on_another_connection(
    fake: FakeService, told: dict[str, str], connections: int
) -> None:
    fake.refuse_pushes.extend([NotReady("ask again", **told)] * 2)
    async with pushing(fake) as p:
        assert await p.push_all("t1") == ["queued"]
        assert await p.push_all("t2") == ["queued"], "the connection that served it is kept"
    assert len(fake.pushers) == 3
    assert len(set(fake.pushers)) == connections


async def test_no_group_is_given_up_for_a_stream_that_ends_while_it_is_written_to(fake: FakeService) -> None:
    fake.refuse_pushes.extend([RunPaused("r", "store_rolled_back")] * 6)
    async with pushing(fake, bundle_bytes=1) as p:
        assert await p.push_all(*(f"t{i}" for i in range(500))) == ["queued"] * 500
    assert p.counters.last_error == ""


async def test_group_that_the_service_cannot_take_is_singled_out(fake: FakeService) -> None:
    fake.refuse_task_ids.add("bad")
    async with pushing(fake) as p:
        outcomes = dict(zip(("t1", "t2", "bad", "t3"), await p.push_all("t1", "t2", "bad", "t3"), strict=True))
        assert outcomes == {"t1": "queued", "t2": "queued", "bad": "refused", "t3": "queued"}
        assert await p.push_all("t4", "t5") == ["queued", "queued"]
    assert p.counters.last_error == "malformed message"


async def test_worker_that_is_not_allowed_in_ends(fake: FakeService) -> None:
    fake.refuse_pushes.append(Unauthenticated("no"))
    service = ServiceClient(fake.address, "r", instance_id="i", timeout_s=20)
    pusher = Pusher(service, Counters())
    p = Pushing(fake, pusher, Counters())
    push = p.push("t1")
    with pytest.raises(Unauthenticated):
        await asyncio.wait_for(pusher.run(), 10)
    push.cancel()
    await service.close()


async def test_full_window_holds_the_next_push_back(fake: FakeService) -> None:
    fake.hold_pushes.clear()
    async with pushing(fake, window_groups=2) as p:
        first, second, third = (p.push(f"t{i}") for i in range(3))
        await eventually(lambda: bool(fake.bundles) and len(p.pusher) == 2)
        assert p.pusher.oldest_s > 0
        fake.hold_pushes.set()
        assert [(await push).outcome for push in (first, second, third)] == ["queued"] * 3


async def test_withdrawn_group_is_not_sent_again(fake: FakeService) -> None:
    fake.hold_pushes.clear()
    async with pushing(fake) as p:
        push = p.push("t1")
        await eventually(lambda: bool(fake.bundles))
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        assert len(p.pusher) == 0
        await fake.stop()
        fake.hold_pushes.set()
        await fake.start()
        assert await p.push_all("t2") == ["queued"]
    assert set(fake.results()) == {"t2"}


async def test_a_refused_token_is_replaced_where_its_file_has_another(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        buffer_wire.connection.access, "POLL_S", float("inf")
    )  # Read again when it is refused, and not before.
    file = tmp_path / "token"
    file.write_text("first")
    async with pushing(fake, access=Access(token_file=file)) as p:
        file.write_text("second")
        fake.refuse_pushes.append(Unauthenticated("revoked"))
        assert await p.push_all("a", "b") == ["queued"] * 2
