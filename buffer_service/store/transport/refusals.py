"""Error replies of the store's server as errors of the contract."""

import re
from collections.abc import Sequence
from typing import Any

from buffer_service.store.keys import SCHEMA_VERSION
from buffer_wire.errors import (
    LayoutChanged,
    RolloutBufferError,
    StoreFault,
    StoreOutOfDisk,
    StoreOutOfMemory,
    StoreUnavailable,
    StoreUnsuitable,
)
from buffer_wire.resp.errors import ReplyError

_ELSEWHERE = frozenset({"READONLY", "MASTERDOWN"})
"""Codes of a server that has become a replica."""

_UNAVAILABLE = frozenset({"LOADING", "BUSY", "NOREPLICAS", "UNBLOCKED"}) | _ELSEWHERE
"""Codes of a server that may do the same later."""

_MOVED = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN"})
"""Codes of a node of a cluster that does not serve what it was asked for."""
_TORN = "non local key"
"""Words of a node under whose script a slot moved key by key."""

_LAYOUT = re.compile(r"rb-layout (\w+)")
"""Pattern of the scripts' refusal of a run in another layout (lua/lib/runs/run.lua)."""


class NotRun(Exception):
    """A node of a cluster was not reached, or refused, so that nothing ran: it may be asked of another one."""

    def __init__(self, failure: StoreUnavailable, reply: ReplyError | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.reply = reply


class Refusals:
    """The errors that replies of one store stand for."""

    def __init__(self, store: str, *, embedded: bool) -> None:
        self.store = store
        self._embedded = embedded

    def checked(self, reply: Any) -> Any:  # noqa: ANN401 - replies are of any type
        """The reply. Raises the error that an error reply stands for."""
        if isinstance(reply, ReplyError):
            raise self.fault(reply) from reply
        return reply

    def fault(self, reply: ReplyError) -> RolloutBufferError:
        """The error that an error reply stands for."""
        message = str(reply)
        if reply.code == "OOM" or "OOM command not allowed" in message:
            return StoreOutOfMemory(self.store)
        # A transaction that is discarded quotes it.
        if "MISCONF" in message or (self._embedded and "NOREPLICAS" in message):
            return StoreOutOfDisk(self.store, message if "MISCONF" in message else "it is full but for a reserve")
        if _code(reply) in _UNAVAILABLE:
            return StoreUnavailable(self.store, message)
        if layout := _LAYOUT.search(message):
            return LayoutChanged(layout[1], str(SCHEMA_VERSION))
        if reply.code in {"NOAUTH", "WRONGPASS", "NOPERM"}:
            return StoreUnsuitable(self.store, message)
        return StoreFault(f"the store at {self.store} answered: {message}", store=self.store)


def unrun(replies: Sequence[Any]) -> ReplyError | None:
    """The refusal by which nothing of a request ran (a transaction is refused when its commands are), or None."""
    if isinstance(replies[-1], ReplyError):
        for reply in replies:
            if isinstance(reply, ReplyError) and _code(reply) in {"LOADING", *_ELSEWHERE}:
                return reply
    return None


def is_moved(reply: ReplyError) -> bool:
    """True for a node of a cluster that ran nothing, as another one serves the slot, or nobody does."""
    return reply.code in _MOVED


def is_torn(reply: ReplyError) -> bool:
    """True for a script that ended in the middle, perhaps after it had written."""
    return _TORN in str(reply)


def is_elsewhere(refusal: ReplyError) -> bool:
    """True when the server that refuses has become a replica."""
    return _code(refusal) in _ELSEWHERE


def _code(reply: ReplyError) -> str:
    # Before version 7 a script quotes the error of its command.
    return "READONLY" if "-READONLY " in str(reply) else reply.code
