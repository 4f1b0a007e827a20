"""Programs that kill themselves (kill -9) in the middle of something, each time at the place that they are told.

python -m tests.faults.dying trainer ADDRESS FOLDER KIND: a trainer with a journal in place of a model. It goes on from
the last checkpoint in it, and dies at the next place that its kind of work names, once at each.
python -m tests.faults.dying worker …: `rollout-buffer worker`, which dies while it makes a file of a patch, or
fetches an adapter.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from buffer_wire.weights import patch
from buffer_wire.weights.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LORA
from tests.faults.kinds_of_work import KINDS, KINDS_OF_WEIGHTS, POLICY, STEPS, Kind, digest
from trainer_client import BufferClient, ClientOptions, SessionOptions
from trainer_client.publish import AdapterPublisher, FilesPublisher, files, patches

RUN = "r"
MODEL = "model.safetensors"
WORDS = 150_000
CHECKPOINT_EVERY = 2


def model(version: int) -> bytes:
    """Weights of which each version changes one in a hundred."""
    words = np.random.default_rng(0).integers(0, 1 << 16, WORDS, dtype=np.uint16)
    for step in range(version):
        words[step::100] += 1
    return words.tobytes()


def die() -> NoReturn:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


# ── the trainer ──────────────────────────────────────────────────────────────


class Journal:
    """Lines of JSON, each written at once: what was trained in which step, checkpoints, deaths, and the test's ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """Everything so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def of(self, what: str) -> list[Any]:
        """Values under a name, in order."""
        return [line[what] for line in self.lines() if what in line]

    def write(self, **line: object) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


def train(address: str, folder: Path, kind: Kind) -> None:
    """Train to the end, or to the next death."""
    journal = Journal(folder / "journal")
    next_step = max(journal.of("checkpoint"), default=None)
    place = next((place for place in kind.deaths if place not in journal.of("death")), "")
    with (
        BufferClient(address, ClientOptions(timeout_s=60)) as client,
        FilesPublisher(folder / "published", serve="http", patches=0 if kind.adapters else 2) as publisher,
        client.session(
            RUN,
            policy=POLICY,
            tasks=kind.tasks(),
            publisher=AdapterPublisher(publisher) if kind.adapters else publisher,
            next_step=next_step,
            options=SessionOptions(pull_timeout_s=90, max_pending_tasks=16, chunk_tasks=4),
        ) as session,
    ):
        # Patches are of versions that this life has published, too: it lives for some steps.
        last_step = session.next_step + 2

        def arrive(at: str) -> None:
            if at == place and session.next_step >= last_step:
                journal.write(death=at)
                die()

        _set_traps(publisher, arrive)
        for batch in session:
            for group in batch.groups:
                kind.check_group(group, partial(client.read_blob, RUN))
            for sample in batch.samples:
                kind.check(sample)
            _hold(journal, batch.step)
            journal.write(step=[batch.step, {group.task_id: digest(group) for group in batch.groups}])
            arrive("pulled")
            session.publish(partial(_save_adapter if kind.adapters else _save, model(session.version + 1), arrive))
            arrive("published")
            if session.next_step % CHECKPOINT_EVERY == 0:
                journal.write(checkpoint=session.next_step)
                session.checkpoint()


def _hold(journal: Journal, step: int) -> None:
    """Wait until the test lets it go on to this step, where it has set an end."""
    while step >= (journal.of("end") or [STEPS])[-1]:
        time.sleep(0.02)


def _save_adapter(content: bytes, arrive: Callable[[str], None], directory: Path) -> None:
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": LORA, "r": 8}))
    arrive("between")
    _save(content, arrive, directory, ADAPTER_WEIGHTS)


def _save(content: bytes, arrive: Callable[[str], None], directory: Path, name: str = MODEL) -> None:
    with (directory / name).open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        arrive("saving")
        file.write(content[len(content) // 2 :])


def _set_traps(publisher: FilesPublisher, arrive: Callable[[str], None]) -> None:
    """Have it arrive at the places within a publish."""
    patched, noted = patches.with_patches, publisher._save

    def with_patches(directory: Path, listed: Any, bases: Any) -> Any:
        patched(directory, listed, bases[:1])
        for made in directory.glob("*.patch"):
            arrive("patching")
            made.unlink()
        return patched(directory, listed, bases)

    def save(name: str, record: Any) -> None:
        if record.committed_steps is None:
            arrive("renamed")
        noted(name, record)
        if record.committed_steps is None:
            arrive("written")

    setattr(files, "with_patches", with_patches)  # noqa: B010 - its own name in that module
    publisher._save = save  # type: ignore[method-assign]


# ── the worker ───────────────────────────────────────────────────────────────


def work(arguments: list[str]) -> None:
    """A worker that dies when it has made half of a file of a patch, or fetched half of an adapter's weights."""
    from buffer_cli.main import app
    from rollout_workers.weights.fetching import earlier
    from rollout_workers.weights.transfer.download import Download

    def apply_patch(base: BinaryIO, changes: BinaryIO, take: Callable[[bytes], object]) -> None:
        made = bytearray()
        patch.apply_patch(base, changes, made.extend)
        take(bytes(made[: len(made) // 2]))
        die()

    fetch = Download.run

    async def run(download: Download, *args: Any, **kwargs: Any) -> None:
        await fetch(download, *args, **kwargs)
        if download._target.name == ADAPTER_WEIGHTS:
            os.truncate(download._target, download._target.stat().st_size // 2)
            die()

    setattr(earlier, "apply_patch", apply_patch)  # noqa: B010 - its own name in that module
    setattr(Download, "run", run)  # noqa: B010
    app(["worker", *arguments])


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(sys.argv[2:])
    else:
        train(sys.argv[2], Path(sys.argv[3]), (KINDS | KINDS_OF_WEIGHTS)[sys.argv[4]])
