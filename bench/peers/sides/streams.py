"""Redis Streams by hand, with redis-py and hiredis: XADD of a pickled group, XREADGROUP, XACK and XDEL.

One XADD a group as soon as it is made. With `at_once` in the address a producer sends a pipeline of so many, which it
has to hold back for that.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import redis

from bench.peers.groups import Columns, Size, joined
from bench.peers.loops import THREADS, Group, NoFacts, Source, in_threads

_GROUP, _NAME, _BLOCK_MS = "trainers", "c", 60_000


def _pickled(group: Group) -> dict[str, bytes]:
    columns = joined(*group)
    whole = (columns.uid, columns.tokens, columns.logprobs, columns.mask, columns.rewards)
    return {"group": pickle.dumps(whole, protocol=5)}


class Producer(NoFacts):
    """XADD by threads with a connection each."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del size
        self._stream = queue
        self._client = redis.Redis(unix_socket_path=address["socket"])
        self._at_once = int(address.get("at_once", "1"))

    def push(self, group: Group) -> None:
        """XADD a group."""
        self._client.xadd(self._stream, _pickled(group))  # type: ignore[arg-type]

    def flow(self, source: Source) -> None:
        """XADD what the source gives."""
        push = self._one if self._at_once == 1 else self._many
        in_threads(source, [push] * THREADS, self._at_once)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _one(self, groups: list[Group]) -> None:
        self.push(groups[0])

    def _many(self, groups: list[Group]) -> None:
        pipeline: Any = self._client.pipeline(transaction=False)
        for group in groups:
            pipeline.xadd(self._stream, _pickled(group))
        pipeline.execute()


class Consumer(NoFacts):
    """XREADGROUP until a batch is complete; the batch before is acknowledged and deleted first."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del size
        self._stream = queue
        self._client = redis.Redis(unix_socket_path=address["socket"])
        self._client.xgroup_create(queue, _GROUP, id="0", mkstream=True)
        self._done: list[bytes] = []

    def pull(self, count: int) -> Sequence[Columns]:
        """Read so many groups."""
        self._finish()
        groups: list[Columns] = []
        while len(groups) < count:
            reply: Any = self._client.xreadgroup(
                _GROUP, _NAME, {self._stream: ">"}, count=count - len(groups), block=_BLOCK_MS
            )
            if not reply:
                raise TimeoutError(f"{len(groups)} groups of {count}")
            for entry, fields in reply[0][1]:
                groups.append(Columns(*pickle.loads(fields[b"group"])))
                self._done.append(entry)
        return groups

    def close(self) -> None:
        """Acknowledge, and delete the stream."""
        self._finish()
        self._client.delete(self._stream)
        self._client.close()

    def _finish(self) -> None:
        if self._done:
            pipeline: Any = self._client.pipeline(transaction=False)
            pipeline.xack(self._stream, _GROUP, *self._done)
            pipeline.xdel(self._stream, *self._done)
            pipeline.execute()
            self._done = []
