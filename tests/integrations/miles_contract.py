"""A job of Miles or slime in miniature.

On their own classes where a checkout is named (tests/support/upstreams.py), else on the stand-ins of their published
contract (examples/miles/stand_in.py).
"""

import functools
import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.miles import stand_in
from tests.support.upstreams import checkout
from trainer_client.integrations.miles.contract import Framework

HIGHEST_CHARACTER = 1_000


def length_reward(sample: Any) -> float:
    """Reward for workers: what the adapter's metadata says of the sample, plus its length."""
    return float(int(sample.metadata["label"]) + len(sample.response_ids))


@functools.cache
def types_of(name: str) -> Any:
    """The classes and functions of package `name` that the adapter and its tests meet, as attributes."""
    real = checkout(name) is not None
    found = SimpleNamespace()
    for path, contents in stand_in.CONTENTS[name].items():
        vars(found).update(contents)
        if real:
            module = importlib.import_module(f"{name}.{path}")
            vars(found).update({attribute: getattr(module, attribute) for attribute in contents})
    return found


@contextmanager
def installed(name: str) -> Iterator[None]:
    """Package `name` can be imported."""
    if checkout(name) is not None:
        yield
        return
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
    rows = [{"text": f"what is {i}?", "label": str(i), "metadata": {"row": i}} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def hf_checkpoint(folder: Path) -> str:
    """A directory with the stand-ins' tokenizer, id = code point, in the form that real packages load."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    saved = folder / "hf_checkpoint"
    if not saved.exists():
        made = Tokenizer(models.WordLevel({chr(i): i for i in range(HIGHEST_CHARACTER)}, unk_token=chr(0)))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        wrap: Any = PreTrainedTokenizerFast
        wrap(tokenizer_object=made, clean_up_tokenization_spaces=False).save_pretrained(saved)
    return str(saved)


@dataclass
class Job:
    """A training job: its arguments, and a data source that begins anew with every process."""

    args: Namespace
    framework: Framework

    def source(self) -> Any:
        return types_of(self.framework.name).RolloutDataSourceWithBuffer(self.args)


def job(folder: Path, address: str, run_id: str, name: str = "miles", **values: object) -> Job:
    args = stand_in.arguments(
        prompt_data=str(prompts(folder, 6)),
        hf_checkpoint=hf_checkpoint(folder) if checkout(name) else "none",
        save=str(folder),
        load=str(folder),
        rollout_buffer_address=address,
        rollout_buffer_run=run_id,
        rollout_buffer_timeout_s=60,
        **{"rollout_batch_size": 3, "n_samples_per_prompt": 2, **values},
    )
    return Job(args, Framework(name))
