"""Weights on their way from verl's actor to the run: the sending end of a checkpoint engine, by verl's registry."""
# ruff: noqa: ANN401 - verl has no types that mypy sees

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from buffer_wire.errors import InvalidField
from trainer_client.publish.named_tensors import specs_of
from trainer_client.publish.saving import save_tensors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from torch import Tensor

    from trainer_client.publish.collective.plan import TensorSpec

BACKEND = "rollout_buffer"
"""Name of the checkpoint engine in verl's registry, and of the folder beside verl's checkpoints."""


@CheckpointEngineRegistry.register(BACKEND)
class BufferWeights(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """Sending end in each rank of the actor: rank 0 saves the weights as safetensors, for the rollouter to publish."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - verl's
        self._is_master = is_master
        self._directory = Path()
        self._specs: tuple[TensorSpec, ...] = ()

    def prepare(self) -> dict[str, Any]:
        """Return nothing that the other end needs."""
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,  # noqa: ARG003 - verl's
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every rank of the actor of the directory that the rollouter named."""
        return {"directory": [metadata[-1]["directory"]] * actor_wg_world_size}, {}

    def init_process_group(self, **named: Any) -> None:
        """Take the directory."""
        self._directory = Path(named["directory"])

    async def send_weights(self, weights: "Iterator[tuple[str, Tensor]]", global_steps: int | None = None) -> None:
        """Save the weights below the directory, as global_step_N. Ranks that shard the model take part in every tensor.

        The first time they are in rank 0's memory as a whole, later one tensor after another.
        """
        if not self._is_master:
            for _ in weights:
                pass
            return
        whole = self._directory / f"global_step_{global_steps}"
        part = whole.with_suffix(".partial")
        for left_behind in (whole, part):
            shutil.rmtree(left_behind, ignore_errors=True)
        part.mkdir(parents=True)
        if not self._specs:
            held = [(name, tensor.detach().cpu()) for name, tensor in weights]
            self._specs, _ = specs_of(lambda: held)
            weights = iter(held)
        save_tensors(lambda: weights, part, specs=self._specs)
        part.rename(whole)

    def finalize(self) -> None:
        """Do nothing: there is no group of processes."""

    async def receive_weights(self, global_steps: int | None = None) -> "AsyncGenerator[tuple[str, Tensor], None]":
        """Raise InvalidField: no engine of verl's is here."""
        raise InvalidField("receive_weights", global_steps, "the buffer's workers, which load what is published")
