"""The reference model: every operation on a run as plain, synchronous Python.

It is the oracle of the model-based tests, which run it beside the store's scripts, and holds the simulator to it.
Same operations, arguments, replies and errors as `buffer_service.domain.ports.RunStore`, without waiting and without
I/O; the clock is injected. Invariant: an operation that raises has changed nothing, but a caller who has seen a later
revision pauses the run. A push that is refused leaves no payloads behind.
"""

from tests.oracle.reference import ReferenceModel

__all__ = ["ReferenceModel"]
