"""What the machine drives beside the model: a store, or another model.

A subject runs one operation to its end, synchronously, at the time that the machine has set.
"""

import asyncio
from typing import Any, Protocol

from buffer_service.domain.model import ReferenceModel
from buffer_service.store.keys import index_key
from buffer_service.store.redis_store import RedisRunStore


class Subject(Protocol):
    """One implementation of RunStore's operations."""

    def call(self, operation: str, run_id: str, *args: Any, **kwargs: Any) -> Any:
        """Run an operation; raises what it raises."""
        ...

    def set_time(self, run_id: str, now_ms: int) -> None:
        """The run's time from now on."""
        ...

    def sweep(self, run_id: str) -> None:
        """Expire leases and delete what nothing refers to."""
        ...

    def stored_bodies(self, run_id: str) -> int:
        """Payloads and continuations that exist."""
        ...

    def forget(self) -> None:
        """Delete all runs."""
        ...


class StoreSubject:
    """The real store, reached at an address. `close` it."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._store = self._runner.run(RedisRunStore.connect(url))

    def call(self, operation: str, run_id: str, *args: Any, **kwargs: Any) -> Any:
        return self._runner.run(getattr(self._store, operation)(run_id, *args, **kwargs))

    def set_time(self, run_id: str, now_ms: int) -> None:
        self._command("SET", index_key(run_id, "test_now"), now_ms)

    def sweep(self, run_id: str) -> None:
        self._runner.run(self._store.sweep())

    def stored_bodies(self, run_id: str) -> int:
        return len(self._command("KEYS", f"rb:p:{run_id}:*"))

    def forget(self) -> None:
        self._command("FLUSHALL")

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()

    def _command(self, *words: str | int) -> Any:
        return self._runner.run(self._store._connection.command(*words))


class ModelSubject:
    """A model in the place of the store, to try the machine itself."""

    def __init__(self, model: type[ReferenceModel] = ReferenceModel) -> None:
        self._now = 0
        self._kind = model
        self._model = model(lambda: self._now)

    def call(self, operation: str, run_id: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._model, operation)(run_id, *args, **kwargs)

    def set_time(self, run_id: str, now_ms: int) -> None:
        self._now = now_ms

    def sweep(self, run_id: str) -> None:
        self._model.expire(run_id)

    def stored_bodies(self, run_id: str) -> int:
        return self._model.stored_bodies(run_id)

    def forget(self) -> None:
        self._model = self._kind(lambda: self._now)
