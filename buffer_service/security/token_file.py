"""Tokens file: read, read again when it changes, and written by `rollout-buffer token`.

Invariants: a reader sees the file before a change or after it, never half. A file that cannot be read or parsed leaves
the last good one in force. Then the log has an error, and `broken` is True until the file is mended.
"""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from buffer_service.security.tokens import TokenSet, TokensRefused

log = structlog.get_logger(__name__)

POLL_S = 1.0
"""Shortest time between two looks at the file: how long a revoked token may still be good."""

Stamp = tuple[int, int, int]


class TokenFile:
    """The tokens of a file as they are now. May be asked from any thread. Raises TokensRefused at the first reading."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self.broken = False
        """The file as it is now cannot be used; an earlier one is in force."""
        self.tokens = self._read()
        """Tokens as they were read last; `look` reads them again."""
        self._looked = clock()

    def look(self, *, at_once: bool = False) -> TokenSet:
        """The tokens, read again if the file has changed; looked at once a second, or `at_once`."""
        now = self._clock()
        if at_once or now - self._looked >= POLL_S:
            # One at a time: tokens that were read earlier must not follow those that were read later.
            with self._lock:
                self._looked = now
                self._refresh()
        return self.tokens

    def _refresh(self) -> None:
        try:
            if _stamp(self._path) == self._stamp:
                return
            self.tokens = self._read()
            self.broken = False
            log.info("tokens read", path=str(self._path), tokens=len(self.tokens.entries))
        except (OSError, TokensRefused) as error:
            if isinstance(error, OSError):
                self._stamp = None
            if not self.broken:
                log.error(  # noqa: TRY400 - the traceback says nothing more
                    "tokens file is broken; the tokens read last stay in force", path=str(self._path), why=str(error)
                )
            self.broken = True

    def _read(self) -> TokenSet:
        try:
            # Before the content: a change in between is read once more. Kept also of a content that is refused, which
            # is then not parsed again until it changes.
            self._stamp = _stamp(self._path)
            return TokenSet.parse(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self._stamp = None
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise TokensRefused(f"tokens file {self._path} cannot be read: {why}") from None
        except TokensRefused as refused:
            raise TokensRefused(f"tokens file {self._path}: {refused}") from None


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextmanager
def changing(path: Path) -> Iterator[list[TokenSet]]:
    """Change a tokens file: the list holds what it has, and what it holds at the end is written, atomically.

    Others that change it wait meanwhile. A new file is for its owner alone (mode 0600); one that is there keeps its
    owner and mode. Raises TokensRefused.
    """
    lock = _opened(path.with_name(f"{path.name}.lock"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        present = TokenSet.parse(path.read_text(encoding="utf-8")) if path.exists() else TokenSet(())
        held = [present]
        yield held
        if held[0] is not present:
            _write(path, "".join(f"{entry.to_line()}\n" for entry in held[0].entries))
    except (OSError, UnicodeDecodeError) as error:
        raise TokensRefused(f"tokens file {path} cannot be changed: {error}") from None
    finally:
        os.close(lock)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TokensRefused(f"{path} cannot be opened: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    # Where the path is a link, what it points at is replaced and not the link.
    target = path.resolve()
    written = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            if target.exists():
                _give_as(target.stat(), file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(FileNotFoundError):
            written.unlink()


def _give_as(was: os.stat_result, file: int) -> None:
    """Owner and mode as they were: root may change the file of a service that runs as another user."""
    # Somebody else's may be replaced, but not given away; then it is the writer's own.
    with suppress(PermissionError):
        os.fchown(file, was.st_uid, was.st_gid)
        os.fchmod(file, stat.S_IMODE(was.st_mode))
