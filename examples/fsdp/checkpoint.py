"""The trainer's own checkpoints: model and optimizer, each rank its shards, under the step at which to go on.

Invariant: a directory `step-N` is complete. N is the session's `next_step`: N steps are in these weights.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

_PREFIX = "step-"


def save(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, next_step: int) -> None:
    """Write `directory`/step-N; older ones go. Every rank calls it."""
    aside, final = directory / ".writing", directory / f"{_PREFIX}{next_step:06d}"
    leads = dist.get_rank() == 0
    if leads:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
    dist.barrier()
    save_state(_state(model, optimizer), checkpoint_id=aside)
    if leads:
        older = list(directory.glob(f"{_PREFIX}*"))
        aside.rename(final)
        for path in older:
            shutil.rmtree(path)
    dist.barrier()


def load(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest one, if there is any; the step to go on with. Every rank calls it."""
    found = sorted(directory.glob(f"{_PREFIX}*"))
    if not found:
        return 0
    state = _state(model, optimizer)
    load_state(state, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(found[-1].name.removeprefix(_PREFIX))


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
