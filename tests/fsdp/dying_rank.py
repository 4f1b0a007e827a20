"""A rank of the FSDP example that is killed while the ranks gather the weights after one of its steps.

python -m tests.fsdp.dying_rank STEP ARGUMENTS_OF_THE_TRAINER...
"""

import os
import signal
import sys
from typing import Any

from torch import Tensor

from examples.fsdp import trainer
from trainer_client import TrainerSession
from trainer_client.publish import ShardedWeights
from trainer_client.publish.publication import WeightSource

GATHERED_BEFORE = 3
"""Tensors of that publish."""


def main(step: int, arguments: list[str]) -> int:
    """Train until it is over."""
    publish, gather = TrainerSession.publish, ShardedWeights._whole

    def die_in_the_middle(weights: ShardedWeights, ranks: Any, index: int) -> Tensor:
        if index == GATHERED_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(weights, ranks, index)

    def publish_or_die(session: TrainerSession, source: WeightSource = None) -> int:
        if session.next_step == step + 1:
            ShardedWeights._whole = die_in_the_middle  # type: ignore[assignment,method-assign]
        return publish(session, source)

    TrainerSession.publish = publish_or_die  # type: ignore[assignment,method-assign]
    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
