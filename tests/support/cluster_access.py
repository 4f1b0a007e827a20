"""Access to a cluster of the tests, as the service would give it out, by the map that its nodes have."""

from collections.abc import Sequence

from buffer_wire.payloads.keys import key_prefix
from rollout_buffer.v1 import payloads_pb2 as pb
from tests.support.store_cluster import Node, StoreCluster

RUN = "r"
RIGHTS = {"w": ("+set", f"%W~{key_prefix(RUN)}*"), "d": ("+get", "+mget", f"%R~{key_prefix(RUN)}*")}
"""Users of RUN: `w` writes, `d` reads; a user's password is the name backwards."""


def let_in(nodes: Sequence[Node]) -> None:
    """Make the users on these nodes."""
    for node in nodes:
        for name, rights in RIGHTS.items():
            node.do("ACL", "SETUSER", name, "reset", "on", f">{name[::-1]}", *rights)


class Access:
    """The service's part: gives access for a user by the map that the nodes have now, and keeps the troubles that it is
    told.
    """

    def __init__(self, cluster: StoreCluster, name: str, **changed: object) -> None:
        self.cluster, self.name, self.changed = cluster, name, changed
        self.troubles: list[str] = []

    def give(self, trouble: str) -> pb.PayloadAccess:
        """Answer a blocking client."""
        self.troubles.append(trouble)
        shards: dict[int, pb.StoreShard] = {}
        for first, last, port in self.cluster.slots():
            address = pb.StoreAddress(host="127.0.0.1", port=port)
            shards.setdefault(port, pb.StoreShard(address=address)).slots.add(first=first, last=last)
        given: dict[str, object] = {
            "shards": list(shards.values()),
            "username": self.name,
            "password": self.name[::-1],
            "direct_from_bytes": 1,
            "unpushed_ms": 60_000,
            "valid_ms": 600_000,
            "max_group_bytes": 1 << 30,
        }
        return pb.PayloadAccess(**(given | self.changed))  # type: ignore[arg-type]

    async def __call__(self, trouble: str) -> pb.PayloadAccess:
        """Answer an asyncio client."""
        return self.give(trouble)
