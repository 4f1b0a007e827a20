"""Commands on a run as a whole, and those that tidy it up."""

from buffer_service.commands.replies import just_revision, nothing, pack, text
from buffer_service.commands.run_view import RELAYING_MS, as_policy, unpack_view
from buffer_service.domain import ops
from buffer_service.domain.command import Command, Fields
from buffer_service.domain.policy import RunPolicy
from buffer_wire.revision import NO_REVISION, Revision

RELAYING_KEPT = 64
"""Largest number of clients of a run of which it is kept why they relay: those that were heard last."""


def create_run(run_id: str, policy: RunPolicy, revision: int, secret: str) -> Command[tuple[bool, list[str]]]:
    """Create a run: whether it is new, and in which fields of the policy one that was there differs.

    A store's `create_run` keeps the list of runs too. Raises NotReady (it is being deleted).
    """

    def created(tag: str, fields: Fields) -> tuple[bool, list[str]]:
        if tag == "created":
            return True, []
        existing = as_policy(fields[0]).to_store()
        return False, sorted(name for name, value in policy.to_store().items() if existing[name] != value)

    return Command(run_id, "create_run", pack(policy.to_store(), revision, secret), created)


def view(run_id: str) -> Command[ops.RunView]:
    """The whole state of a run, taken at one moment."""
    return Command(
        run_id, "view", pack(), lambda _, fields: unpack_view(run_id, fields), reads=True, acknowledges=False
    )


def update_policy(
    run_id: str,
    policy: RunPolicy,
    expected: RunPolicy | None = None,
    *,
    seen_revision: Revision = NO_REVISION,
) -> Command[Revision]:
    """Replace the policy; returns the revision. Raises PolicyChanged when it is another than `expected`, which None
    does not ask; InvalidPolicy for a measure that cannot change now.
    """
    arguments = pack(seen_revision, policy.to_store(), expected and expected.to_store())
    return Command(run_id, "update_policy", arguments, just_revision)


def pause_run(run_id: str) -> Command[Revision]:
    """Hold the run: no leases, no submits, no new batches; returns the revision."""
    return Command(run_id, "control_run", pack("pause"), just_revision)


def drain_run(run_id: str) -> Command[Revision]:
    """Let the run end: no leases, no submits; what is queued and leased is still trained. Returns the revision."""
    return Command(run_id, "control_run", pack("drain"), just_revision)


def continue_run(run_id: str) -> Command[Revision]:
    """Undo pause_run and drain_run; returns the revision."""
    return Command(run_id, "control_run", pack("continue"), just_revision)


def delete_portion(run_id: str, *, begin: bool) -> Command[bool]:
    """Begin to delete a run, or go on; True while something is left, whose trash is to be deleted in between."""
    arguments = pack(int(begin))
    return Command(run_id, "delete_run", arguments, lambda tag, _: tag == "more", acknowledges=False)


def free(run_id: str) -> Command[None]:
    """Go on freeing what a commit or checkpoint released, in portions that do not hold up the store."""
    return Command(run_id, "free", pack(), nothing, acknowledges=False)


def note_client(run_id: str, direction: ops.Direction, client_id: str, why: str) -> Command[ops.NotedClient]:
    """Note that a client asked for access to the store, and why it relays nevertheless; `why` empty: it does not."""
    arguments = pack(f"{direction.value} {client_id}", why, RELAYING_KEPT, RELAYING_MS)
    return Command(run_id, "note_client", arguments, _noted, acknowledges=False)


def _noted(_tag: str, fields: Fields) -> ops.NotedClient:
    former, secret, now_ms = fields
    return ops.NotedClient(text(former), text(secret), now_ms)


def sweep_portion(run_id: str, staging_age_ms: int) -> Command[tuple[int, int]]:
    """Expire leases and other things whose time is over: how many things were done, and whether to go on."""
    return Command(run_id, "sweep", pack(staging_age_ms), _swept, acknowledges=False)


def _swept(_tag: str, fields: Fields) -> tuple[int, int]:
    swept, more = fields
    return swept, more
