"""Operations on runs as values: what a script is called with, and what its reply means.

`buffer_service.commands` makes commands, a store carries them out (ports.RunStore.call). Invariant: a command has
its arguments packed when it is made, so it can be sent again as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from buffer_service.domain.ops import Buffer

T_co = TypeVar("T_co", covariant=True)

Fields: TypeAlias = list[Any]
"""Elements of a reply after its tag: integers, bytes, and lists of them."""


@dataclass(frozen=True, slots=True)
class Command(Generic[T_co]):
    """An operation on one run. Its errors are those that its docstring names, UnknownRun and StoreFault."""

    run_id: str
    script: str
    """Name of the script in store/lua."""
    arguments: bytes
    unpack: Callable[[str, Fields], T_co]
    """The result, of the reply's tag and fields."""
    payloads: Sequence[tuple[str, Buffer]] = ()
    """Stored in the same transaction: keys and bodies."""
    again: bytes | None = None
    """Arguments of the calls that follow while the reply's tag is `more`; None: such a reply is one like others."""
    rest: "Command[Any] | None" = None
    """Called until its last field is 0, where that of this reply is not."""
    trash: bool = False
    """Deletes the run's trash at last, not left to the sweep: memory that is freed now is used again by the next
    payloads."""
    reads: bool = False
    """Writes nothing, and so is answered where the store has no room."""
    acknowledges: bool = True
    """False for a reply that promises nothing: it waits for no replicas, and its revision is not remembered."""
