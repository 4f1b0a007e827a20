"""Stage: a worker of a stage, which leases groups, calls a function with each, and pushes what it adds.

    with Stage("127.0.0.1:50051", "math", "reference") as stage:
        stage.serve(lambda group: {"reference_logprobs": [score(model, sample) for sample in group.samples]})

Invariants: columns are pushed under the lease that is held, so those of a lost lease are refused. Leases that end
without columns are handed back at once, those of a process that dies when they expire.
"""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self, TypeAlias

from buffer_wire.errors import InvalidField, NotReady, RolloutBufferError
from rollout_buffer.v1 import groups_pb2, stages_pb2
from trainer_client.batch import REWARDS, Group
from trainer_client.client.driver import ClientOptions
from trainer_client.stages.client import StageClient
from trainer_client.stages.columns import Added, Arrays

log = logging.getLogger(__name__)

Make: TypeAlias = Callable[[Group], Added | Mapping[str, Arrays]]
"""Function of a group: what it adds; of a mapping, columns per token."""

_TAKEN = (
    groups_pb2.PUSH_OUTCOME_ADDED,
    groups_pb2.PUSH_OUTCOME_FILTERED,
    groups_pb2.PUSH_OUTCOME_DUPLICATE,
)


class Stage:
    """Worker of a stage of a run at the service at `target`. Close it, or use it in a `with`.

    `groups`: groups that it leases at once; more than one are held while one is worked on. `worker_id`: name of this
    worker, by which a new process takes back what the old one held; by default of this process.
    """

    def __init__(
        self,
        target: str,
        run_id: str,
        name: str,
        *,
        groups: int = 2,
        worker_id: str = "",
        options: ClientOptions | None = None,
    ) -> None:
        self.name = name
        self.added = 0
        """Groups that it has added columns to, filtered ones included."""
        self._groups = groups
        self._client = StageClient(target, run_id, name, worker_id or _own_name(name), options)
        self._held: deque[str] = deque()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._ttl_s = 3.0
        self._paused = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Have `serve` return after the group that it works on; may be called by any thread, or a signal's handler."""
        self._stopped.set()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def serve(self, make: Make, *, most: int | None = None) -> int:
        """Work on groups until `stop`, or until it has added to `most`; returns how many that were.

        `make` is called with one group after the other, in this thread. What it raises is raised here, after its group
        was handed back as failed: with the policy's max_attempts of these the group is discarded. KeyboardInterrupt and
        SystemExit are no failures of a group. A run that is paused, or a service that is away, is waited for.

        Raises InvalidField for a stage that the run's policy does not name.
        """
        policy = self._client.run(self._client.run_id).policy
        if self.name not in policy.stages:
            raise InvalidField("stage", self.name, f"one of the run's stages: {', '.join(policy.stages) or 'none'}")
        before = self.added
        ended = threading.Event()
        beats = threading.Thread(target=self._extend, args=(ended,), name=f"stage-{self.name}", daemon=True)
        beats.start()
        try:
            while not self._stopped.is_set() and (most is None or self.added - before < most):
                self._work_on_some(
                    make, self._groups if most is None else min(self._groups, most - self.added + before)
                )
        finally:
            ended.set()
            self._give_back_rest()
            beats.join()
        return self.added - before

    def _work_on_some(self, make: Make, count: int) -> None:
        reply = self._client.lease_groups(count)
        self._ttl_s = reply.ttl_ms / 1000
        if reply.paused != self._paused:
            self._paused = reply.paused
            log.info(
                "stage %s: run %s %s",
                self.name,
                self._client.run_id,
                f"is paused: {self._paused}; waits" if self._paused else "goes on",
            )
        with self._lock:
            self._held.extend(lease.lease_id for lease in reply.leases)
        for lease in reply.leases:
            if self._stopped.is_set():
                return
            if self._is_held(lease.lease_id):
                self._work_on(make, lease, reply.published.version)

    def _work_on(self, make: Make, lease: stages_pb2.StageLease, published: int) -> None:
        try:
            group = self._client.read(lease, published)
        except NotReady as error:
            if self._client.extend([lease.lease_id], self._ttl_s)[0]:
                # The store has lost it: with the last attempt it is discarded.
                self._fail(lease.lease_id, f"its payload cannot be read: {error}")
            else:
                log.info("lease %s: its group was dropped meanwhile", lease.lease_id)
                self._drop(lease.lease_id)
            return
        try:
            made = make(group)
            added = made if isinstance(made, Added) else Added(tokens=made)
            header, payload = added.to_wire(
                group, lease.lease_id, self._client.worker_id, writes_rewards=self.name == REWARDS
            )
        except Exception as error:
            self._fail(lease.lease_id, repr(error))
            raise
        ack = self._client.push(header, payload)
        self._drop(lease.lease_id)
        if ack.outcome in _TAKEN:
            self.added += 1
        elif ack.outcome == groups_pb2.PUSH_OUTCOME_INVALID and ack.error.reason == "invalid_field":
            raise RolloutBufferError(ack.error.message, reason=ack.error.reason)
        else:
            log.info(
                "group %s: its lease was lost, or it was dropped; what was made for it is not needed", ack.group_id
            )

    def _is_held(self, lease_id: str) -> bool:
        with self._lock:
            return lease_id in self._held

    def _drop(self, lease_id: str) -> None:
        with self._lock, suppress(ValueError):
            self._held.remove(lease_id)

    def _fail(self, lease_id: str, error: str) -> None:
        self._drop(lease_id)
        log.warning("stage %s: lease %s failed: %s", self.name, lease_id, error)
        with suppress(RolloutBufferError):
            self._client.give_back([lease_id], error)

    def _give_back_rest(self) -> None:
        with self._lock:
            rest = list(self._held)
            self._held.clear()
        if rest:
            with suppress(RolloutBufferError):
                self._client.give_back(rest)

    def _extend(self, ended: threading.Event) -> None:
        """Prolong what is held at a third of its lifetime; what is lost is worked on no more."""
        while not ended.wait(self._ttl_s / 3):
            with self._lock:
                held = list(self._held)
            if not held:
                continue
            with suppress(RolloutBufferError):
                live = self._client.extend(held, self._ttl_s / 3)
                for lease_id, is_live in zip(held, live, strict=True):
                    if not is_live:
                        self._drop(lease_id)


def _own_name(stage: str) -> str:
    """Name of this process's worker."""
    host = "".join(one if one.isalnum() or one in "._-" else "-" for one in socket.gethostname())
    return f"{stage}-{host[:64]}-{os.getpid()}"
