"""A bridge to PRIME-RL's trainer in a thread of its own, and what tests of it ask."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from tests.integrations.prime_rl_trainer import PATIENCE_S
from trainer_client import BufferClient, SamplingParams, Task
from trainer_client.integrations.prime_rl import Bridge, BridgeOptions, Packing
from trainer_client.publish import FilesPublisher

N = 4
"""Groups of a step."""


def tasks(count: int | None = None) -> Iterator[Task]:
    for i in itertools.count() if count is None else range(count):
        sampling = SamplingParams(max_new_tokens=16)
        yield Task(task_id=f"t{i:05d}", group_size=2, sampling=sampling, prompt_token_ids=[1, 2, 3])


class Carried:
    """A bridge in a thread of its own."""

    def __init__(self, client: BufferClient, run_id: str, root: Path, **given: Any) -> None:
        feed = given.pop("tasks", tasks)
        packing = Packing(seq_len=32, data_ranks=given.pop("ranks", 1))
        options = BridgeOptions(**{"output_dir": root, "batch_groups": N, "poll_s": 0.02, "packing": packing, **given})
        self.publisher = FilesPublisher(root / "published", keep=20)
        self.bridge = Bridge(client, run_id, options, tasks=feed, publisher=self.publisher)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.bridge.run()
        except BaseException as error:  # noqa: BLE001 - seen by the test's own thread
            self.failure = error

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bridge.stop()
        self.join()

    def join(self) -> None:
        """Wait for its end; raises what ended it."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure


def groups_of_step(client: BufferClient, run_id: str, step: int) -> set[tuple[int, ...]]:
    """Token ids of the samples that the run's step consists of."""
    term = client.run(run_id).term
    batch = client.pull(run_id, term=term, step=step, timeout_s=30)
    return {tuple(sample.token_ids.tolist()) for sample in batch.samples if sample.loss_tokens}


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it does not become true")
