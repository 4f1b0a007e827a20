"""Claims: what this process has acknowledged of a run, told to every server before anything is done to the run there.

A server that has less has lost acknowledged writes; the claim pauses the run there. Invariant: a claim is made once in
each tenure of a primary.
"""

from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any

from buffer_service.store.keys import index_key, new_secret
from buffer_service.store.replies import pack, parse
from buffer_service.store.scripts import Script, load_scripts
from buffer_service.store.transport.refusals import Refusals, unrun
from buffer_service.store.transport.resp import Command, ReplyError, RespConnection
from buffer_service.store.transport.traits import LOOKS
from buffer_wire.errors import StoreOutOfDisk, StoreRolledBack, UnknownRun


class Claims:
    """Acknowledged revisions, and the servers that know them."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._claimed: defaultdict[str, set[str]] = defaultdict(set)
        """Runs by the primary's tenure in which it was told what was acknowledged of them."""
        self._acknowledged: dict[str, int] = {}
        """Highest revision by run."""

    def note(self, run_id: str, revision: int) -> None:
        """A revision was acknowledged."""
        self._acknowledged[run_id] = max(revision, self._acknowledged.get(run_id, 0))

    def forget(self, run_id: str) -> None:
        """The run is gone, or a new one of its name begins."""
        self._acknowledged.pop(run_id, None)

    def request(
        self,
        connection: RespConnection,
        commands: Sequence[Command],
        script: Script,
        run_id: str,
        *,
        acknowledges: bool,
    ) -> Awaitable[list[Any]]:
        """Replies to the commands, which end in a call of the script, after the claim where one is due; or the refusal
        of the claim alone.
        """
        if run_id in self._claimed[connection.tenure] or script.name == "view":
            return connection.request(commands)
        return self._claimed_first(connection, commands, script, run_id, acknowledges=acknowledges)

    async def _claimed_first(
        self,
        connection: RespConnection,
        commands: Sequence[Command],
        script: Script,
        run_id: str,
        *,
        acknowledges: bool,
    ) -> list[Any]:
        try:
            refusal = await self._claim(connection, run_id)
        except StoreRolledBack:
            # Those who look or tidy up have nobody to tell, and a resume is what it takes.
            if acknowledges and script.name != "resume":
                raise
            refusal = None
        except StoreOutOfDisk:
            # What only reads changes nothing before the server is told.
            if script.name not in LOOKS and script.name != "eval_view":
                raise
            refusal = None
        return [refusal] if refusal is not None else await connection.request(commands)

    async def _claim(self, connection: RespConnection, run_id: str) -> ReplyError | None:
        """Tell a server what this process has acknowledged of a run; an answer by which it must be told again.

        Raises StoreRolledBack when the server has less; the run is then paused.
        """
        claim = load_scripts()["claim"]
        arguments = pack(connection.tenure, self._acknowledged.get(run_id, 0), new_secret())
        call = ("EVAL", claim.source, 1, index_key(run_id, "run"), arguments)
        replies = await connection.request([call])
        refusal = unrun(replies)
        if refusal is None:
            try:
                parse(run_id, self._refusals.checked(replies[0]))
            except UnknownRun:
                # The script that comes next says so, or creates it.
                return None
            except StoreRolledBack:
                self._acknowledged.pop(run_id, None)
                self._claimed[connection.tenure].add(run_id)
                raise
            self._claimed[connection.tenure].add(run_id)
        return refusal
