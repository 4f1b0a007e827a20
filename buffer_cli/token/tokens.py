"""Actions of the `rollout-buffer token` commands."""

import functools
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ParamSpec

from rich.table import Table

from buffer_cli.exits import EXIT_REFUSED
from buffer_cli.output import print_json, show
from buffer_service.security.roles import Role
from buffer_service.security.token_file import TokenFile, changing
from buffer_service.security.tokens import TokenEntry, TokenSet, TokensRefused, digest, new_token
from buffer_wire.errors import InvalidField

P = ParamSpec("P")


def _refusing(action: Callable[P, None]) -> Callable[P, int]:
    """Have an action return an exit code; what the tokens file refuses is said on standard error."""

    @functools.wraps(action)
    def act(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            action(*args, **kwargs)
        except TokensRefused as refused:
            sys.stderr.write(f"error: {refused}\n")
            return EXIT_REFUSED
        return 0

    return act


@_refusing
def create(
    tokens_file: Path, role: str, runs: Sequence[str], *, token_id: str | None, days: float | None, to: Path | None
) -> None:
    """Add a token and print it, or write it to `to`. Raises InvalidField."""
    if role not in list(Role):
        raise InvalidField("--role", role, f"one of {', '.join(Role)}")
    if days is not None and not 0 < days < 100_000:
        raise InvalidField("--days", days, "above 0 and below 100,000")
    expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    name = token_id or secrets.token_hex(6)
    token = new_token(name)
    entry = TokenEntry(name, Role(role), tuple(runs), digest(token), expires)
    with changing(tokens_file) as held:
        held[0] = TokenSet((*held[0].entries, entry))
        if to is not None:
            _hand_over(to, token)
    sys.stderr.write(f"token {name} ({role}, runs {', '.join(runs)}) is in {tokens_file}\n")
    if to is None:
        print(token)


@_refusing
def list_tokens(tokens_file: Path, *, as_json: bool) -> None:
    """Print the entries."""
    entries = TokenFile(tokens_file).tokens.entries
    now_s = datetime.now(UTC).timestamp()
    if as_json:
        shown = [
            {
                "id": entry.token_id,
                "role": entry.role.value,
                "runs": entry.runs,
                "expires": _end(entry) or None,
                "expired": entry.expired(now_s),
            }
            for entry in entries
        ]
        print_json(shown)
        return
    table = Table("id", "role", "runs", "expires")
    for entry in entries:
        over = " (over)" if entry.expired(now_s) else ""
        table.add_row(entry.token_id, entry.role.value, ", ".join(entry.runs), (_end(entry) or "never") + over)
    show(table)


@_refusing
def revoke(tokens_file: Path, token_id: str) -> None:
    """Take an entry out."""
    with changing(tokens_file) as held:
        if held[0].by_id(token_id) is None:
            raise TokensRefused(f"tokens file {tokens_file} has no token {token_id!r}")
        held[0] = TokenSet(entry for entry in held[0].entries if entry.token_id != token_id)
    sys.stderr.write(f"token {token_id} is revoked\n")


def _end(entry: TokenEntry) -> str:
    return "" if entry.expires is None else entry.expires.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _hand_over(to: Path, token: str) -> None:
    """Raises TokensRefused when the file exists: it may be somebody's token."""
    try:
        with os.fdopen(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        raise TokensRefused(f"{to} cannot be written: {error.strerror}") from None
