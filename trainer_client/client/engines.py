"""Quorum of engines: which engines have loaded a version and how many are needed, judged from a run's state."""

import math
from typing import TypeAlias

from buffer_wire.errors import InvalidField, NotReady
from trainer_client.state import Engine, RunState, WeightVersion

FIRST_POLL_S = 0.05
MOST_POLL_S = 1.0

SILENT_MS = 60_000
"""Silence after which an engine counts as gone; its worker reports at least every 30 s."""

LEAST_ANSWER_S = 5.0
"""Shortest time limit, in seconds, for reading the run, however short the wait."""

IN_SERVICE = ("starting", "ready", "loading")

Quorum: TypeAlias = int | float
"""Number of engines to wait for as an int, or a share of those in service, above 0 and at most 1, as a float."""


def said(quorum: Quorum) -> str:
    """Describe a quorum in words."""
    return f"{quorum} engines" if isinstance(quorum, int) else f"{quorum:.0%} of the engines"


def in_service(run: RunState) -> tuple[Engine, ...]:
    """Engines that serve or are about to: neither quarantined nor stopped, and not silent."""
    return tuple(e for e in run.engines if e.state in IN_SERVICE and e.silent_ms < SILENT_MS)


def quorum_of(quorum: Quorum, run: RunState) -> int:
    """Count the engines that make a quorum now: a share is rounded up, and at least 1. Raises InvalidField."""
    if isinstance(quorum, bool) or not (quorum > 0 and (isinstance(quorum, int) or quorum <= 1)):
        raise InvalidField("wait_for", quorum, "a number of engines (int) or a share of them above 0 and at most 1.0")
    return quorum if isinstance(quorum, int) else max(1, math.ceil(quorum * len(in_service(run)) - 1e-9))


def not_loaded(run: RunState, version: int, quorum: Quorum, term: int | None) -> NotReady | None:
    """Return None when that many engines are ready with (term, version) or newer, else an error that names the missing
    ones.

    `term` None: the run's. A higher version of an abandoned timeline does not count as newer. Raises InvalidField.
    """
    wanted = WeightVersion(run.term if term is None else term, version)
    count = quorum_of(quorum, run)
    ready = [engine for engine in in_service(run) if engine.state == "ready" and engine.loaded >= wanted]
    if len(ready) >= count:
        return None
    behind = [engine for engine in run.engines if engine not in ready]
    waits_on = f"the engines {', '.join(map(_lagging, behind))}" if behind else "workers to report their engines"
    return NotReady(
        f"{len(ready)} of {count} engines have loaded version {version}; waiting on {waits_on}",
        version=version,
        ready=len(ready),
        count=count,
        waits_on=waits_on,
        engines=",".join(engine.engine_id for engine in behind),
    )


def _lagging(engine: Engine) -> str:
    silent = f", silent for {engine.silent_ms // 1000} s" if engine.silent_ms >= SILENT_MS else ""
    error = f", last error: {engine.last_error[:120]}" if engine.last_error else ""
    return f"{engine.engine_id} ({engine.state}, version {engine.loaded.version}{silent}{error})"
