"""Errors of the store behind the service."""

from typing import ClassVar

from buffer_wire.errors.base import RolloutBufferError


class StoreFault(RolloutBufferError):
    """The store failed."""

    reason = "store_fault"
    of_one_run: ClassVar[bool] = True
    """True when the error may concern one run alone, and says nothing of the others."""


class StoreUnavailable(StoreFault):
    """The store cannot be reached, or is loading. Attributes: store."""

    reason = "store_unavailable"
    of_one_run = False
    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"the store at {store} does not answer: {why}", store=store)


class StoreUnsuitable(StoreFault):
    """The store must not be used. Attributes: store, why."""

    reason = "store_unsuitable"
    of_one_run = False
    code = "FAILED_PRECONDITION"

    def __init__(self, store: str, why: str) -> None:
        super().__init__(f"the store at {store} is refused: {why}", store=store, why=why)


class LayoutChanged(StoreFault):
    """Another version of the service has taken the store, or the run, over; this one has changed nothing. It ends where
    it was the store.

    Attributes: found, known (versions of the layout).
    """

    reason = "layout_changed"
    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, found: str, known: str) -> None:
        super().__init__(
            f"the layout in the store is version {found} by now and this service knows version {known}; "
            "a service of the other version takes the call",
            found=found,
            known=known,
        )


class NotReplicated(StoreFault):
    """The write is done, but too few replicas of the store have it; the same request waits for them again.

    Attributes: wanted, reached, timeout_ms.
    """

    reason = "not_replicated"
    of_one_run = False
    code = "UNAVAILABLE"
    retryable = True

    def __init__(self, wanted: int, reached: int, timeout_ms: int) -> None:
        super().__init__(
            f"{reached} of the {wanted} replicas of policy.wait_replicas have the write after {timeout_ms} ms",
            wanted=wanted,
            reached=reached,
            timeout_ms=timeout_ms,
        )


class StoreOutOfDisk(StoreFault):
    """The store cannot write to its disk, which is full or fails: nothing is acknowledged. Attributes: store, why."""

    reason = "store_out_of_disk"
    of_one_run = False
    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, store: str, why: str) -> None:
        super().__init__(
            f"the store at {store} cannot write to its disk, so nothing is acknowledged: {why}", store=store, why=why
        )


class StoreOutOfMemory(StoreFault):
    """The store refused a write for lack of memory; nothing was accepted."""

    reason = "store_out_of_memory"
    of_one_run = False
    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, store: str) -> None:
        super().__init__(f"the store at {store} is out of memory (maxmemory); nothing was accepted", store=store)
