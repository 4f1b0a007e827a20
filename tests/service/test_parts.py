"""Groups larger than a message on a real service: past it, and part by part through it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from buffer_wire.codec import group_head
from buffer_wire.errors import InvalidField, NotReady, UnknownRun
from buffer_wire.payloads.keys import PART_BYTES, WHOLE_BYTES, part_keys
from buffer_wire.payloads.parts import NewPayload
from rollout_buffer.v1 import groups_pb2, payloads_pb2
from tests.support.large_groups import large, pull_by, push_by_worker
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, connect, failure, make_group
from tests.support.service import ServiceProcess, running_service

MIB = 1 << 20
SETTINGS = {"rpc_processes": 1, "max_message_bytes": MIB, "max_group_bytes": 40 * MIB, "recent_bytes": 0}


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "relayed"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running_service(tmp_path_factory.mktemp("service"), direct_payloads=request.param, **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def rpc(service: ServiceProcess) -> Iterator[Rpc]:
    client = connect(service.address)
    yield client
    client.channel.close()


@pytest.fixture
def stored(service: ServiceProcess) -> Iterator[Any]:
    """A plain client of the store."""
    with redis.Redis(unix_socket_path=str(service.data_dir / "store" / "store.sock")) as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_a_large_group_is_pushed_and_pulled_byte_for_byte(
    service: ServiceProcess, rpc: Rpc, stored: Any, kind: str
) -> None:
    run = rpc.create(batch_groups=3)
    groups = [large("a"), make_group("b"), large("c", WHOLE_BYTES)]
    results, direct = await push_by_worker(service.address, run.run_id, groups)
    assert [result.outcome for result in results] == ["queued"] * 3
    assert (direct > 0) is (service.settings["direct_payloads"] is True)
    assert len(list(stored.scan_iter("rb:p:*"))) == 11 + 1 + 5
    assert await pull_by(kind, service.address, run.run_id) == [group.payload for group in groups]
    run.commit(0)
    run.checkpoint(0)
    assert list(stored.scan_iter("rb:p:*")) == []


async def test_a_group_above_the_limit_is_refused_before_it_is_written(
    service: ServiceProcess, rpc: Rpc, stored: Any
) -> None:
    run = rpc.create(batch_groups=1, max_queued_bytes=30 * MIB)
    (refused,), written = await push_by_worker(service.address, run.run_id, [large("a", 41 * MIB)])
    assert (refused.outcome, written) == ("refused", 0)
    assert refused.error is not None
    assert refused.error.attributes["field"] == "payload"
    assert refused.error.attributes["limit"] == f"at most {40 * MIB} bytes (max_group_bytes)"
    (refused,), written = await push_by_worker(service.address, run.run_id, [large("b", 31 * MIB)])
    assert refused.outcome == ("refused" if not service.settings["direct_payloads"] else "invalid")
    assert refused.error is not None
    assert f"at most {30 * MIB} bytes" in refused.error.attributes["limit"]
    assert list(stored.scan_iter("rb:p:*")) == []


@pytest.mark.parametrize("direct", [True, False])
async def test_who_knows_no_parts_is_refused_what_no_message_carries(
    service: ServiceProcess, rpc: Rpc, direct: bool
) -> None:
    run = rpc.create(batch_groups=1)
    await push_by_worker(service.address, run.run_id, [large("a")])
    refusal = failure(lambda: run.pull(0, direct=direct))
    assert isinstance(refusal, InvalidField)
    assert refusal.attributes["field"] == "reads_parts"
    assert "group a/0 has 20" in refusal.attributes["limit"]
    (delivered,) = run.pull(0, direct=direct, reads_parts=True)[1]
    assert delivered.payload_key.endswith(":11")


@pytest.mark.parametrize("harm", ["gone", "damaged"])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_a_group_of_which_a_part_is_gone_or_damaged_is_settled_as_lost(
    service: ServiceProcess, rpc: Rpc, stored: Any, kind: str, harm: str
) -> None:
    run = rpc.create(batch_groups=2)
    groups = [large("a"), large("b", 10 * MIB)]
    await push_by_worker(service.address, run.run_id, groups)
    run.pull(0, direct=True, reads_parts=True)
    (last,) = stored.scan_iter("rb:p:*:11.10")
    if harm == "gone":
        stored.delete(last)
    else:
        stored.setrange(last, 1_000, b"damaged")
    assert await pull_by(kind, service.address, run.run_id) == [groups[1].payload]
    assert run.get().groups.lost.groups == 1


# ── the messages of a plain client ──


def new(run: RunRpc, group: groups_pb2.Group) -> NewPayload:
    header = group.header.SerializeToString()
    return NewPayload.of(run.run_id, header, [group.payload], in_parts=True)


def parts_of(payload: NewPayload, run: RunRpc) -> list[payloads_pb2.WritePayloadRequest]:
    requests = [payloads_pb2.WritePayloadRequest(part=b"".join(body)) for _, body in payload.cut()]
    requests[0].run.CopyFrom(run.ref)
    requests[0].payload_key = payload.key
    return requests


def write(rpc: Rpc, requests: Sequence[payloads_pb2.WritePayloadRequest]) -> int:
    return rpc.payloads.WritePayload(iter(requests), timeout=TIMEOUT_S).written_bytes


def test_a_plain_client_writes_pushes_pulls_and_reads_parts(rpc: Rpc, stored: Any) -> None:
    run = rpc.create(batch_groups=1)
    group = large("a")
    payload = new(run, group)
    assert write(rpc, parts_of(payload, run)) == len(group.SerializeToString())
    assert all(0 < stored.pttl(part.key) <= 600_000 for part in part_keys(payload.key))
    (ack,) = run.push([groups_pb2.Group(header=group.header, stored=payload.stored)])
    assert ack.outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    assert all(stored.pttl(part.key) == -1 for part in part_keys(payload.key))
    (delivered,) = run.pull(0, reads_parts=True)[1]
    request = payloads_pb2.ReadPayloadRequest(run=run.ref, payload_key=delivered.payload_key)
    came = list(rpc.payloads.ReadPayload(request, timeout=TIMEOUT_S))
    assert [len(message.part) for message in came] == [part.size for part in part_keys(payload.key)]
    assert groups_pb2.Group.FromString(b"".join(message.part for message in came)) == group
    stored.delete(part_keys(payload.key)[1].key)
    gone = failure(lambda: list(rpc.payloads.ReadPayload(request, timeout=TIMEOUT_S)))
    assert isinstance(gone, NotReady)
    assert f"{payload.key}.1 is not there" in str(gone)


def test_what_is_wrong_with_parts_is_refused_with_its_field(rpc: Rpc) -> None:
    run, group = rpc.create(batch_groups=1), large("a")
    payload = new(run, group)
    requests = parts_of(payload, run)

    def refused(*sent: payloads_pb2.WritePayloadRequest) -> tuple[str, str]:
        error = failure(lambda: write(rpc, sent))
        assert isinstance(error, InvalidField)
        return error.attributes["field"], error.attributes["limit"]

    def first(**changed: Any) -> payloads_pb2.WritePayloadRequest:
        request = payloads_pb2.WritePayloadRequest(run=run.ref, payload_key=payload.key, part=requests[0].part)
        for name, value in changed.items():
            setattr(request, name, value)
        return request

    whole = payload.key.removesuffix(":11")
    assert refused(first(payload_key=whole))[0] == "payload_key"
    assert refused(first(payload_key=payload.key.replace(":11", ":10")))[0] == "payload_key"
    assert refused(first(payload_key=payload.key.replace(run.run_id, "another")))[0] == "payload_key"
    vast = 41 * MIB
    vast_key = f"{whole.rpartition(':')[0]}:{vast}:{-(-vast // PART_BYTES)}"
    assert refused(first(payload_key=vast_key)) == ("payload", f"at most {40 * MIB} bytes (max_group_bytes)")
    assert refused(first(part=b"short")) == ("part", f"{PART_BYTES} bytes, part 0 of 11")
    assert refused(*requests[:2])[0] == "part"
    # The first two parts are there now.
    assert refused(*requests) == ("payload_key", "a new nonce: there is such a part")
    nobody = payloads_pb2.WritePayloadRequest(payload_key=payload.key.replace(run.run_id, "nobody"), part=b"")
    nobody.run.run_id = "nobody"
    assert isinstance(failure(lambda: write(rpc, [nobody])), UnknownRun)


@pytest.mark.parametrize("parts", [1, 12])
def test_a_push_says_as_many_parts_as_there_are(rpc: Rpc, parts: int) -> None:
    run, group = rpc.create(batch_groups=1), large("a")
    payload = new(run, group)
    payload.stored.parts = parts
    (ack,) = run.push([groups_pb2.Group(header=group.header, stored=payload.stored)])
    size = len(group_head(group.header.SerializeToString(), len(group.payload))) + len(group.payload)
    assert ack.error.attributes["field"] == "stored.parts"
    assert ack.error.attributes["limit"] == f"11 for a group of {size} bytes, or 0"


def test_what_breaks_off_or_lacks_a_part_is_missing_and_expires(rpc: Rpc, stored: Any) -> None:
    run, group = rpc.create(batch_groups=1), large("a")
    payload = new(run, group)
    failure(lambda: write(rpc, parts_of(payload, run)[:2]))
    keys = sorted(stored.scan_iter("rb:p:*"))
    assert len(keys) == 2
    (ack,) = run.push([groups_pb2.Group(header=group.header, stored=payload.stored)])
    assert ack.outcome == groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING
    assert all(0 < stored.pttl(key) <= 600_000 for key in keys)
    assert run.get().groups.accepted.groups == 0


def test_a_service_that_is_killed_between_two_parts_leaves_parts_that_expire(tmp_path: Path) -> None:
    with running_service(tmp_path, direct_payloads=False, **SETTINGS) as service:
        rpc = connect(service.address)
        run, group = rpc.create(batch_groups=1), large("a")
        payload = new(run, group)
        at = service.data_dir / "store" / "store.sock"

        def until_killed() -> Iterator[payloads_pb2.WritePayloadRequest]:
            yield from parts_of(payload, run)[:2]
            with redis.Redis(unix_socket_path=str(at)) as store:
                while store.exists(*(part.key for part in part_keys(payload.key)[:2])) < 2:
                    pass
            service.kill()

        with pytest.raises(grpc.RpcError):
            rpc.payloads.WritePayload(until_killed(), timeout=TIMEOUT_S)
        rpc.channel.close()
        service.start()
        with redis.Redis(unix_socket_path=str(at)) as store:
            assert {0 < store.pttl(key) <= 600_000 for key in store.scan_iter("rb:p:*")} == {True}
        rpc = connect(service.address)
        again = RunRpc(rpc, run.run_id)
        (ack,) = again.push([groups_pb2.Group(header=group.header, stored=payload.stored)])
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_PAYLOAD_MISSING
        payload = new(again, group)
        write(rpc, parts_of(payload, again))
        (ack,) = again.push([groups_pb2.Group(header=group.header, stored=payload.stored)])
        assert ack.outcome == groups_pb2.PUSH_OUTCOME_QUEUED
        rpc.channel.close()
