"""`python -m examples.prime_rl`: a PRIME-RL style trainer over the buffer, on one CPU.

It starts the service and a worker with a simulated engine, which makes tokens and log-probabilities up: the loop is
shown, nothing is learned. The loop is that of PRIME-RL v0.5.0's train.py: broadcast policy n, wait for rollouts n,
train on packed micro-batches with AIPO. The weights lie in OUT/weights/step_N.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from examples.demo import vocabulary
from examples.demo.processes import running, service
from trainer_client import BufferClient, SamplingParams, Task
from trainer_client.integrations.prime_rl import (
    PrimeRLConfig,
    PrimeRLData,
    PrimeRLWeights,
    StepPublisher,
    TensorMicroBatch,
    open_prime_rl,
)
from trainer_client.objectives import aipo_loss, selected_logprobs

RUN_ID = "prime-rl"


def tasks(group_size: int) -> Iterator[Task]:
    """Sums of two numbers, without end."""
    for i in itertools.count():
        yield Task(
            task_id=f"t{i:06d}",
            group_size=group_size,
            sampling=SamplingParams(max_new_tokens=24, temperature=1.0),
            prompt_token_ids=vocabulary.encode(f"{10 + i % 90}+{10 + i * 7 % 90}?"),
        )


def loss_of(model: torch.nn.Module, micro: TensorMicroBatch, loss_tokens: int) -> torch.Tensor:
    """AIPO of one pack. What a rollout's first token has from the rollout before it, its mask leaves out."""
    logits = model(micro["input_ids"]) / micro["temperatures"][..., None]
    return aipo_loss(
        selected_logprobs(logits, micro["input_ids"]),
        micro["inference_logprobs"],
        micro["advantages"],
        micro["loss_mask"],
        delta=8.0,
        loss_tokens=loss_tokens,
    )


def train(data: PrimeRLData, weights: PrimeRLWeights, max_steps: int) -> Iterator[str]:
    """`max_steps` steps; a line for each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary.VOCAB_SIZE, 32), torch.nn.Linear(32, vocabulary.VOCAB_SIZE)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def save(folder: Path) -> None:
        torch.save(model.state_dict(), folder / "model.pt")

    for n in range(max_steps):
        if n > 0:
            weights.broadcast_weights(save, step=n)
        data.wait_for_batch()
        micro_batches = data.get_batch()
        optimizer.zero_grad()
        total = 0.0
        for micro in micro_batches:
            loss = loss_of(model, micro, data.batch.info.total_loss_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        oldest = min(group.head_version for group in data.batch.groups)
        rewards = [sample.reward for sample in data.batch.samples]
        mean = sum(rewards) / len(rewards)
        yield f"{n:>5} {total:>8.4f} {mean:>7.3f} {oldest:>7} {len(micro_batches):>6}"
    weights.broadcast_weights(save, step=max_steps)


def main(argv: list[str] | None = None) -> int:
    """Print a line for every step; 0 when all are done."""
    parser = argparse.ArgumentParser(prog="python -m examples.prime_rl", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--max-async-level", type=int, default=2, help="k (default 2)")
    parser.add_argument("--out", type=Path, help="output directory; default: a temporary one")
    options = parser.parse_args(argv)
    config = PrimeRLConfig(
        batch_size=32,
        rollouts_per_example=4,
        seq_len=256,
        pad_to_multiple_of=8,
        max_async_level=options.max_async_level,
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prime-rl-")))
        _, address, _ = stack.enter_context(service(scratch / "service"))
        engine = ["--simulate", "--tokens-per-s", "500", "--vocab-size", str(vocabulary.VOCAB_SIZE)]
        reward = ["--reward", "examples.plain.reward:even_share", "--weights-dir", str(scratch / "fetched")]
        flags = ["worker", "--address", address, "--run", RUN_ID, *reward, *engine]
        stack.enter_context(running("rollout worker", flags, scratch / "worker.log"))
        publisher = stack.enter_context(StepPublisher(options.out or scratch / "output"))
        client = stack.enter_context(BufferClient(address))
        feed = tasks(config.rollouts_per_example)
        data, weights = stack.enter_context(open_prime_rl(client, RUN_ID, config, tasks=feed, publisher=publisher))
        print(f"{'n':>5} {'loss':>8} {'reward':>7} {'oldest':>7} {'packs':>6}")
        for line in train(data, weights, options.steps):
            print(line, flush=True)
        print("weights of steps " + ", ".join(map(str, publisher.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
