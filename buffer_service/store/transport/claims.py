"""Claims of acknowledged revisions of a run, made to every server before anything is done to the run there.

A server that has less has lost acknowledged writes; the claim pauses the run there. Invariant: a claim is made once in
each tenure of the primary that has the run. What was acknowledged is the process's, on whichever server.
"""

from collections.abc import Awaitable, Sequence
from typing import Any

from buffer_service.commands.replies import pack, parse
from buffer_service.domain.command import Command
from buffer_service.store.keys import index_key, new_secret
from buffer_service.store.scripts import Script
from buffer_service.store.transport.refusals import Refusals, is_moved, is_torn, unrun
from buffer_wire.errors import StoreOutOfDisk, StoreRolledBack, UnknownRun
from buffer_wire.resp.encoding import Parts
from buffer_wire.resp.errors import ReplyError
from buffer_wire.resp.protocol import RespConnection


class Claims:
    """Acknowledged revisions, and the servers that know them."""

    def __init__(self, refusals: Refusals, script: Script) -> None:
        self._refusals = refusals
        self._script = script
        self._claimed: dict[str, str] = {}
        """Tenure of the primary that was told last, by run. A slot may come back to a server that was told before."""
        self._torn: set[str] = set()
        """Runs of which a script ended in the middle."""
        self._acknowledged: dict[str, int] = {}
        """Highest revision by run."""

    def note(self, run_id: str, revision: int) -> None:
        """Note a revision that was acknowledged."""
        self._acknowledged[run_id] = max(revision, self._acknowledged.get(run_id, 0))

    def forget(self, run_id: str) -> None:
        """Forget a run that is gone, or whose name a new run takes."""
        self._acknowledged.pop(run_id, None)
        self._claimed.pop(run_id, None)

    def tear(self, run_id: str) -> None:
        """Note that a script of the run ended in the middle: the next claim pauses the run."""
        self._torn.add(run_id)
        self._claimed.pop(run_id, None)

    def request(
        self,
        connection: RespConnection,
        parts: Sequence[Parts],
        command: Command[Any],
    ) -> Awaitable[list[Any]]:
        """Send the parts, which end in the call of the command, after the claim where one is due.

        Returns the replies to the parts, or the refusal of the claim alone.
        """
        if self._claimed.get(command.run_id) == connection.tenure or command.script == "view":
            return connection.request(parts)
        return self._claimed_first(connection, parts, command)

    async def _claimed_first(
        self,
        connection: RespConnection,
        parts: Sequence[Parts],
        command: Command[Any],
    ) -> list[Any]:
        try:
            refusal = await self._claim(connection, command.run_id)
        except StoreRolledBack:
            # Those who look or tidy up have nobody to tell, and a resume is what it takes. A push that stages has.
            if (command.acknowledges and command.script != "resume") or command.script == "stage":
                raise
            refusal = None
        except StoreOutOfDisk:
            # What only reads changes nothing before the server is told.
            if not command.reads:
                raise
            refusal = None
        return [refusal] if refusal is not None else await connection.request(parts)

    async def _claim(self, connection: RespConnection, run_id: str) -> ReplyError | None:
        """Tell a server what this process has acknowledged of a run; an answer by which it must be told again.

        Raises StoreRolledBack when the server has less; the run is then paused.
        """
        torn = run_id in self._torn
        arguments = pack(connection.tenure, self._acknowledged.get(run_id, 0), new_secret(), int(torn))
        call = ("EVAL", self._script.source, 1, index_key(run_id, "run"), arguments)
        replies = await connection.request([call])
        refusal = unrun(replies)
        # While a slot moves key by key this script may end in the middle too: before it writes.
        if refusal is None and isinstance(replies[0], ReplyError) and (is_moved(replies[0]) or is_torn(replies[0])):
            refusal = replies[0]
        if refusal is None:
            try:
                parse(run_id, self._refusals.checked(replies[0]))
            except UnknownRun:
                # The script that comes next says so, or creates it.
                return None
            except StoreRolledBack:
                self._acknowledged.pop(run_id, None)
                self._claimed[run_id] = connection.tenure
                self._torn.discard(run_id)
                raise
            self._claimed[run_id] = connection.tenure
        return refusal
