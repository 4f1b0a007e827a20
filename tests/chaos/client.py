"""Clients of a chaos run, each a process of its own, to be killed and stopped at any moment.

python -m tests.chaos.client trainer|worker FOLDER NAME LIFE: in FOLDER lie `bout.json`, which says what to do, and
what the clients write: their histories, and what the trainer keeps. `enough` appears there when the bout is to end,
`calm` when workers are to finish what there is.
"""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.history import History
from tests.faults.observer import observe
from tests.faults.trainer import Plan, Trainer
from tests.faults.workers import Worker

ENOUGH, CALM, BOUT, KEPT = "enough", "calm", "bout.json", "kept.json"
WORKERS_EACH = 2
LIVES_APART = 1_000


@dataclass(frozen=True)
class Place:
    """Folder of a bout, as one life of a client sees it."""

    folder: Path
    name: str
    life: int

    @property
    def run_id(self) -> str:
        """Run of the bout."""
        found: str = json.loads((self.folder / BOUT).read_text())["run_id"]
        return found

    def rng(self) -> random.Random:
        """Chance of this life."""
        return random.Random(f"{self.run_id}/{self.name}/{self.life}")

    def history(self) -> History:
        """History of this life, in a file of its own."""
        return History(file=(self.folder / f"{self.name}-{self.life}.jsonl").open("w"))

    def target(self, rng: random.Random) -> Callable[[], str]:
        """Addresses of the replicas, in an order that changes."""
        hosts: list[str] = json.loads((self.folder / BOUT).read_text())["hosts"]
        return lambda: "ipv4:" + ",".join(rng.sample(hosts, len(hosts)))

    def has(self, file: str) -> bool:
        """True when there is such a file."""
        return (self.folder / file).exists()


class KeepingTrainer(Trainer):
    """Trainer that keeps in a file what its next process has to know."""

    place: Place

    def keep(self) -> None:
        """Write it, whole or not at all."""
        kept = {"term": self.term, "saved_step": self.saved_step, "trained": self.trained, "last": self.plan.last_step}
        new = self.place.folder / f"{KEPT}.new"
        new.write_text(json.dumps(kept))
        new.replace(self.place.folder / KEPT)
        if self.plan.last_step is not None:
            (self.place.folder / CALM).touch()


async def train(place: Place) -> None:
    """Train to the end of the bout, from where the last life was."""
    rng, history = place.rng(), place.history()
    plan = Plan(0, 0, lambda: place.has(ENOUGH))
    trainer = KeepingTrainer(place.run_id, history, rng, place.target(rng), plan)
    trainer.place = place
    if place.has(KEPT):
        kept = json.loads((place.folder / KEPT).read_text())
        trainer.term, trainer.saved_step, trainer.trained = kept["term"], kept["saved_step"], kept["trained"]
        plan.last_step = kept["last"]
        history.note("trainer", "crash")
    observing = asyncio.create_task(observe(trainer, trainer.target))
    try:
        await trainer.run()
    finally:
        observing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await observing


async def work(place: Place) -> None:
    """Work under a few names, until killed."""
    rng, history = place.rng(), place.history()
    workers = [
        Worker(
            f"{place.name}.{number}",
            place.run_id,
            history,
            random.Random(rng.getrandbits(64)),
            place.target(rng),
            lambda: place.has(CALM),
            lives=place.life * LIVES_APART,
        )
        for number in range(WORKERS_EACH)
    ]
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(worker.run())


def main() -> None:
    """Be the client that the command line names."""
    kind, folder, name, life = sys.argv[1:]
    place = Place(Path(folder), name, int(life))
    asyncio.run({"trainer": train, "worker": work}[kind](place))


if __name__ == "__main__":
    main()
