"""Audit of the servers that payloads lie on: what nothing names any more is deleted.

A promoted replica may bring deleted payloads back, and an index that lost its last writes has forgotten some. Each
server is looked through in each term of its own, and of the index's server, as primary. And it is once a day, by one of
all processes. A payload that does not expire was staged before that. So it is staged, on trash or named by its task, or
else nobody's, as parts without the first are. One whose bytes name no task is left alone.
"""

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Sequence

import structlog

from buffer_service.commands.groups import task_of
from buffer_service.commands.replies import text
from buffer_service.commands.staging import audit
from buffer_service.domain import ops
from buffer_service.store.calls import Calls
from buffer_service.store.keys import audited_key, index_key
from buffer_service.store.payloads.node import Node, Traffic
from buffer_service.store.payloads.shards import Errand, Shards, failure_of
from buffer_service.store.payloads.tier import PayloadTier
from buffer_service.store.transport.index import Index
from buffer_wire.codec import MalformedMessage, fields, read_varint
from buffer_wire.errors import UnknownRun
from buffer_wire.payloads.keys import is_key_of, part_keys, parts_of

LOOKED_AT_ONCE = 1_000
"""Keys that a server is asked for at once: it is held up for about a millisecond."""
JUDGED_AT_ONCE = 128
"""Payloads that one script judges."""
HEAD_BYTES = 1 << 10
"""Bytes of a payload that are read for the task that its header names first."""
EVERY_S = 86_400
BEGUN_S = 600
"""Time, in seconds, after which another process begins an audit again that did not end."""

_KEY = re.compile(r"(?P<payload>rb:p:(?P<run>[^:]+):[0-9a-f]{32}:[0-9a-f]{16}:\d+(?::\d+)?)(?:\.\d+)?")
"""A key of the store: a payload's own, or that of a part."""
_HEADER_TAG = 0x0A
"""First byte of a group as it is nearly always written: header first."""
_TASK_ID, _LEASE_ID = 1, 3
"""Numbers of fields of a group's header; these come first."""

log = structlog.get_logger(__name__)


class Audit:
    """Audits of one process; `run` is called again and again."""

    def __init__(self, index: Index, calls: Calls, shards: Shards, tier: PayloadTier) -> None:
        self._index = index
        self._calls = calls
        self._shards = shards
        self._tier = tier
        self._ask_at: dict[str, float] = {}
        """Time from which on to ask again whether a server's turn has come."""

    async def run(self) -> int:
        """Look through the servers whose turn it is; how many payloads were nobody's. Raises StoreFault."""
        found = 0
        index_tenure = await self._index.tenure()
        for node in self._shards.nodes():
            mark = audited_key(index_tenure, node.tenure)
            if node.tenure and node.away is None and await self._is_due(mark):
                found += await self.look_through(node)
                await self._index.command("SET", mark, 1, "EX", EVERY_S)
        return found

    async def look_through(self, node: Node) -> int:
        """Look through one server; how many payloads were nobody's. Raises StoreFault."""
        found, cursor = 0, 0
        while True:
            (reply,) = await node.ask(Traffic.DELETIONS, [("SCAN", cursor, "MATCH", "rb:p:*", "COUNT", LOOKED_AT_ONCE)])
            cursor = int(reply[0])
            if keys := [text(bytes(key)) for key in reply[1]]:
                found += await self._judge(node, keys)
            if not cursor:
                break
        if found:
            log.warning("payloads that nothing names are deleted", server=node.name, payloads=found)
        return found

    async def _is_due(self, mark: str) -> bool:
        if time.monotonic() < self._ask_at.get(mark, 0.0):
            return False
        self._ask_at[mark] = time.monotonic() + BEGUN_S
        began = await self._index.command("SET", mark, 1, "NX", "EX", BEGUN_S)
        return began is not None

    async def _judge(self, node: Node, keys: Sequence[str]) -> int:
        """Delete those of a server's keys that are nobody's; how many payloads they are of."""
        ttls = await node.ask(Traffic.DELETIONS, [("PTTL", key) for key in keys])
        whole = [_KEY.fullmatch(key) for key, ttl_ms in zip(keys, ttls, strict=True) if ttl_ms == -1]
        by_run: defaultdict[str, set[str]] = defaultdict(set)
        for match in whole:
            # Pushers write under any name of their run: what none of ours is may name parts without end.
            if match is not None and is_key_of(match["run"], match["payload"]):
                by_run[match["run"]].add(match["payload"])
        found = 0
        for run_id, payloads in by_run.items():
            found += await self._judge_run(run_id, sorted(payloads))
        return found

    async def _judge_run(self, run_id: str, payloads: Sequence[str]) -> int:
        firsts = [part_keys(key)[0].key for key in payloads]
        heads = [Errand(key, [("GETRANGE", key, 0, HEAD_BYTES - 1)]) for key in firsts]
        await self._shards.run(Traffic.DELETIONS, heads)
        if failure := failure_of(heads):
            raise failure
        named = [
            (key, _task_of(head.replies[0]), int(parts_of(key) > 0 and not head.replies[0]))
            for key, head in zip(payloads, heads, strict=True)
        ]
        try:
            return sum(
                [
                    await self._calls.call(audit(run_id, named[first : first + JUDGED_AT_ONCE]))
                    for first in range(0, len(named), JUDGED_AT_ONCE)
                ]
            )
        except UnknownRun:
            if await self._index.command("EXISTS", index_key(run_id, "deleting")):
                # Its deletion finds its payloads, and this is called again.
                return 0
            return len((await self._tier.delete(run_id, payloads)).keys)


def _task_of(head: ops.Buffer) -> str:
    """Task of a payload by the beginning of its bytes, as the store's tasks are named; empty: it says none."""
    task_id = lease_id = ""
    view = memoryview(head)
    if not view or view[0] != _HEADER_TAG:
        # What comes first is not the header, and its bytes may look like any task.
        return ""
    with contextlib.suppress(MalformedMessage, IndexError, UnicodeDecodeError):
        size, at = read_varint(view, 1)
        # Whatever is behind the first fields may be cut off.
        for number, value in fields(view[at : at + size]):
            if number == _TASK_ID and isinstance(value, memoryview):
                task_id = str(value, "utf-8")
            elif number == _LEASE_ID and isinstance(value, memoryview):
                lease_id = str(value, "utf-8")
    return task_of(task_id, lease_id)
