"""State machine of a client's access to the store: when the client asks for it, and whether what it has is good.

    no access ──ask──► direct ──two thirds of its time──► direct, asks again ──► …
        ▲                │ a fault                           │ its time is over
        └── after a back-off, with the trouble ◄─────────────┘

A fault of a cluster has the next asked for at once, with the trouble, before the first back-off. Does no I/O.
Invariants: after a fault nobody asks before the back-off is over, and each fault in a row doubles it until a payload
has passed. Every reason to relay is logged once until another one follows, or a payload has passed.
"""

import logging
import math
import random
import time
from collections.abc import Callable

from buffer_wire.errors import RolloutBufferError
from buffer_wire.payloads.access import MAX_WHY_CHARS, StoreAccess

FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 30.0
PAUSE_PER_TRY = 30
"""Times as long as a try took that its caller waited for, the next is put off: who pulls waits for few that fail."""
RENEWED_AFTER = 2 / 3
"""Part of an access's time after which the next is asked for."""
RECOVERED_AFTER_S = 1.0
"""Time after which the next is asked for where this one was asked for with a trouble, which the service believes in
until then."""

_log = logging.getLogger(__name__)


class Turns:
    """Turns of one client between the direct way and the relayed one.

    `who` names it in logs. Not for several threads at once.
    """

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who = who
        self._clock = clock
        self._until = self._ask_at = clock()
        self._faults = 0
        self._strayed_at = -math.inf
        self._told = ""
        self.trouble = ""
        """Reason why the client could not use what it was given last; empty where it could."""

    @property
    def is_due(self) -> bool:
        """True when the client should ask for access now."""
        return self._clock() >= self._ask_at

    @property
    def is_failing(self) -> bool:
        """True from a fault on until a payload has passed; meanwhile no caller should wait for a try."""
        return self._faults > 0

    @property
    def is_good(self) -> bool:
        """True while what was taken into use last may be used."""
        return self._clock() < self._until

    def taken(self, access: StoreAccess, asked_at: float) -> None:
        """Note an access that is in use now. It was asked for at `asked_at`, on the clock of this object."""
        self._until = asked_at + access.valid_s
        self._ask_at = asked_at + (RECOVERED_AFTER_S if self.trouble else access.valid_s * RENEWED_AFTER)
        self.trouble = ""

    def relayed(self, access: StoreAccess, asked_at: float) -> None:
        """Note that the service relays; it is asked again before its answer's time is over."""
        self._until = asked_at
        self._ask_at = asked_at + _spread(access.valid_s)
        self.trouble = ""
        self._tell(access.relayed_because)

    def failed(self, why: str, *, lost: bool, tried_s: float = 0.0) -> None:
        """Note a fault, whose reason the next request carries. `lost`: what was in use is of no use any more.

        `tried_s`: time for which a caller waited for a try to connect, in seconds.
        """
        self._put_off(PAUSE_PER_TRY * tried_s)
        self.trouble = why[:MAX_WHY_CHARS]
        if lost:
            self._until = self._clock()
            self._tell(self.trouble)

    def strayed(self, why: str) -> None:
        """Note a fault of a cluster in use, which may have other primaries by now: the next is asked for at once.

        It is a fault as any other where one was asked for so less than RECOVERED_AFTER_S ago.
        """
        now = self._clock()
        if now < self._strayed_at + RECOVERED_AFTER_S:
            self.failed(why, lost=True)
            return
        self.trouble = why[:MAX_WHY_CHARS]
        self._strayed_at = self._until = self._ask_at = now

    def not_answered(self, error: RolloutBufferError | OSError, *, lost: bool) -> None:
        """Note that asking ended in an error. A service that is away relays nothing either, so it is asked again."""
        if isinstance(error, OSError) or error.retryable or error.attributes.get("status") == "CANCELLED":
            self._put_off()
        else:
            self.failed(f"no access: {error}", lost=lost)

    def lapsed(self) -> None:
        """Note that what was in use ended while nothing was asked of it, as a user's connections do: no fault."""
        self._until = self._ask_at = self._clock()

    def passed(self) -> None:
        """Note that a payload has passed directly."""
        self._faults = 0
        if self._told:
            self._told = ""
            _log.info("%s moves payloads directly again", self._who)

    def _put_off(self, least_s: float = 0.0) -> None:
        wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._faults, 16))
        self._faults += 1
        self._ask_at = self._clock() + _spread(max(wait_s, least_s))

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            _log.warning("%s has payloads relayed by the service: %s", self._who, why)


def _spread(longest_s: float) -> float:
    """A time in the upper half, so that clients do not ask all at once."""
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
