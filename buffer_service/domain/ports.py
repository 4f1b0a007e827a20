"""Port to the store for the RPC and admin sides; `buffer_service.store` implements it.

Every method is one try: none waits for the state to change, and none sleeps. A method that mutates takes
`seen_revision`, the highest revision its caller has seen, and raises StoreRolledBack when the store is behind it.
Errors are those of `buffer_wire.errors`; each method's docstring names its own, and all may raise UnknownRun and
StoreFault.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from buffer_service.domain import ops
from buffer_service.domain.command import Command
from buffer_service.domain.inspection import Waits
from buffer_service.domain.policy import RunPolicy
from buffer_wire.revision import NO_REVISION, Revision

T = TypeVar("T")


class Topic(StrEnum):
    """Topic of a wait. A notification is a hint: check, wait, check again."""

    GROUPS = "groups"
    """Groups were queued (pulls wait for it)."""
    TASKS = "tasks"
    """Tasks became pending or capacity was freed (leases wait for it)."""
    SPACE = "space"
    """Groups left the queue (blocked pushes wait for it)."""
    WEIGHTS = "weights"
    """Weights were published or planned, the run was paused or resumed, or an engine may load."""
    STAGES = "stages"
    """Groups began to wait in a stage (leases of groups wait for it)."""
    EVALUATIONS = "evaluations"
    """Tasks of evaluations became pending (leases of them wait for it)."""
    RESULTS = "results"
    """Tasks of evaluations ended (readers wait for it)."""


class UsersRefused(Exception):
    """The store lets the service make no users; the message says why."""


class Notifications(Protocol):
    """Hints that the state of a run changed."""

    async def wait(self, run_id: str, topic: Topic, seen: int, timeout_s: float) -> int:
        """Wait until the ticket of (run, topic) exceeds `seen`, or the timeout passes; returns the present ticket.

        Take a ticket with `ticket` BEFORE checking the state, check, and then wait with it: no change is missed.
        """
        ...

    def ticket(self, run_id: str, topic: Topic) -> int:
        """The present ticket of (run, topic)."""
        ...

    def lacks(self, run_id: str, groups: int) -> None:
        """Note that a pull waits for so many more queued groups. It gets its hint once as many are on their way to the
        store from here, so that its next look comes right behind them.
        """
        ...


class RunStore(Protocol):
    """Runs, tasks, groups, batches and weights, kept by the rules."""

    async def call(self, command: Command[T]) -> T:
        """Carry out a command; one that mutates takes `seen_revision`. Raises what the command's docstring names."""
        ...

    @property
    def notifications(self) -> Notifications:
        """Hints of changes on this store."""
        ...

    async def create_run(
        self, run_id: str, policy: RunPolicy, *, revision: int = 1, secret: str = ""
    ) -> tuple[ops.RunView, bool]:
        """Create a run, or return the existing one when its policy is the same. Raises RunExists, NotReady (it is being
        deleted).

        A new run's revision begins at `revision`. It must be beyond that of any earlier run of the same name, which its
        callers may remember as seen. `secret` is that of the proofs of its revisions; empty: one is drawn.
        """
        ...

    async def list_runs(self) -> Sequence[str]:
        """Ids of all runs, sorted."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Delete the run with all its keys. From the first moment on nobody finds it any more; after a crash any
        replica's sweep goes on.
        """
        ...

    async def records(self, run_id: str, after: str, limit: int) -> Sequence[ops.Record]:
        """Events of the run's recording after an event id ("" for the first that is kept), at most `limit`."""
        ...

    async def lease(self, run_id: str, ask: ops.LeaseAsk, *, seen_revision: Revision = NO_REVISION) -> ops.Leased:
        """Lease tasks; an empty grant list comes with the reason."""
        ...

    async def push(
        self, run_id: str, groups: Sequence[ops.NewGroup], *, seen_revision: Revision = NO_REVISION
    ) -> ops.PushResult:
        """Store payloads and index them. A BLOCKED group stands in the run's line, and so does every later one of the
        call that would need room. Raises RunPaused, StoreOutOfMemory.
        """
        ...

    async def retry_push(self, run_id: str, groups: Sequence[tuple[ops.GroupFacts, str]]) -> ops.PushResult:
        """Try blocked groups again by their payload keys; extends their leases while they stay blocked."""
        ...

    async def fetch(self, run_id: str, payload_keys: Sequence[str]) -> Sequence[ops.Buffer | None]:
        """Stored bodies, None where one is gone."""
        ...

    async def read_payload(self, key: str, first: int, size: int) -> bytes:
        """Bytes [first, first + size) of a stored body, as far as it goes; empty when it is gone."""
        ...

    async def write_part(self, part_key: str, body: ops.Buffer) -> bool:
        """Write a part of a payload that a push is to name; it expires. False where there is one of that key."""
        ...

    async def read_part(self, part_key: str) -> ops.Buffer | None:
        """A part of a payload; None where it is gone."""
        ...

    async def payload_place(self, *, anew: bool = False) -> ops.StorePlace:
        """Place of the payloads: where the service reaches them at present. `anew`: ask a cluster first."""
        ...

    async def payload_user(self, run_id: str, direction: ops.Direction, noted: ops.NotedClient) -> ops.StoreUser:
        """A user of the store for the payloads of a run. Raises UsersRefused where the store lets the service make
        none.
        """
        ...

    async def waits(self, run_id: str, limit: int) -> Waits:
        """Waits of the run: who waits on whom."""
        ...

    async def facts(self) -> ops.StoreFacts:
        """Facts that the store's server gives of itself."""
        ...

    async def sweep(self) -> int:
        """Tidy up every run; returns how many things were done.

        Leases expire, trash and stale staging are deleted, engines and idle workers are forgotten that were silent for
        an hour.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
