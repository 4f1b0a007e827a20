"""Which engines have loaded a version, judged from a run's state."""

from buffer_wire.errors import NotReady
from trainer_client.state import RunState, WeightVersion

FIRST_POLL_S = 0.05
MOST_POLL_S = 1.0


def not_loaded(run: RunState, version: int, count: int, epoch: int | None) -> NotReady | None:
    """None when at least `count` engines are ready with (epoch, version) or newer, else what is missing.

    `epoch` None: the run's. A higher version of an abandoned timeline does not count as newer.
    """
    wanted = WeightVersion(run.epoch if epoch is None else epoch, version)
    ready = [engine for engine in run.engines if engine.state == "ready" and engine.loaded >= wanted]
    if len(ready) >= count:
        return None
    behind = ", ".join(
        f"{engine.engine_id} ({engine.state}, version {engine.loaded.version}"
        + (f", last error: {engine.last_error[:120]})" if engine.last_error else ")")
        for engine in run.engines
        if engine not in ready
    )
    waits_on = f"the engines {behind}" if behind else "workers to report their engines"
    return NotReady(
        f"{len(ready)} of {count} engines have loaded version {version}; waiting on {waits_on}",
        version=version,
        ready=len(ready),
        count=count,
        waits_on=waits_on,
    )
