"""Clients that read large groups from the store themselves, at a real service, and what they do where they cannot."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import redis

from buffer_wire.payloads import asks
from buffer_wire.payloads.keys import key_prefix
from tests.support.push import GroupArrays, Pusher, arrays_for
from tests.support.service import ServiceProcess, running_service
from tests.support.store_server import StoreServer, store_server
from tests.trainer_client.client.test_fork import in_child
from tests.trainer_client.fake_service import Do, FakeService, pull_messages
from trainer_client import AsyncBufferClient, BufferClient, ClientOptions, Policy
from trainer_client.batch import Batch

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

QUICK = ClientOptions(timeout_s=20)
LARGE, HUGE = 5_000, 80_000
"""Response lengths: two samples of the first have 90 KB, of the other 1.4 MB."""
DIRECT = "rollout_buffer_direct_bytes_total"

Pull: TypeAlias = Callable[..., Batch]


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


@pytest.fixture(scope="module")
def service(store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    # What the service remembers of payloads would hide what became of them in the store.
    with running_service(tmp_path_factory.mktemp("service"), store=store.url, recent_bytes=0) as running:
        yield running


@pytest.fixture(scope="module")
def stored(store: StoreServer) -> Iterator[Any]:
    """A plain client of the store."""
    with redis.Redis(unix_socket_path=str(store.socket)) as client:
        yield client


@pytest.fixture
def relayed(service: ServiceProcess) -> Iterator[BufferClient]:
    with BufferClient(service.address, ClientOptions(timeout_s=20, direct_payloads=False)) as made:
        yield made


@pytest.fixture(params=["sync", "asyncio"])
def pull(request: pytest.FixtureRequest, service: ServiceProcess) -> Iterator[Pull]:
    """`pull` of either client, which reads directly where it may."""

    async def opened() -> AsyncBufferClient:
        return AsyncBufferClient(service.address, QUICK)

    if request.param == "sync":
        with BufferClient(service.address, QUICK) as client:
            yield lambda *args, **kwargs: client.pull(*args, **({"term": 1, "timeout_s": 30} | kwargs))
        return
    with asyncio.Runner() as runner:
        made = runner.run(opened())
        yield lambda *args, **kwargs: runner.run(made.pull(*args, **({"term": 1, "timeout_s": 30} | kwargs)))
        runner.run(made.close())


def mixed(client: BufferClient, run_id: str, count: int, large: int = LARGE, **policy: Any) -> list[GroupArrays]:
    """Queued groups of a new run: every second one is large."""
    client.create_run(run_id, Policy(**({"batch_groups": count} | policy)))
    groups = [arrays_for(f"t{i}", response_len=large if i % 2 else 6) for i in range(count)]
    push(client, run_id, groups)
    return groups


def push(client: BufferClient, run_id: str, groups: list[GroupArrays]) -> None:
    with Pusher(client.target, run_id) as pusher:
        for group in groups:
            pusher.push(group)


def contents(batch: Batch) -> list[tuple[str, int, bytes, bytes]]:
    return [
        (group.task_id, group.sequence, group.header.SerializeToString(), bytes(group.payload))
        for group in batch.groups
    ]


def key_of(stored: Any, run_id: str, group: GroupArrays) -> str:
    payload = group.to_wire()[1]
    (key,) = [key for key in stored.scan_iter(f"{key_prefix(run_id)}*") if payload in stored.get(key)]
    return str(key.decode())


def test_a_batch_is_the_same_both_ways_and_small_groups_of_it_are_relayed(
    service: ServiceProcess, relayed: BufferClient, pull: Pull, run_id: str
) -> None:
    groups = mixed(relayed, run_id, 9)
    before = service.metric(DIRECT, method="PullBatch")
    batch = pull(run_id, step=0)
    assert [group.task_id for group in batch.groups] == [group.task_id for group in groups]
    wire = [group.to_wire() for group in groups]
    large = sum(len(payload) for _, payload in wire[1::2])
    direct = service.metric(DIRECT, method="PullBatch") - before
    assert large < direct < large + 4 * 1024
    assert batch.received_bytes > sum(len(payload) for _, payload in wire)
    assert contents(relayed.pull(run_id, term=1, step=0)) == contents(batch)
    assert service.metric(DIRECT, method="PullBatch") == before + direct
    assert not any(array.flags.writeable for sample in batch.samples for array in (sample.token_ids, sample.logprobs))


@pytest.mark.parametrize("policy", [{}, {"micro_batch_groups": 4}])
def test_ranks_and_micro_batches_get_their_parts(
    service: ServiceProcess, relayed: BufferClient, pull: Pull, run_id: str, policy: dict[str, int]
) -> None:
    mixed(relayed, run_id, 8, **policy)
    for rank in range(2):
        before = service.metric(DIRECT, method="PullBatch")
        batch = pull(run_id, step=0, rank=rank, world_size=2)
        assert service.metric(DIRECT, method="PullBatch") > before
        assert contents(batch) == contents(relayed.pull(run_id, term=1, step=0, rank=rank, world_size=2))


def test_a_reader_that_loses_the_store_under_a_pull_gets_the_batch_relayed_and_goes_back(
    service: ServiceProcess, relayed: BufferClient, stored: Any, pull: Pull, run_id: str
) -> None:
    """The pull waits, asked for keys, when the store casts its user out; what it reads the keys with is gone."""
    relayed.create_run(run_id, Policy(batch_groups=4))
    groups = [arrays_for(f"t{i}", response_len=LARGE) for i in range(8)]
    others = set(stored.acl_users())

    def cast_out() -> None:
        service.until_metric(1, "rollout_buffer_waiting_pulls", run=run_id)
        for user in set(stored.acl_users()) - others:
            stored.acl_deluser(user)
        push(relayed, run_id, groups)

    thread = threading.Thread(target=cast_out)
    thread.start()
    batch = pull(run_id, step=0)
    thread.join()
    assert [group.task_id for group in batch.groups] == [group.task_id for group in groups[:4]]
    before = service.metric(DIRECT, method="PullBatch")
    assert contents(relayed.pull(run_id, term=1, step=0)) == contents(batch)
    while service.metric(DIRECT, method="PullBatch") == before:
        assert [group.task_id for group in pull(run_id, step=1).groups] == [group.task_id for group in groups[4:]]
    ledger = relayed.ledger(run_id).groups
    assert (ledger.delivered.groups, ledger.lost.groups) == (8, 0)


def test_what_is_damaged_or_gone_is_settled_as_lost_and_nothing_else(
    relayed: BufferClient, stored: Any, pull: Pull, run_id: str
) -> None:
    """The service meets the lost ones when the first messages are sent already, so that the pull is repeated twice."""
    relayed.create_run(run_id, Policy(batch_groups=10, max_queued_groups=10))
    groups = [arrays_for(f"t{i}", response_len=HUGE) for i in range(10)]
    push(relayed, run_id, groups)
    damaged, gone = (key_of(stored, run_id, groups[i]) for i in (5, 9))
    size = stored.strlen(damaged)
    stored.setrange(damaged, size - 9, b"8 others.")
    stored.delete(gone)
    batch = pull(run_id, step=0)
    kept = [group for i, group in enumerate(groups) if i not in (5, 9)]
    assert [(group.task_id, bytes(group.payload)) for group in batch.groups] == [
        (group.task_id, group.to_wire()[1]) for group in kept
    ]
    assert batch.info.total_groups == 8
    ledger = relayed.ledger(run_id)
    assert (ledger.groups.delivered.groups, ledger.groups.lost.groups) == (8, 2)
    assert ledger.balanced


def test_a_client_that_did_not_check_would_train_on_damaged_bytes(
    relayed: BufferClient, stored: Any, pull: Pull, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted lack: nothing but the checksum stands between them."""
    relayed.create_run(run_id, Policy(batch_groups=1))
    group = arrays_for("t", response_len=HUGE)
    push(relayed, run_id, [group])
    key = key_of(stored, run_id, group)
    stored.setrange(key, stored.strlen(key) - 9, b"8 others.")
    monkeypatch.setattr(asks, "is_of", lambda _key, _body: True)
    (damaged,) = pull(run_id, step=0).groups
    assert bytes(damaged.payload) != group.to_wire()[1]


def test_a_forked_child_reads_over_a_connection_of_its_own(
    service: ServiceProcess, relayed: BufferClient, stored: Any, run_id: str
) -> None:
    mixed(relayed, run_id, 4)
    others = connections(stored)
    with BufferClient(service.address, QUICK) as client:
        first = contents(client.pull(run_id, term=1, step=0))
        (own,) = connections(stored) - others
        before = service.metric(DIRECT, method="PullBatch")

        def child() -> tuple[bool, int]:
            same = contents(client.pull(run_id, term=1, step=0)) == first
            return same, len(connections(stored) - others - {own})

        assert in_child(child) == "(True, 1)"
        assert service.metric(DIRECT, method="PullBatch") > before
        assert contents(client.pull(run_id, term=1, step=0)) == first
        assert own in connections(stored)
    while own in connections(stored):
        pass


def connections(stored: Any) -> set[str]:
    """Connections of users that the service has made."""
    return {client["id"] for client in stored.client_list() if client["user"] != "default"}


def test_a_service_that_knows_no_direct_payloads_relays_and_that_is_said_once(
    fake: FakeService, do: Do, caplog: pytest.LogCaptureFixture
) -> None:
    fake.answer("BatchService/PullBatch", pull_messages([arrays_for("a")]))
    for _ in range(3):
        assert do("pull", "r", term=1, step=0).groups[0].task_id == "a"
    assert not any(request.direct for request in fake.requests["BatchService/PullBatch"])
    (said,) = [line for line in caplog.messages if "relayed" in line]
    assert "trainer rank 0, reading of run r, has payloads relayed by the service: no access: UNIMPLEMENTED" in said
