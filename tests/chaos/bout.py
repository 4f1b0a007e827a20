"""One bout of a chaos run: a scenario is set up, struck for a while, brought to its end, and checked."""

import asyncio
import os
import random
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import stores
from tests.chaos.checker.events import Events
from tests.chaos.checker.journal import Bounds, broken_in, counted
from tests.chaos.checker.promises import broken
from tests.chaos.fleet import Fleet, running
from tests.chaos.nemesis import Nemesis
from tests.chaos.papers import Papers
from tests.chaos.recovery import standstills
from tests.chaos.scenario import Scenario
from tests.chaos.session import JOURNAL, MAX_STALENESS, MAX_USES, REUSE_MAX_STALENESS
from tests.faults.calls import OPTIONS
from tests.faults.history import History
from tests.faults.observer import last_looks
from trainer_client import AsyncBufferClient

BOUNDS = Bounds(MAX_STALENESS, REUSE_MAX_STALENESS, MAX_USES)
CALM_S = 3.0
"""Time before the first strike: what is measured in it is progress without faults."""


@dataclass
class Bout:
    """Outcome of a bout."""

    scenario: Scenario
    seconds: float
    problems: list[str] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    session: dict[str, int] = field(default_factory=dict)
    """Counts of the second run's journal."""

    def strikes(self) -> list[Any]:
        """Strikes that were carried out."""
        return self.events.of("strike", ok=True)


def lived(scenario: Scenario, seed: int, seconds: float, folder: Path) -> Bout:
    """Live through a bout; its files are in `folder`. Problems are reported, not raised."""
    folder.mkdir(parents=True)
    found = Bout(scenario, seconds)
    rng = random.Random(f"{seed}/bout/{scenario.number}")
    run_id = f"chaos-{seed}-{scenario.number}"
    with (folder / "nemesis.jsonl").open("w") as file:
        history = History(file=file)
        try:
            papers = Papers(folder) if scenario.tls else None
            of_store, tls = random.Random(rng.getrandbits(64)), papers.store if papers else None
            with stores.running(scenario.store, folder, of_store, tls, run_id) as store:
                settings = papers.settings() if papers else {}
                with _environment(papers.access() if papers else {}):
                    fleet = Fleet(folder, run_id, scenario, store, rng, dict(os.environ), papers)
                    asyncio.run(_live(fleet, history, random.Random(rng.getrandbits(64)), seconds, settings))
        except Exception as error:  # noqa: BLE001  # Whatever goes wrong in a bout is what the run reports.
            found.problems.append(f"{type(error).__name__}: {error}"[:2_000])
            (folder / "error").write_text("".join(traceback.format_exception(error)))
    found.events = Events.load(*folder.glob("*.jsonl"))
    found.session = counted(folder / JOURNAL)
    if not found.problems:
        found.problems = [*broken(found.events), *broken_in(folder / JOURNAL, BOUNDS), *standstills(found.events)]
    return found


async def _live(
    fleet: Fleet, history: History, rng: random.Random, seconds: float, settings: Mapping[str, object]
) -> None:
    async with running(fleet, settings):
        await _struck(fleet, history, rng, seconds)


async def _struck(fleet: Fleet, history: History, rng: random.Random, seconds: float) -> None:
    async with AsyncBufferClient("ipv4:" + ",".join(fleet.hosts()), OPTIONS) as client:
        await client.create_run(fleet.run_id, fleet.scenario.made_policy())
    fleet.start_clients()
    await _progress(fleet)
    history.note("nemesis", "begins")
    await asyncio.sleep(CALM_S)
    if fleet.scenario.upgraded:
        given = {"what": "the services are upgraded", "kills": False, "lasts_s": 0.0}
        async with history.call("nemesis", "strike", **given) as op:
            await fleet.upgrade()
            op.reply = {}
    nemesis = asyncio.create_task(Nemesis(fleet, history, rng).run())
    try:
        done, _ = await asyncio.wait({nemesis}, timeout=seconds)
        if done:
            await nemesis
    finally:
        nemesis.cancel()
        with suppress(asyncio.CancelledError):
            await nemesis
    history.note("nemesis", "ends")
    await fleet.heal()
    await fleet.finish()
    await last_looks(history, fleet.run_id, [proxy.host for proxy in fleet.proxies])


async def _progress(fleet: Fleet, timeout_s: float = 60.0) -> None:
    """Wait until a version was published. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        # Other processes write these files.
        while not _has_published(fleet):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _has_published(fleet: Fleet) -> bool:
    return any('"publish"' in file.read_text() for file in fleet.folder.glob("trainer-*.jsonl"))


class _environment:  # noqa: N801  # It reads as a function.
    """Variables of this process, and of those that it starts, while the context lasts."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name in self._variables:
            os.environ.pop(name, None)
