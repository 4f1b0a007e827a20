"""Forks of a process that talks to the service: each waits until no blocking client is inside gRPC.

gRPC survives a fork only when no thread is inside one of its calls at that moment. The child of any other fork crashes
or hangs at its first call. That holds for grpcio 1.66 and 1.85 alike, whose own fork handlers then log that they were
skipped. So a fork waits here until this process's blocking clients are outside. Waiting pulls are cancelled, which
their callers notice no more than a lost reply. Calls under way end, and new ones begin when the fork is done.

Invariants: between the last hook before a fork and the first one after it, no blocking client of the process is inside
gRPC. Where one was, the child knows it and refuses to talk. A fork is held up for at most `LONGEST_HOLD_S`. Nothing
that the child uses was locked by another thread at the fork.

GRPC_ENABLE_FORK_SUPPORT has to be unset for this. Set to 1, gRPC hangs the children of a process with busy threads in a
hook of its own, before any code of theirs runs.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

LONGEST_HOLD_S = 5.0
"""Longest time, in seconds, that a fork waits for calls that cannot be cancelled."""

T = TypeVar("T")

_DISABLED = frozenset({"0", "f", "false", "n", "no", "off"})


class UsedAfterFork(RuntimeError):
    """Error: something of another process was used, or the child was forked while gRPC could not survive it."""


class CallUnderWay:
    """Handle of one call under way; `cancel`, once it is set, ends the call from another thread."""

    __slots__ = ("cancel",)

    def __init__(self) -> None:
        self.cancel: Callable[[], object] | None = None


class Calls:
    """Register of this process's calls into gRPC, and imports, under way; `CALLS` is its only instance."""

    def __init__(self) -> None:
        self._asyncio_clients: weakref.WeakSet[object] = weakref.WeakSet()
        self._begin()

    def _begin(self, unusable: str = "") -> None:
        self._changed = threading.Condition()
        self._under_way: set[CallUnderWay] = set()
        self._forks = 0
        self._unusable = unusable

    @contextmanager
    def under_way(self) -> Iterator[CallUnderWay]:
        """Register a call for as long as the block lasts. Waits for a fork that has begun.

        Raises UsedAfterFork in a process whose fork gRPC did not survive.
        """
        call = CallUnderWay()
        with self._changed:
            if self._unusable:
                raise UsedAfterFork(self._unusable)
            self._changed.wait_for(lambda: self._forks == 0)
            self._under_way.add(call)
        try:
            yield call
        finally:
            with self._changed:
                self._under_way.discard(call)
                self._changed.notify_all()

    def messages(self, stream: Iterator[T]) -> Iterator[T]:
        """Yield the stream's messages.

        Each is waited for as a call of its own, so the consumer may be slow between them. A fork cancels a stream whose
        next message is being waited for.
        """
        while True:
            with self.under_way() as call:
                call.cancel = stream.cancel  # type: ignore[attr-defined]
                try:
                    message = next(stream)
                except StopIteration:
                    return
            yield message

    def note_asyncio(self, client: object) -> None:
        """Register an open asyncio client. It keeps threads inside gRPC, so no child forked meanwhile can use gRPC.

        Raises UsedAfterFork as `under_way` does.
        """
        if self._unusable:
            raise UsedAfterFork(self._unusable)
        self._asyncio_clients.add(client)

    def forget_asyncio(self, client: object) -> None:
        """Unregister an asyncio client that was closed."""
        self._asyncio_clients.discard(client)

    def before_fork(self) -> None:
        """Hold new calls back, cancel those that can be cancelled, and wait for those under way."""
        with self._changed:
            self._forks += 1
            for call in self._under_way:
                if call.cancel is not None:
                    call.cancel()
            self._changed.wait_for(lambda: not self._under_way, LONGEST_HOLD_S)

    def after_fork_in_parent(self) -> None:
        """Let calls go on after a fork."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def after_fork_in_child(self) -> None:
        """Reset the register in the child: no other thread of the parent exists there to release its locks."""
        self._begin(self._obstacle())

    def _obstacle(self) -> str:
        """Return the reason why gRPC cannot be used in a child forked now; empty when it can."""
        setting = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "")
        if self._unusable:
            return self._unusable
        if setting.lower() in _DISABLED:
            why = f"GRPC_ENABLE_FORK_SUPPORT={setting} is set"
        elif len(self._asyncio_clients):
            why = "its parent had an AsyncBufferClient, whose threads gRPC does not stop for a fork"
        elif self._under_way:
            why = f"its parent was still inside a call after {LONGEST_HOLD_S} s"
        else:
            return ""
        return f"process {os.getpid()} cannot talk to the service: {why}. Start it by 'spawn' or 'forkserver'."


class Holder:
    """Owner check: remembers the process that made something which no other process may use."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise UsedAfterFork in any process but the owner."""
        if not self.is_here:
            raise UsedAfterFork(
                f"{self._what} belongs to process {self._pid} and was used in its child {os.getpid()}: "
                "open one there, or pull there by a BufferDataset"
            )


CALLS = Calls()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=CALLS.before_fork,
        after_in_parent=CALLS.after_fork_in_parent,
        after_in_child=CALLS.after_fork_in_child,
    )
