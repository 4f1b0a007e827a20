"""Groups that a pusher has written to the store, by a plain client of the store."""

from typing import Any

from buffer_wire.codec import group_head
from buffer_wire.payloads.keys import group_checksum, new_nonce, payload_checksum, payload_key
from rollout_buffer.v1 import groups_pb2


def claim_check(group: groups_pb2.Group) -> groups_pb2.Group:
    """The group as it is pushed once it lies in the store, under a new nonce."""
    place = groups_pb2.StoredPayload(nonce=new_nonce(), checksum=payload_checksum(group.payload))
    return groups_pb2.Group(header=group.header, stored=place)


def key_of(run_id: str, group: groups_pb2.Group, pushed: groups_pb2.Group) -> str:
    """Key under which a group lies that is pushed like that."""
    header = group.header.SerializeToString()
    size = len(group_head(header, len(group.payload))) + len(group.payload)
    return payload_key(run_id, pushed.stored.nonce, group_checksum(header, pushed.stored.checksum), size)


def write(store: Any, run_id: str, group: groups_pb2.Group, unpushed_ms: int = 600_000) -> groups_pb2.Group:
    """Write a group; what is pushed of it."""
    pushed = claim_check(group)
    assert store.set(key_of(run_id, group, pushed), group.SerializeToString(), nx=True, px=unpushed_ms)
    return pushed
