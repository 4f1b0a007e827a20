"""Pushing of groups without a lease, one at a time, from a process that is no worker.

Invariants: a push is repeated, byte for byte, until it is answered. So a lost answer or a restarting service neither
loses nor doubles a group. It carries the run's revision from before its first try, so this holds even when its step was
checkpointed meanwhile. A group that waits for room keeps its place in line and is not sent anew. A wait on a service
that does not answer is logged.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from buffer_wire.codec import join_group, join_push
from buffer_wire.connection.channels import Connector
from buffer_wire.connection.retry import Retry
from buffer_wire.errors import NotReady
from buffer_wire.revision import Revision
from buffer_wire.status import from_detail
from rollout_buffer.v1 import groups_pb2 as pb
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import Deadline, worth_repeating
from trainer_client.waiting import WaitNotices

PATIENCE_S = 86_400.0
"""Longest wait, in seconds, for room in the queue: a full queue is how the trainer holds the engines back. The
connection's keepalive detects a dead service."""
_UNPUBLISHED = "samples.spans.version"
"""Field that the service names for an unpublished version. Miles' engines may have weights before its program publishes
them."""


class Withdrawal:
    """Withdrawal of a push, requested by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None
        self._asked = False

    @property
    def asked(self) -> bool:
        """True once the push was withdrawn by `ask`."""
        return self._asked

    def ask(self) -> None:
        """End the call that is under way, and begin no other."""
        with self._lock:
            self._asked = True
            if self._cancel is not None:
                self._cancel()

    @contextmanager
    def ends(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Register `cancel`, which ends the call that the block waits for."""
        with self._lock:
            self._cancel = cancel
            if self._asked:
                cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None


class GroupPusher:
    """Pusher of groups to one run, over a connection of its own."""

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

    def push(self, header: pb.GroupHeader, payload: bytes, withdrawal: Withdrawal) -> str:
        """Push until there is an answer: "queued", "duplicate", "closed" or "filtered".

        A group that is there already is "queued" if an attempt went without an answer: that attempt may have put it
        there. Raises the service's error for a group that it does not take. A withdrawn push raises the error of its
        last attempt.
        """
        deadline = Deadline.after(PATIENCE_S)
        # An engine's process may push before it has heard anything of the run.
        header.first_revision = self._client.revisions.seen(self._run_id) or self._client.run(self._run_id).revision
        reply, attempts = self._repeat(header, payload, withdrawal, deadline)
        if attempts == 1 and _is_forgotten(reply.acks[0]):
            # No try went without an answer: it was never accepted, whatever has been forgotten meanwhile.
            header.first_revision = reply.revision
            reply, attempts = self._repeat(header, payload, withdrawal, deadline)
        ack = reply.acks[0]
        if ack.HasField("error"):
            raise from_detail(ack.error)
        outcome = pb.PushOutcome.Name(ack.outcome).removeprefix("PUSH_OUTCOME_").lower()
        return "queued" if outcome == "duplicate" and attempts > 1 else outcome

    def _repeat(
        self, header: pb.GroupHeader, payload: bytes, withdrawal: Withdrawal, deadline: Deadline
    ) -> tuple[pb.PushGroupsResponse, int]:
        """Repeat the push; return the answer and the number of attempts."""
        body = join_group(header, payload)
        attempts = 0

        def attempt() -> pb.PushGroupsResponse:
            nonlocal attempts
            attempts += 1
            request = join_push(self._client.revisions.ref(self._run_id), 1, [body])
            stream = self._push(iter([request]), timeout=deadline.left_s())
            with withdrawal.ends(stream.cancel):
                reply: pb.PushGroupsResponse = next(iter(stream))
            if reply.acks[0].error.attributes.get("field") == _UNPUBLISHED:
                raise NotReady("the weights that made the group are not published yet (publish_weights)")
            return reply

        retry = Retry(
            deadline_s=deadline.left_s(),
            waiting_on=f"room in the queue of run {self._run_id!r}, which the trainer's pulls make",
            retry_on=lambda error: worth_repeating(error) and not withdrawal.asked,
            on_retry=WaitNotices(f"pushing group {header.task_id!r}", self._client.target, None).on_retry,
            tokens=self._tokens,
            mend=partial(self._client.revisions.met, self._run_id),
        )
        reply = retry.blocking(attempt)
        self._client.revisions.note(self._run_id, Revision.of(reply))
        return reply, attempts

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _is_forgotten(ack: pb.PushAck) -> bool:
    """True when the service cannot tell this push from a repeat of one that it has forgotten."""
    return dict(ack.error.attributes).get("field") == "first_revision"
