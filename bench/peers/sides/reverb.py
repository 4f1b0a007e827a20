"""DeepMind's Reverb: a queue table in which every group is one item that is sampled once.

The server is this module, run as a program: PORT SAMPLES TOKENS. It needs dm-reverb and tensorflow, in an environment
of their own. Producers write trajectories of one step, with up to IN_FLIGHT items unconfirmed each; consumers sample
with the numpy client.
"""

import os
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb  # type: ignore[import-not-found]  # of an environment of its own
import tensorflow as tf  # type: ignore[import-untyped]

from bench.peers.groups import Columns, Size
from bench.peers.loops import THREADS, Group, NoFacts, Source, in_threads

TABLE = "groups"
MAX_ITEMS = 4_096
IN_FLIGHT = 8

_NAMES = ("logprobs", "mask", "rewards", "tokens", "uid")


class Producer(NoFacts):
    """A trajectory writer for each thread."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del queue, size
        self._client = reverb.Client(f"localhost:{address['port']}")
        self._writers = [self._client.trajectory_writer(num_keep_alive_refs=1) for _ in range(THREADS)]

    def push(self, group: Group) -> None:
        """Write a group; returns once the server has it."""
        self._write(self._writers[0], group, in_flight=0)

    def flow(self, source: Source) -> None:
        """Write what the source gives."""

        def by(writer: reverb.TrajectoryWriter) -> Callable[[list[Group]], None]:
            return lambda groups: self._write(writer, groups[0], in_flight=IN_FLIGHT)

        in_threads(source, [by(writer) for writer in self._writers])
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """End the writers."""
        for writer in self._writers:
            writer.close()

    def _write(self, writer: reverb.TrajectoryWriter, group: Group, *, in_flight: int) -> None:
        uid, samples = group
        writer.append(
            {
                "logprobs": np.stack([sample.logprobs for sample in samples]),
                "mask": np.stack([sample.mask for sample in samples]),
                "rewards": np.array([sample.reward for sample in samples], np.float32),
                "tokens": np.stack([sample.tokens for sample in samples]),
                "uid": np.int64(uid),
            }
        )
        history = writer.history
        writer.create_item(TABLE, 1.0, {name: history[name][-1:] for name in _NAMES})
        writer.flush(block_until_num_items=in_flight)


class Consumer(NoFacts):
    """Client.sample of a batch, which waits until all of it is there."""

    def __init__(self, queue: str, address: dict[str, str], size: Size) -> None:
        del queue, size
        self._client = reverb.Client(f"localhost:{address['port']}")

    def pull(self, count: int) -> Sequence[Columns]:
        """Sample so many groups; the table lets them go with that."""
        groups = []
        for sample in self._client.sample(TABLE, num_samples=count, emit_timesteps=False):
            logprobs, mask, rewards, tokens, uid = sample.data
            groups.append(Columns(int(uid[0]), tokens[0], logprobs[0], mask[0], rewards[0]))
        return groups

    def close(self) -> None:
        """Nothing is left to acknowledge."""


def serve(port: int, samples: int, tokens: int) -> None:
    """Serve one table of groups of this size, until the process is ended."""
    signature = {
        "logprobs": tf.TensorSpec([1, samples, tokens], tf.float32),
        "mask": tf.TensorSpec([1, samples, tokens], tf.uint8),
        "rewards": tf.TensorSpec([1, samples], tf.float32),
        "tokens": tf.TensorSpec([1, samples, tokens], tf.int32),
        "uid": tf.TensorSpec([1], tf.int64),
    }
    table = reverb.Table.queue(TABLE, max_size=MAX_ITEMS, signature=signature)
    reverb.Server(tables=[table], port=port).wait()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:4]))
