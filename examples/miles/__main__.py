"""`python -m examples.miles`: the loop of Miles' train_async.py over the buffer, with everything around it.

Miles itself is not used: it needs GPUs, Ray and Megatron. Its classes are stand-ins written from its published contract
(stand_in.py), the engine is simulated, and the training is left out. What is real: the rollout function, the data
source's feeding, the service, the worker, the publishing, and the order in which train_async.py does these things.
"""

import argparse
import json
import logging
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from examples.demo.processes import service, worker
from examples.miles import stand_in
from trainer_client.integrations.miles import (
    checkpoint_saved,
    generate_rollout_fully_async,
    publish_weights,
    stop_global_worker,
)

RUN_ID = "miles-example"


def train_async(args: Namespace) -> Iterator[tuple[int, stand_in.RolloutFnTrainOutput]]:
    """The loop of train_async.py, its remote calls as calls in a thread."""
    data_source = stand_in.RolloutDataSourceWithBuffer(args)
    with ThreadPoolExecutor(1) as manager:

        def generate(rollout_id: int) -> object:
            return generate_rollout_fully_async(args, rollout_id, data_source)

        ahead = manager.submit(generate, args.start_rollout_id)
        for rollout_id in range(args.start_rollout_id, args.num_rollout):
            output = ahead.result()
            if rollout_id + 1 < args.num_rollout:
                ahead = manager.submit(generate, rollout_id + 1)
            # actor_model.train(rollout_id, output)
            yield rollout_id, output  # type: ignore[misc]
            if (rollout_id + 1) % args.save_interval == 0:
                data_source.save(rollout_id)
            if (rollout_id + 1) % args.update_weights_interval == 0:
                ahead.result()
                # actor_model.update_weights(), and the line after it:
                publish_weights(args, rollout_id)
            if (rollout_id + 1) % args.save_interval == 0:
                checkpoint_saved(args, rollout_id)


def reward(sample: object) -> float:
    """Reward of the worker: the share of small letters in the response."""
    ids = sample.response_ids  # type: ignore[attr-defined]  # a RewardInput of the worker's package
    return float(((ids >= ord("a")) & (ids <= ord("z"))).mean())


def described(output: stand_in.RolloutFnTrainOutput) -> str:
    """One line of what a rollout holds."""
    samples = [sample for group in output.samples for sample in group]
    mean = sum(cast("float", sample.reward) for sample in samples) / len(samples)
    version = (output.metrics or {})["rollout/fully_async/train_version"]
    return (
        f"{len(output.samples)} groups, {len(samples)} samples from index {samples[0].index} on, "
        f"mean reward {mean:.3f}, trained into version {version + 1}"
    )


def main(argv: list[str] | None = None) -> int:
    """Print a line for every rollout; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.miles", description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=6, help="rollouts to train on (default 6)")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    stand_in.install("miles")
    with tempfile.TemporaryDirectory(prefix="miles-") as scratch:
        folder = Path(scratch)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"text": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(100)))
        with service(folder / "service") as (_, address, _):
            args = stand_in.arguments(
                prompt_data=str(prompts), save=str(folder), num_rollout=options.rollouts, save_interval=2,
                rollout_buffer_address=address, rollout_buffer_run=RUN_ID,
            )  # fmt: skip
            reward = ("--reward", "examples.miles.__main__:reward")
            engine = ("--simulate", "--tokens-per-s", "2000", "--vocab-size", "128", "--length-median", "8")
            with worker(address, RUN_ID, folder, *reward, *engine):
                try:
                    for rollout_id, output in train_async(args):
                        print(f"rollout {rollout_id}: {described(output)}")
                finally:
                    stop_global_worker()
    return 0


if __name__ == "__main__":
    sys.exit(main())
