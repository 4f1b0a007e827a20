"""Actions of the `rollout-buffer token` commands."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buffer_cli.exits import EXIT_OPTIONS, EXIT_REFUSED
from buffer_service.security.roles import Role
from buffer_service.security.token_file import TokenFile, changing
from buffer_service.security.tokens import TokenEntry, TokenSet, TokensRefused, digest, new_token


def create(
    path: Path, role: str, runs: Sequence[str], *, token_id: str | None, days: float | None, to: Path | None
) -> int:
    """Add a token and print it, or write it to `to`; returns the exit code."""
    if role not in list(Role):
        sys.stderr.write(f"error: --role is {role!r}; it must be one of {', '.join(Role)}\n")
        return EXIT_OPTIONS
    if days is not None and not 0 < days < 100_000:
        sys.stderr.write(f"error: --days is {days}; it must be above 0 and below 100,000\n")
        return EXIT_OPTIONS
    expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    name = token_id or secrets.token_hex(6)
    token = new_token(name)

    def command() -> None:
        entry = TokenEntry(name, Role(role), tuple(runs), digest(token), expires)
        with changing(path) as held:
            held[0] = TokenSet((*held[0].entries, entry))
            if to is not None:
                _hand_over(to, token)
        sys.stderr.write(f"token {name} ({role}, runs {', '.join(runs)}) is in {path}\n")
        if to is None:
            print(token)

    return _exit_code(command)


def list_tokens(path: Path, *, as_json: bool) -> int:
    """Print the entries; returns the exit code."""

    def command() -> None:
        entries = TokenFile(path).tokens.entries
        if as_json:
            shown = [
                {
                    "id": entry.token_id,
                    "role": entry.role.value,
                    "runs": entry.runs,
                    "expires": _end(entry) or None,
                    "expired": entry.expired(datetime.now(UTC).timestamp()),
                }
                for entry in entries
            ]
            print(json.dumps(shown, indent=2))
            return
        table = Table("id", "role", "runs", "expires")
        for entry in entries:
            over = " (over)" if entry.expired(datetime.now(UTC).timestamp()) else ""
            table.add_row(entry.token_id, entry.role.value, ", ".join(entry.runs), (_end(entry) or "never") + over)
        Console(highlight=False).print(table)

    return _exit_code(command)


def revoke(path: Path, token_id: str) -> int:
    """Take an entry out; returns the exit code."""

    def command() -> None:
        with changing(path) as held:
            if held[0].by_id(token_id) is None:
                raise TokensRefused(f"tokens file {path} has no token {token_id!r}")
            held[0] = TokenSet(entry for entry in held[0].entries if entry.token_id != token_id)
        sys.stderr.write(f"token {token_id} is revoked\n")

    return _exit_code(command)


def _exit_code(command: Callable[[], None]) -> int:
    try:
        command()
    except TokensRefused as refused:
        sys.stderr.write(f"error: {refused}\n")
        return EXIT_REFUSED
    return 0


def _end(entry: TokenEntry) -> str:
    return "" if entry.expires is None else entry.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _hand_over(to: Path, token: str) -> None:
    """Raises TokensRefused when the file exists: it may be somebody's token."""
    try:
        with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        raise TokensRefused(f"{to} cannot be written: {error.strerror}") from None
