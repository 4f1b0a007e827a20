"""Pushes groups without a lease, one at a time, from a process that is no worker.

Invariant: a push is repeated, byte for byte, until it is answered, so a lost answer or a restarting service neither
loses nor doubles a group.
"""

import threading

from buffer_wire.codec import join_group, join_push
from buffer_wire.connect import Connector
from buffer_wire.retry import retry_sync
from buffer_wire.status import from_detail
from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.client import BufferClient
from trainer_client.driver import worth_repeating

ATTEMPT_S = 5.0
"""Longest wait for one answer; a full queue is met by asking again."""

PATIENCE_S = 86_400.0
"""A queue that stays full is waited for: it is how the trainer holds the engines back."""


class GroupPusher:
    """Pushes to one run over a connection of its own."""

    def __init__(self, client: BufferClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        connector = Connector(client.target, client.options, client.options.channel_options())
        self._tokens = connector.tokens
        self._channel = connector.blocking()
        self._push = self._channel.stream_stream(
            "/rollout_buffer.v1.GroupService/PushGroups",
            # Built by buffer_wire.codec: bytes already.
            request_serializer=None,
            response_deserializer=pb.PushGroupsResponse.FromString,
        )

    def push(self, header: pb.GroupHeader, payload: bytes, stop: threading.Event) -> str:
        """Push until there is an answer: "queued", "duplicate", "closed" or "filtered".

        Raises what the service says of a group that it does not take, and, once `stop` is set, the error that the last
        attempt met.
        """
        body = join_group(header, payload)

        def attempt() -> pb.PushGroupsResponse:
            request = join_push(self._client.revisions.ref(self._run_id), 1, [body])
            stream = self._push(iter([request]), timeout=ATTEMPT_S)
            reply: pb.PushGroupsResponse = next(iter(stream))
            return reply

        reply = retry_sync(
            attempt,
            deadline_s=PATIENCE_S,
            waiting_on=f"room in the queue of run {self._run_id!r}, which the trainer's pulls make",
            retry_on=lambda error: worth_repeating(error) and not stop.is_set(),
            tokens=self._tokens,
        )
        self._client.revisions.note(self._run_id, reply.revision)
        ack = reply.acks[0]
        if ack.HasField("error"):
            raise from_detail(ack.error)
        return pb.PushOutcome.Name(ack.outcome).removeprefix("PUSH_OUTCOME_").lower()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
