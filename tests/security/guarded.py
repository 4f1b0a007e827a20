"""A service that asks for tokens, and its tokens."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from buffer_service.security.roles import Role
from buffer_service.security.token_file import changing
from buffer_service.security.tokens import TokenEntry, TokenSet, digest, new_token
from tests.support.service import ServiceProcess

RUNS = ("math-*", "exact")


@dataclass(frozen=True)
class Guarded:
    """A service that asks for tokens."""

    service: ServiceProcess
    tokens_file: Path

    def add(self, token_id: str, role: Role, *runs: str, expires: datetime | None = None) -> str:
        """A new token."""
        return add_token(self.tokens_file, token_id, role, *runs, expires=expires)

    def revoke(self, token_id: str) -> None:
        with changing(self.tokens_file) as held:
            held[0] = TokenSet(entry for entry in held[0].entries if entry.token_id != token_id)


def add_token(path: Path, token_id: str, role: Role, *runs: str, expires: datetime | None = None) -> str:
    token = new_token(token_id)
    with changing(path) as held:
        entry = TokenEntry(token_id, role, runs or RUNS, digest(token), expires)
        held[0] = TokenSet((*held[0].entries, entry))
    return token
