"""A job of Miles or slime in miniature, on the stand-ins of their published contract (examples/miles/stand_in.py)."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.miles import stand_in
from trainer_client.integrations.miles.contract import Framework


def length_reward(sample: Any) -> float:
    """For workers: what the adapter's metadata says of the sample, plus its length."""
    return float(int(sample.metadata["label"]) + len(sample.response_ids))


@contextmanager
def installed(name: str) -> Iterator[None]:
    """The stand-ins for `name` in sys.modules."""
    made = stand_in.modules(name)
    assert not made.keys() & sys.modules.keys()
    sys.modules.update(made)
    try:
        yield
    finally:
        for module in made:
            del sys.modules[module]


def prompts(folder: Path, count: int, name: str = "prompts") -> Path:
    """A JSON-lines file of `count` prompts; the label is the number of the line."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"what is {i}?", "label": str(i)}) + "\n" for i in range(count)))
    return path


@dataclass
class Job:
    """A training job: its arguments, and a data source that begins anew with every process."""

    args: Namespace
    framework: Framework

    def source(self) -> stand_in.RolloutDataSource:
        return stand_in.RolloutDataSource(self.args)


def job(folder: Path, address: str, run_id: str, name: str = "miles", **values: object) -> Job:
    args = stand_in.arguments(
        prompt_data=str(prompts(folder, 6)),
        save=str(folder),
        rollout_buffer_address=address,
        rollout_buffer_run=run_id,
        rollout_buffer_timeout_s=60,
        **{"rollout_batch_size": 3, "n_samples_per_prompt": 2, **values},
    )
    return Job(args, Framework(name))
