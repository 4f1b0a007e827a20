"""Load of an engine, as this worker last heard: whether more work would only wait there, and which engine should ask
first.

An engine may serve others too, so its own answer (/v1/loads on SGLang) counts, corrected by what this worker sent and
got back since. An engine that does not answer is taken for one without other users: the guard watches who is gone.
"""

import time

from rollout_workers.engine.errors import EngineError
from rollout_workers.engine.types import Engine, EngineLoad

FRESH_S = 0.5
"""An answer so young is not asked for again."""


class LoadView:
    """View of one engine's load. `in_flight` is always the number of requests that this worker has there."""

    def __init__(self) -> None:
        self._load = EngineLoad(running=0, waiting=0, token_usage=0.0)
        self._in_flight_then = 0
        self._asked_at = float("-inf")
        self.is_known = False
        """True when the engine has answered the last question."""

    async def ask(self, engine: Engine, in_flight: int, *, max_age_s: float | None = None) -> None:
        """Ask the engine unless its last answer is young enough."""
        if time.monotonic() - self._asked_at <= (FRESH_S if max_age_s is None else max_age_s):
            return
        self._asked_at = time.monotonic()
        self.is_known = True
        try:
            load = await engine.load()
        except EngineError:
            self.is_known = False
            load = EngineLoad(running=in_flight, waiting=0, token_usage=0.0)
        self._load, self._in_flight_then = load, in_flight

    @property
    def of_others(self) -> int:
        """Requests on the engine that this worker did not send, at the last answer."""
        return max(self._load.running + self._load.waiting - self._in_flight_then, 0)

    def requests(self, in_flight: int) -> int:
        """Requests on the engine now, by the best knowledge."""
        return self.of_others + in_flight

    def is_crowded(self, max_running: int) -> bool:
        """True when others' requests wait inside the engine: what is sent now would wait behind them.

        More requests of this worker than fit (`max_running`) are its own choice, and no reason to send nothing.
        """
        own_surplus = max(self._in_flight_then - max_running, 0)
        return self.of_others > 0 and self._load.waiting > own_surplus

    @property
    def token_usage(self) -> float:
        """Share of the KV cache in use, at the last answer."""
        return self._load.token_usage

    @property
    def waiting(self) -> int:
        """Requests that wait inside the engine, at the last answer."""
        return self._load.waiting
