"""Reads all runs that a caller may see, for scrapes and lists.

Invariant: a run that cannot be read takes no other one along. It is left out, counted by reason, and the log names it
when it begins to be.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from buffer_service import commands
from buffer_service.domain.evaluations import EvaluationView
from buffer_service.domain.ops import RunView
from buffer_service.domain.ports import RunStore
from buffer_service.security.gate import caller
from buffer_wire.errors import LayoutChanged, StoreFault, UnknownRun

log = structlog.get_logger(__name__)

READ_S = 4.0
"""Time limit for all reads of a scrape or list; Prometheus gives a scrape 10 s unless told otherwise."""

LATE = "late"
DEFECT = "defect"
UNREAD = (LayoutChanged.reason, StoreFault.reason, LATE, DEFECT)
"""Reasons why runs are left out.

In order: a service of another version keeps the run; the store fails on it; runs before it, by name, took all of
READ_S; this service fails on what is in its record.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runs(Generic[T]):
    """Runs that were read, in the order of their names; `unread`: the reason of UNREAD for each run that was not."""

    found: Sequence[T]
    unread: Mapping[str, str]


async def read_run(store: RunStore, run_id: str) -> tuple[RunView, Sequence[EvaluationView]]:
    """A run and its evaluations, which wait for no replica: nobody is told that anything was done."""
    view = await store.call(commands.view(run_id))
    _, evaluations = await store.call(commands.evaluations(run_id, acknowledges=False))
    return view, evaluations


class RunReader:
    """Reads over one store."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._told: dict[str, str] = {}
        """Reasons that the log has given for runs that are left out, by run."""

    async def read(self, one: Callable[[str], Awaitable[T]], deadline: float) -> Runs[T]:
        """`one` of each run that the present caller may see, until a time of the event loop's clock.

        Raises StoreFault when the store as a whole fails, or has answered for no run by then.
        """
        run_ids: Sequence[str] = ()
        found: list[T] = []
        unread: dict[str, str] = {}
        asked = 0
        try:
            async with asyncio.timeout_at(deadline):
                listed = await self._store.list_runs()
                self._told = {run_id: self._told[run_id] for run_id in listed if run_id in self._told}
                run_ids = caller().visible(listed)
                for run_id in run_ids:
                    try:
                        found.append(await one(run_id))
                        self._told.pop(run_id, None)
                    except UnknownRun:
                        pass  # Deleted since it was listed.
                    except StoreFault as fault:
                        if not fault.of_one_run:
                            raise
                        unread[run_id] = fault.reason
                        self._tell([run_id], fault.reason, fault.message)
                    except Exception as error:  # noqa: BLE001 - whatever it is, it is of one run
                        unread[run_id] = DEFECT
                        self._tell([run_id], DEFECT, repr(error))
                    asked += 1
        except TimeoutError:
            if not asked:
                raise StoreFault(f"the store did not answer within {READ_S:g} s") from None
            late = run_ids[asked:]
            unread |= dict.fromkeys(late, LATE)
            self._tell(late, LATE, f"{asked} runs took {READ_S:g} s")
        return Runs(found, unread)

    def _tell(self, run_ids: Sequence[str], reason: str, why: str) -> None:
        new = [run_id for run_id in run_ids if self._told.get(run_id) != reason]
        if new:
            log.warning("left out of metrics and lists", run=new[0], more=len(new) - 1, reason=reason, why=why)
        self._told.update(dict.fromkeys(new, reason))
