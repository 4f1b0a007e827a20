"""`python -m examples.verifiers_async`: verifiers' asynchronous generator over the buffer, on one CPU.

It starts the service and a worker with a simulated engine, which makes tokens and log-probabilities up: the loop is
shown, nothing is learned. The loop is that of verifiers' GRPO trainer: submit batches ahead, get the one of this step,
broadcast and slice it, train, publish.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from examples.demo import vocabulary
from examples.demo.processes import running, service
from trainer_client.integrations.verifiers import (
    AsyncBatchGenerator,
    AsyncDataLoaderWrapper,
    BatchRequest,
    BatchSlice,
    get_batch_slice,
)
from trainer_client.objectives import aipo_loss, selected_logprobs
from trainer_client.publish import FilesPublisher

RUN_ID = "verifiers-async"
GENERATIONS = 4
PROMPTS = 4
AHEAD = 2


class Tokenizer:
    """The demo's vocabulary in the two methods that the generator calls."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return vocabulary.encode(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a completion."""
        kept = (i for i in ids if not skip_special_tokens or i > vocabulary.EOS_ID)
        return "".join(vocabulary.TOKENS[i] for i in kept)


def rows(steps: int) -> list[dict[str, Any]]:
    """A dataset in verifiers' columns, each prompt repeated for its generations."""
    prompts = [f"{10 + i % 90}+{10 + i * 7 % 90}?" for i in range(PROMPTS * steps)]
    return [{"prompt": prompt, "answer": "", "task": "sums"} for prompt in prompts for _ in range(GENERATIONS)]


def request(batch_id: int, batch: list[dict[str, Any]]) -> BatchRequest:
    """A batch of the loader as a request."""
    columns = {name: [row[name] for row in batch] for name in ("prompt", "answer", "task")}
    return BatchRequest(batch_id=batch_id, env_inputs=columns, processing_class=Tokenizer(), mask_env_responses=True)


def loss_of(model: torch.nn.Module, part: BatchSlice) -> torch.Tensor:
    """AIPO on this process's rows; the group's advantages are taken over the whole batch."""
    outputs = part.result.processed_results
    rewards = torch.tensor(outputs.rewards).view(-1, GENERATIONS)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    samples = range(part.start, part.stop)
    ids = [torch.tensor(outputs.prompt_ids[i] + outputs.completion_ids[i]) for i in samples]
    mask = [torch.tensor(outputs.prompt_mask[i] + outputs.completion_mask[i]) for i in samples]
    behaviour = [torch.tensor([0.0] * len(outputs.prompt_ids[i]) + outputs.completion_logprobs[i]) for i in samples]
    token_ids = pad_sequence(ids, batch_first=True)
    return aipo_loss(
        selected_logprobs(model(token_ids), token_ids),
        pad_sequence(behaviour, batch_first=True),
        advantages[part.start : part.stop],
        pad_sequence(mask, batch_first=True).bool(),
        delta=8.0,
    )


def train(generator: AsyncBatchGenerator, steps: int) -> Iterator[str]:
    """`steps` steps on batches that were generated ahead; a line for each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary.VOCAB_SIZE, 32), torch.nn.Linear(32, vocabulary.VOCAB_SIZE)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data: DataLoader[Any] = DataLoader(rows(steps), batch_size=PROMPTS * GENERATIONS, collate_fn=list)  # type: ignore[arg-type]
    loader = AsyncDataLoaderWrapper(data, buffer_size=max(5, 2 * AHEAD))
    submitted = 0
    for step, batch in enumerate(loader):
        while submitted <= min(step + AHEAD, steps - 1):
            future = batch if submitted == step else loader.peek_ahead(submitted - step)[-1]
            generator.submit_batch(request(submitted, future))
            submitted += 1
        part = get_batch_slice(generator, step, rank=0, world_size=1, broadcast=lambda box: box)
        loss = loss_of(model, part)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        generator.publish(lambda folder: torch.save(model.state_dict(), folder / "model.pt"))
        oldest = min(min(versions) for versions in part.result.versions)
        reward = sum(part.result.all_reward_dict["reward"]) / len(part.result.prompts)
        seconds = generator.get_average_generation_time()
        ahead = generator.get_pending_count()
        yield f"{step:>5} {loss.item():>8.4f} {reward:>7.3f} {oldest:>7} {ahead:>6} {seconds:>9.2f}"


def main(argv: list[str] | None = None) -> int:
    """Print a line for every step; 0 when all are done."""
    parser = argparse.ArgumentParser(prog="python -m examples.verifiers_async", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    steps = parser.parse_args(argv).steps
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verifiers-async-")))
        _, address, _ = stack.enter_context(service(scratch / "service"))
        engine = ["--simulate", "--tokens-per-s", "500", "--vocab-size", str(vocabulary.VOCAB_SIZE)]
        reward = ["--reward", "examples.plain.reward:even_share", "--weights-dir", str(scratch / "fetched")]
        flags = ["worker", "--address", address, "--run", RUN_ID, *reward, *engine]
        stack.enter_context(running("rollout worker", flags, scratch / "worker.log"))
        publisher = stack.enter_context(FilesPublisher(scratch / "weights"))
        config = {"base_url": address, "run_id": RUN_ID, "publisher": publisher}
        generator = AsyncBatchGenerator(None, config, "bigrams", {"max_tokens": 24, "temperature": 1.0}, AHEAD)
        generator.start()
        stack.callback(generator.stop)
        print(f"{'step':>5} {'loss':>8} {'reward':>7} {'oldest':>7} {'ahead':>6} {'seconds':>9}")
        for line in train(generator, steps):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
