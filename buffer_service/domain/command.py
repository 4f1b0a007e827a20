"""Operations on runs as values: what a script is called with, and what its reply means.

`buffer_service.commands` makes commands, a store carries them out (ports.RunStore.call). Invariant: a command has
its arguments packed when it is made, so it can be sent again as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from buffer_service.domain.ops import Buffer

T_co = TypeVar("T_co", covariant=True)

Fields: TypeAlias = list[Any]
"""Elements of a reply after its tag: integers, bytes, and lists of them."""


class Written(NamedTuple):
    """A payload that its pusher has written to the store: place of its group in the push, key, name of its task."""

    place: int
    key: str
    task_id: str


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
    """Payloads to store before the script indexes them: keys and bodies."""
    written: Sequence[Written] = ()
    """Payloads that their pushers have written to the store."""
    there: bytes | None = None
    """A digit for each group, 1 where its payload is there; None while the payloads were not stored."""
    again: bytes | None = None
    """Arguments of the calls that follow while the reply's tag is `more`; None: such a reply is one like others."""
    rest: "Command[Any] | None" = None
    """Command to call until the last field of its reply is 0, unless that of this command's reply is 0 already."""
    trash: bool = False
    """True to delete the run's trash at last, not leave it to the sweep: the next payloads use that memory again."""
    reads: bool = False
    """True when the script writes nothing, and so is answered where the store has no room."""
    acknowledges: bool = True
    """False for a reply that promises nothing: it waits for no replicas, and its revision is not remembered."""
