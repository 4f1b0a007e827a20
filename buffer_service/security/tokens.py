"""Tokens and the file that knows them by their hashes.

A token is `rb.ID.SECRET`: the id is public and names its entry, the secret is 256 random bits. The file has one JSON
object a line: `{"id", "role", "runs", "sha256", "expires"}`. Plain SHA-256 is right here. A salt and a slow hash
protect secrets that can be guessed, and nobody guesses 256 random bits. So looking up a token costs microseconds.

Invariant: secrets are compared in constant time, and written nowhere.
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from buffer_service.security.roles import Role

PREFIX = "rb"
SECRET_BYTES = 32
MAX_TOKENS = 10_000
MAX_RUNS = 100

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUN = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,63}\*?|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = {"id", "role", "runs", "sha256", "expires"}


class TokensRefused(ValueError):
    """A tokens file, or an entry, that cannot be used; the message says where and why, and holds no secret."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Entry of the tokens file: all that is stored of a token."""

    token_id: str
    role: Role
    runs: tuple[str, ...]
    """Names of runs, and prefixes that end in *."""
    sha256: str
    """SHA-256 of the whole token, in hexadecimal digits."""
    expires: datetime | None = None
    """Time at which the token expires; None: never."""
    _names: frozenset[str] = field(init=False, repr=False, compare=False)
    _beginnings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises TokensRefused."""
        if not _ID.fullmatch(self.token_id):
            raise TokensRefused(f"id {self.token_id!r} is not 1 to 64 characters of [A-Za-z0-9_-]")
        if not 1 <= len(self.runs) <= MAX_RUNS:
            raise TokensRefused(f"token {self.token_id!r} has {len(self.runs)} runs; it must be 1 to {MAX_RUNS}")
        for run in self.runs:
            if not _RUN.fullmatch(run):
                raise TokensRefused(
                    f"token {self.token_id!r}: {run!r} is neither a run's name nor the beginning of one followed by *"
                )
        if not _SHA256.fullmatch(self.sha256):
            raise TokensRefused(f"token {self.token_id!r}: sha256 is not 64 hexadecimal digits")
        # Split once: every call asks `covers`.
        object.__setattr__(self, "_names", frozenset(run for run in self.runs if not run.endswith("*")))
        object.__setattr__(self, "_beginnings", tuple(run[:-1] for run in self.runs if run.endswith("*")))

    def covers(self, run_id: str) -> bool:
        """True when the token is for this run."""
        return run_id in self._names or run_id.startswith(self._beginnings)

    def expired(self, now_s: float) -> bool:
        """True when its time is over. `now_s`: seconds since 1970."""
        return self.expires is not None and now_s >= self.expires.timestamp()

    def to_line(self) -> str:
        """The entry as a line of the file."""
        values: dict[str, Any] = {"id": self.token_id, "role": self.role.value, "runs": self.runs}
        values["sha256"] = self.sha256
        if self.expires is not None:
            values["expires"] = self.expires.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return json.dumps(values)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """The inverse of `to_line`. Raises TokensRefused."""
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TokensRefused(f"it is not JSON ({error})") from None
        if not isinstance(values, dict) or not values.keys() <= _KEYS or not _KEYS - {"expires"} <= values.keys():
            raise TokensRefused("it is not an object of id, role, runs, sha256 and, if it ends, expires")
        runs = values["runs"]
        if not isinstance(runs, list) or not all(isinstance(run, str) for run in runs):
            raise TokensRefused("runs is not a list of names")
        if values["role"] not in list(Role):
            raise TokensRefused(f"role is none of {', '.join(Role)}")
        return cls(
            str(values["id"]), Role(values["role"]), tuple(runs), str(values["sha256"]), _time(values.get("expires"))
        )


def _time(text: object) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise TokensRefused(f"expires {text!r} is not a time like 2030-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise TokensRefused(f"expires {text!r} names no time zone; write 2030-01-31T12:00:00Z")
    return moment


class TokenSet:
    """The entries of a file. Raises TokensRefused for ids given twice."""

    def __init__(self, entries: Iterable[TokenEntry]) -> None:
        self.entries: Sequence[TokenEntry] = tuple(entries)
        self._by_id: Mapping[str, TokenEntry] = {entry.token_id: entry for entry in self.entries}
        if len(self._by_id) != len(self.entries):
            raise TokensRefused("an id is given twice")
        if len(self.entries) > MAX_TOKENS:
            raise TokensRefused(f"there are {len(self.entries)} tokens; at most {MAX_TOKENS} are kept")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The entries of a file's text; empty lines are passed over. Raises TokensRefused."""
        entries = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    entries.append(TokenEntry.from_line(line))
                except TokensRefused as refused:
                    raise TokensRefused(f"line {number}: {refused}") from None
        return cls(entries)

    def by_id(self, token_id: str) -> TokenEntry | None:
        """The entry of an id."""
        return self._by_id.get(token_id)

    def find(self, token: str) -> TokenEntry | None:
        """The entry of a token, whether it has expired or not; None for one that is not known."""
        prefix, _, rest = token.partition(".")
        entry = self._by_id.get(rest.partition(".")[0]) if prefix == PREFIX else None
        # As much work for an id that is not known, so that the time does not tell ids.
        stored = entry.sha256 if entry is not None else _NOBODY
        return entry if hmac.compare_digest(digest(token), stored) and entry is not None else None


_NOBODY = "0" * 64


def digest(token: str) -> str:
    """Digest that is stored of a token: its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def new_token(token_id: str) -> str:
    """A token with a secret of its own."""
    return f"{PREFIX}.{token_id}.{secrets.token_urlsafe(SECRET_BYTES)}"
