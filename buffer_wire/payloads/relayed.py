"""Payloads in parts by way of the service, for clients that cannot reach the store: WritePayload and ReadPayload.

At most one part is in memory beside the payload itself.
"""

from collections.abc import Iterator

from buffer_wire.codec import join_written_part, split_read_part
from buffer_wire.errors import NotReady
from buffer_wire.payloads.keys import is_key_of, is_of, size_of
from buffer_wire.payloads.parts import NewPayload
from buffer_wire.resp.blocking import memory_of
from rollout_buffer.v1 import common_pb2

WRITE_METHOD = "/rollout_buffer.v1.PayloadService/WritePayload"
READ_METHOD = "/rollout_buffer.v1.PayloadService/ReadPayload"


def written_messages(run: common_pb2.RunRef, new: NewPayload) -> Iterator[bytes]:
    """The serialized messages of WritePayload, each made when it is asked for."""
    named: common_pb2.RunRef | None = run
    for _, body in new.cut():
        yield join_written_part(named, new.key if named is not None else "", body)
        named = None


class ReadParts:
    """A payload that is put together of the messages of ReadPayload."""

    def __init__(self, run_id: str, key: str) -> None:
        """Raises NotReady for what is no key of the run's."""
        if not is_key_of(run_id, key):
            raise NotReady(f"{key!r:.200} is not the key of a payload of run {run_id}; pull again")
        self._key = key
        self._whole = memory_of(size_of(key))
        self._filled = 0

    def add(self, message: bytes) -> None:
        """Take the next message. Raises MalformedMessage, and NotReady for more than the key says."""
        part = split_read_part(message)
        if self._filled + len(part) > len(self._whole):
            raise NotReady(f"{self._key} has more than {len(self._whole)} bytes; pull again")
        self._whole[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def body(self) -> memoryview:
        """The payload, after the stream's regular end. Raises NotReady if it is not what the key says; the service
        settles what is wrong with the next pull.
        """
        if not is_of(self._key, self._whole[: self._filled]):
            raise NotReady(f"{self._key} came with {self._filled} bytes, or fails its checksum; pull again")
        return self._whole.toreadonly()
