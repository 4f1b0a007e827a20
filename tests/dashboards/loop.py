"""A run at work: the worker that users start, on simulated engines, and a trainer that hardly trains: it is starved."""

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer_client.batch import Group
from trainer_client.client.blocking import BufferClient
from trainer_client.client.driver import ClientOptions
from trainer_client.policy import Policy
from trainer_client.session.plan import SessionOptions
from trainer_client.session.session import TrainerSession
from trainer_client.stages import Stage
from trainer_client.tasks import SamplingParams, Task

RUN = "math"
"""Id of the run that the dashboards show."""
DRAIN_TIMEOUT_S = 30.0
TRAIN_S = 0.05
POLICY = Policy(
    batch_groups=4,
    max_queued_groups=8,
    quota_groups=64,
    max_staleness=4,
    target_staleness_milli=2_000,
    filter_min_response_tokens=1,
    stages=["reference"],
)


def reward(sample: object) -> float:
    """Nobody learns here."""
    return float(getattr(sample, "sample_index", 0))


@contextlib.contextmanager
def worker(address: str, token_file: Path, folder: Path, metrics: str) -> Iterator[None]:
    """Two engines, which make a batch in about a second. `metrics`: host:port where the worker serves its own."""
    command = [
        sys.executable, "-m", "buffer_cli", "worker", "--run", RUN, "--address", address,
        "--token-file", str(token_file), "--reward", f"{__name__}:reward", "--weights-dir", str(folder / "weights"),
        "--simulate", "--engines", "2", "--slots", "8", "--tokens-per-s", "64", "--length-median", "48",
        "--groups-per-engine", "4", "--drain-grace-s", "5", "--progress-every-s", "0",
        "--metrics-listen", metrics,
    ]  # fmt: skip
    log = folder / "worker.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None, f"the worker ended:\n{log.read_text()}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tasks() -> Iterator[Task]:
    """Without end, of two environments."""
    for number in itertools.count():
        environment = "sums" if number % 3 else "products"
        yield Task(
            group_size=4,
            sampling=SamplingParams(max_new_tokens=96),
            prompt_token_ids=[1 + number % 1_000, 1 + number // 1_000],
            environment=environment,
        )


class Trainer(threading.Thread):
    """Pulls, waits TRAIN_S, publishes, checkpoints, until it is told to stop; one evaluation on its way."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(name="trainer", daemon=True)
        self.error: Exception | None = None
        self._client = BufferClient(address, ClientOptions(token=token))
        self._over = threading.Event()

    def run(self) -> None:
        """See Thread."""
        try:
            with (
                self._client,
                self._client.session(
                    RUN, policy=POLICY, tasks=tasks(), options=SessionOptions(pull_timeout_s=60)
                ) as session,
            ):
                self._train(session)
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def end(self) -> None:
        """Stop after the step that is under way, and raise what it failed with."""
        self._over.set()
        self.join(90)
        if self.error is not None:
            raise self.error

    def _train(self, session: TrainerSession) -> None:
        for batch in session:
            self._over.wait(TRAIN_S)
            session.publish()
            session.checkpoint()
            if batch.step == 3:
                session.evaluate(list(itertools.islice(tasks(), 4)))
            if self._over.is_set():
                return


@contextlib.contextmanager
def stage(address: str, token: str) -> Iterator[None]:
    """A worker of the run's stage, which adds a column of zeros. It is given up with the process where it hangs."""

    def zeros(group: Group) -> dict[str, list[np.ndarray]]:
        return {"reference_logprobs": [np.zeros(len(sample.token_ids), np.float32) for sample in group.samples]}

    with Stage(address, RUN, "reference", options=ClientOptions(token=token)) as working:
        thread = threading.Thread(target=working.serve, args=(zeros,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            working.stop()
            thread.join(30)
