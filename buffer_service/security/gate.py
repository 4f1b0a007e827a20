"""Gate that every call passes: whose token it carries, and what that token allows.

Invariants: with no tokens file everybody may do everything. With one, nothing is allowed but by an entry that is in the
file and has not expired. A stream that lasts asks `check_live` with every message, so that a revoked token ends it.
"""

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Protocol

import structlog

from buffer_service.security.rate import RateLimit
from buffer_service.security.roles import Rule
from buffer_service.security.token_file import TokenFile
from buffer_service.security.tokens import TokenEntry
from buffer_wire.errors import PermissionDenied, Unauthenticated

log = structlog.get_logger(__name__)

_BEARER = "bearer "

BURST = 10
PER_S = 1.0
"""Refused authentications of one address that are told why and written to the log: at once, and a second.

A secret of 256 bits needs no lock-out, and a lock-out would shut out good tokens that come from the same address. What
is bounded is what a peer that keeps failing costs: lines in the log, and messages that are made for it.
"""


class Caller(Protocol):
    """Caller of an RPC or request."""

    @property
    def token_id(self) -> str:
        """Id of the caller's token; empty where none is asked for."""
        ...

    def check_run(self, run_id: str) -> None:
        """Check that the caller may use the run. Raises PermissionDenied."""
        ...

    def check_live(self) -> None:
        """Check that the caller's token is still good. Raises Unauthenticated."""
        ...

    def visible(self, run_ids: Iterable[str]) -> list[str]:
        """Return those of the runs that the caller may know of."""
        ...


class Anybody:
    """A caller of a service that asks for no token."""

    token_id = ""

    def check_run(self, run_id: str) -> None:
        """Allow every run."""

    def check_live(self) -> None:
        """Allow: there is no token that could end."""

    def visible(self, run_ids: Iterable[str]) -> list[str]:
        """Return all of the runs."""
        return list(run_ids)


class TokenCaller:
    """A caller with a token that was good when the call began."""

    __slots__ = ("entry", "gate", "method")

    def __init__(self, entry: TokenEntry, method: str, gate: "Gate") -> None:
        self.entry = entry
        self.method = method
        self.gate = gate

    @property
    def token_id(self) -> str:
        """Id of the caller's token."""
        return self.entry.token_id

    def check_run(self, run_id: str) -> None:
        """Raises PermissionDenied, the same whether there is such a run or not."""
        if not self.entry.covers(run_id):
            raise PermissionDenied(
                self.method, self.entry.token_id, self.entry.role.value, f"do anything to run {run_id[:64]!r}"
            )

    def check_live(self) -> None:
        """Raises Unauthenticated when the token has expired, or was revoked or changed since."""
        self.gate.check_live(self.entry)

    def visible(self, run_ids: Iterable[str]) -> list[str]:
        """Return those of the runs that the token covers."""
        return [run_id for run_id in run_ids if self.entry.covers(run_id)]


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Caller of the RPC or request that is being served. It has no default: a call that nobody has let in fails."""


def caller() -> Caller:
    """Return the caller of the present RPC or request."""
    return CALLER.get()


class Gate:
    """Lets callers in. `file` None: everybody."""

    def __init__(self, file: TokenFile | None, wall_clock: Callable[[], float] = time.time) -> None:
        self.file = file
        self._wall_clock = wall_clock
        self._failures = RateLimit(PER_S, BURST)
        self._anybody = Anybody()

    @property
    def asks(self) -> bool:
        """True when callers need a token."""
        return self.file is not None

    def enter(self, authorization: str | None, method: str, rule: Rule | None) -> Caller:
        """The caller behind an authorization header. Raises Unauthenticated, PermissionDenied.

        `method` is for messages; `rule` None: nobody may.
        """
        if self.file is None:
            return self._anybody
        entry = self._entry(self.file, authorization)
        if rule is None or entry.role not in rule.roles:
            raise PermissionDenied(method, entry.token_id, entry.role.value, f"call {method.rpartition('/')[2]}")
        return TokenCaller(entry, method, self)

    def check_live(self, entry: TokenEntry) -> None:
        """Check again the entry of a caller that was let in; without a token file, nothing is checked.

        Raises Unauthenticated when the file no longer has the entry, or has it changed, or when it has expired.
        """
        if self.file is None:
            return
        tokens = self.file.look()
        known = tokens.by_id(entry.token_id)
        if known is not entry and known != entry:
            raise Unauthenticated(f"token {entry.token_id!r} was revoked")
        self._check_time(entry)

    def failed(self, peer: str, method: str, error: Unauthenticated) -> bool:
        """Note that a call of `peer` (an address without port) was refused; False when it has had too many of them."""
        allowed = self._failures.allows(peer)
        if allowed:
            log.warning("not authenticated", peer=peer, method=method, why=error.attributes.get("why", ""))
        return allowed

    def _entry(self, file: TokenFile, authorization: str | None) -> TokenEntry:
        if authorization is None:
            raise Unauthenticated("the service asks for a token and the call has none (RB_TOKEN_FILE, --token-file)")
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the authorization is not 'Bearer TOKEN'")
        token = authorization[len(_BEARER) :].strip()
        # A token that is not known may have been made just now.
        entry = file.look().find(token) or file.look(at_once=True).find(token)
        if entry is None:
            raise Unauthenticated("the token is not known to the service")
        self._check_time(entry)
        return entry

    def _check_time(self, entry: TokenEntry) -> None:
        if entry.expired(self._wall_clock()):
            raise Unauthenticated(f"token {entry.token_id!r} has expired")
