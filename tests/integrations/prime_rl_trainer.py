"""Steps of PRIME-RL's trainer with its output directory, without a model; and samples to pack.

`decode` reads rank files by the documented layout. In tests/upstreams the trainer's own code does.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from buffer_wire.codec import Delivered, join_group
from rollout_buffer.v1 import groups_pb2
from tests.support.push import Extra, GroupArrays, SampleArrays
from trainer_client.batch import Group
from trainer_client.integrations.prime_rl.wire import FIELDS

PATIENCE_S = 60.0


def decode(content: bytes) -> list[dict[str, Any]]:
    """Micro-batches by field, without those that were left out."""
    return [dict(zip(FIELDS, values, strict=False)) for values in msgpack.unpackb(content)]


class FileTrainer:
    """One life of a trainer that begins at `step`; a later one is another object over the same directory."""

    def __init__(self, root: Path, *, step: int = 1, ranks: int = 1) -> None:
        self.root = root
        self.step = step
        self.ranks = ranks
        self.broadcast(step - 1)

    def broadcast(self, step: int) -> None:
        """v(step), and those of two steps ago removed."""
        folder = self.root / "broadcasts" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(weights_of(step))
        (folder / "STABLE").touch()
        if step == self.step:
            shutil.rmtree(self.root / "broadcasts" / f"step_{max(step - 2, 0)}", ignore_errors=True)

    def rollouts(self) -> list[list[dict[str, Any]]]:
        """Rollouts of its step, for each rank."""
        paths = [self.root / "rollouts" / f"step_{self.step}" / f"rank_{rank}.bin" for rank in range(self.ranks)]
        deadline = time.monotonic() + PATIENCE_S
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"no rollouts of step {self.step}"
            time.sleep(0.02)
        return [decode(path.read_bytes()) for path in paths]

    def finish(self, *, checkpoint: bool = False) -> None:
        """The step is trained: v(step), perhaps a checkpoint, and on to the next."""
        self.broadcast(self.step)
        if checkpoint:
            folder = self.root / "checkpoints" / f"step_{self.step}" / "trainer"
            folder.mkdir(parents=True)
            (folder / ".metadata").touch()
        self.step += 1


def weights_of(step: int) -> bytes:
    """The file of v(step)."""
    return bytes([step]) * 64


def group_of(
    *rewards: float,
    lengths: Sequence[int],
    prompt_len: int = 2,
    environment: str = "math",
    columns: Sequence[str] = (),
    experts: bool = False,
    rows: Sequence[tuple[int, bool]] = (),
) -> Group:
    """Samples of `lengths` tokens, token t of sample i being 100 i + t. `columns`: of floats, i + t / 8. `rows`: their
    trajectories, and whether they are trainable.
    """
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        trajectory, trainable = rows[i] if rows else (0, True)
        mask = (trainable * (np.arange(length) >= prompt_len)).astype(np.uint8)
        samples.append(
            SampleArrays(
                token_ids=np.arange(100 * i, 100 * i + length, dtype=np.int32),
                logprobs=-0.25 * mask.astype(np.float32) * (i + 1),
                loss_mask=mask,
                prompt_len=prompt_len,
                reward=reward,
                spans=[(1, 0, prompt_len, length)],
                trajectory=trajectory,
                trainable=trainable,
            )
        )
    extras = {
        name: Extra(
            axis=groups_pb2.AXIS_TOKEN,
            arrays=[np.arange(length, dtype=np.float32) / 8 + i for i, length in enumerate(lengths)],
        )
        for name in columns
    }
    if experts:
        routed = [np.full((length, 2, 1), i, np.uint8) for i, length in enumerate(lengths)]
        extras["routed_experts"] = Extra(axis=groups_pb2.AXIS_TOKEN, arrays=routed)
    arrays = GroupArrays(task_id="t", samples=samples, extras=extras, environment=environment)
    return Group.of(Delivered(b"".join(join_group(*arrays.to_wire())), 1, 0, 0), 0)
