"""Access to a cluster, as a client checks it."""

from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from buffer_wire.payloads.access import MAX_SHARDS, StoreAccess
from buffer_wire.resp.slots import SLOTS, slot_of
from rollout_buffer.v1 import payloads_pb2 as pb

LAST = SLOTS - 1
AT = pb.StoreAddress(host="store", port=1)


def shard(*slots: tuple[int, int], **address: Any) -> pb.StoreShard:
    at = pb.StoreAddress(**{"host": "store", "port": 1, **address})
    return pb.StoreShard(address=at, slots=[pb.SlotRange(first=first, last=last) for first, last in slots])


def access(*shards: pb.StoreShard, **given: Any) -> StoreAccess:
    message = pb.PayloadAccess(shards=shards, username="w", password="pw", unpushed_ms=60_000, valid_ms=90_000, **given)
    return StoreAccess.checked(message)


def test_a_key_lies_on_the_shard_that_serves_its_slot_and_on_none_where_none_does() -> None:
    keys = [f"k{number}" for number in range(2_000)]
    given = access(shard((0, 99), (200, 9_999)), shard((10_000, LAST)))
    assert given.is_cluster
    assert {given.shard_of(key) for key in keys} == {0, 1, -1}
    for key in keys:
        slot = slot_of(key)
        assert given.shard_of(key) == (1 if slot >= 10_000 else 0 if slot < 100 or slot >= 200 else -1)
    assert not access(addresses=[AT]).is_cluster
    assert {access(addresses=[AT]).shard_of(key) for key in keys} == {0}


@pytest.mark.parametrize(
    ("field", "shards"),
    [
        ("shards[0].slots", [shard((0, SLOTS))]),
        ("shards[0].slots", [shard((5, 4))]),
        ("shards[0].slots", [shard((0, 5), (5, 9))]),
        ("shards[1].slots", [shard((0, 5)), shard((0, LAST))]),
        ("shards[0].host", [shard((0, LAST), host="")]),
        ("shards[1].port", [shard((0, 5)), shard((6, LAST), port=0)]),
        ("shards", [shard()] * (MAX_SHARDS + 1)),
    ],
)
def test_what_is_no_map_of_a_cluster_is_refused_by_its_field(field: str, shards: list[pb.StoreShard]) -> None:
    with pytest.raises(InvalidField) as refused:
        access(*shards)
    assert refused.value.attributes["field"] == field


def test_shards_beside_addresses_are_refused() -> None:
    with pytest.raises(InvalidField, match="shards"):
        access(shard((0, LAST)), addresses=[AT])
