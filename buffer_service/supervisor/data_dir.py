"""The data directory of a service: its lock, and service.json, which says where the service is while it serves."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

LOCK_FILE = "service.lock"
STATE_FILE = "service.json"


class DataDirRefused(RuntimeError):
    """A data directory that cannot be used; the message names it."""


class DataDir:
    """A directory that this process holds. The kernel lets go of it when the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.killed_predecessor = (path / STATE_FILE).exists()
        """A service was killed here: what it started dies a moment after it."""

    @contextmanager
    def announced(self, *, address: str, admin: str, store: str) -> Iterator[None]:
        """service.json, present inside the context, for programs that started the service on a free port."""
        path = self.path / STATE_FILE
        state = {"address": address, "admin": admin, "pid": os.getpid(), "store": store}
        written = path.with_suffix(".tmp")
        try:
            written.write_text(json.dumps(state, indent=2) + "\n")
            written.replace(path)
        except OSError as error:
            # A full disk is no reason not to serve what there is.
            log.warning("the service is not announced to other programs", file=str(path), why=error.strerror)
        try:
            yield
        finally:
            for left in (path, written):
                left.unlink(missing_ok=True)


@contextmanager
def held(path: Path) -> Iterator[DataDir]:
    """Create and hold the directory. Raises DataDirRefused."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirRefused(f"data directory {path} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirRefused(
                f"data directory {path} is in use by another service; give this one its own (--data-dir)"
            ) from None
        yield DataDir(path)
    finally:
        os.close(lock)
