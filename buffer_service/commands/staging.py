"""Staging of payloads that lie on servers of their own, and what a push leaves to nobody there."""

from collections.abc import Sequence
from typing import Any, cast

from buffer_service.commands.replies import pack, unpack
from buffer_service.domain.command import Command, Fields
from buffer_service.domain.ops import Buffer

LEFT_ALONE, STAGED_BEFORE = b"02"

_STAYS = frozenset({b"queued", b"recorded", b"added", b"blocked", b"rejected_full", b"payload_missing", b"more"})
"""Outcomes after which a payload that its pusher wrote belongs to its group, waits, or was not there."""


def stage(command: Command[Any]) -> Command[bytes]:
    """Stage a command's payloads. A mark for each that its pusher has written: LEFT_ALONE where it is not to be taken
    over, STAGED_BEFORE where it was staged already.
    """
    keys = [key for key, _ in command.payloads]
    arguments = pack(keys, [(written.key, written.task_id) for written in command.written])
    return Command(command.run_id, "stage", arguments, _marks, acknowledges=False)


def unneeded(command: Command[Any], reply: Buffer) -> list[str]:
    """Keys of written payloads that a push has put on trash."""
    tag, *fields = unpack(reply)
    if tag != b"pushed":
        return []
    outcomes = fields[-1]
    return [
        written.key
        for written in command.written
        if isinstance(outcomes[written.place], list) or outcomes[written.place] not in _STAYS
    ]


def audit(run_id: str, payloads: Sequence[tuple[str, str, int]]) -> Command[int]:
    """Put payloads on trash that nothing names; returns how many. Each comes with the task that it is of, and 1 where
    its first part is gone.
    """
    return Command(run_id, "audit", pack(payloads), _found, acknowledges=False)


def _marks(_tag: str, fields: Fields) -> bytes:
    return cast("bytes", fields[0])


def _found(_tag: str, fields: Fields) -> int:
    return cast("int", fields[0])
