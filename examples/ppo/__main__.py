"""`python -m examples.ppo`: PPO with a critic and a KL to a reference, both stages between rollout and trainer.

Groups wait until the reference has added its log-probabilities and the critic its values, each in a process of its own.
The trainer's batches have both as columns.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from examples.demo.loop import buffer_tasks
from examples.demo.model import build_model, load_model, save_model, write_weights
from examples.demo.processes import service, sglang, worker
from examples.demo.tasks import ChainSums
from examples.demo.warmup import warm_up
from examples.ppo.critic import Critic, gae
from trainer_client import BufferClient, Policy, SessionOptions
from trainer_client.batch import Batch
from trainer_client.collate import PaddedBatch, collate
from trainer_client.objectives import ppo_loss, selected_logprobs, tis_weights
from trainer_client.publish import FilesPublisher

RUN_ID = "ppo"
STAGES = ("reference", "values")
POLICY = Policy(batch_groups=32, max_queued_groups=64, overflow_action="drop_oldest", max_staleness=4, stages=STAGES)
KL = 0.05
"""Weight of the KL to the reference, in rewards a nat."""


class Trainer:
    """Policy and critic in training."""

    def __init__(self, policy: Qwen3ForCausalLM, critic: Critic) -> None:
        self.policy, self.critic = policy, critic
        parameters = [{"params": policy.parameters(), "lr": 3e-4}, {"params": critic.parameters(), "lr": 1e-3}]
        self._optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)

    def step(self, batch: PaddedBatch) -> dict[str, float]:
        """Make one optimizer step of both; figures from before it."""
        mask, token_ids = batch.loss_mask, batch.token_ids
        reference, old_values = batch.extras["reference_logprobs"], batch.extras["values"]
        assert isinstance(reference, Tensor)  # noqa: S101 - columns by token, not ragged ones
        assert isinstance(old_values, Tensor)  # noqa: S101
        divergence = torch.where(mask, batch.logprobs - reference, 0.0)
        rewards = -KL * divergence
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
        rewards[torch.arange(len(rewards)), last] += batch.rewards
        advantages = gae(rewards, old_values, mask)
        returns = advantages + old_values
        spread = advantages[mask].std() + 1e-6
        logprobs = selected_logprobs(self.policy(input_ids=token_ids).logits, token_ids)
        old_logprobs = logprobs.detach()
        loss = ppo_loss(
            logprobs,
            old_logprobs,
            (advantages - advantages[mask].mean()) / spread,
            mask,
            weights=tis_weights(old_logprobs, batch.logprobs, mask, cap=2.0),
            loss_tokens=batch.total_loss_tokens,
        )
        values = self.critic(token_ids)
        value_loss = (values[mask] - returns[mask]).square().mean()
        self._optimizer.zero_grad()
        (loss + value_loss).backward()
        for part in (self.policy, self.critic):
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        self._optimizer.step()
        explained = 1 - (returns - old_values)[mask].var() / returns[mask].var().clamp_min(1e-6)
        return {
            "exact_match": batch.rewards.mean().item(),
            "kl": divergence[mask].mean().item(),
            "explained": explained.item(),
        }


def train(trainer: Trainer, address: str, folder: Path, steps: int) -> Iterator[dict[str, float]]:
    """Figures of each step."""
    with (
        BufferClient(address) as client,
        FilesPublisher(folder / "weights") as publisher,
        client.session(
            RUN_ID,
            policy=POLICY,
            tasks=buffer_tasks(ChainSums(1)),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0),
        ) as session,
        ExitStack() as stages,
    ):
        for name in STAGES:
            stages.enter_context(_stage(name, address, folder))
        for batch in itertools.islice(session, steps):
            row = trainer.step(collate(batch, extras=("reference_logprobs", "values")))
            trainer.critic.save(folder / f"critic-{batch.step + 1}.safetensors")
            session.publish(lambda directory: write_weights(trainer.policy, directory))
            session.checkpoint()  # nothing is resumed here: what the steps so far had is let go
            yield row | {"staleness": batch.info.staleness_mean, "critic": _critics_age(batch)}


def _critics_age(batch: Batch) -> float:
    """Mean number of steps by which the critic of the batch's values is older than the step."""
    versions = [one.version for group in batch.groups for one in group.stages if one.stage == "values"]
    return batch.step - sum(versions) / len(versions)


class _stage:  # noqa: N801 - used as a function
    """Worker of a stage, for a `with`."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        words = [sys.executable, "-m", "examples.ppo.stages", name, address, RUN_ID, str(folder)]
        self._process = subprocess.Popen(words)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def main(argv: list[str] | None = None) -> int:
    """Print a line for every tenth step; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.ppo", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default 30)")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ppo-") as directory:
        folder = Path(directory)
        policy = build_model(1)
        warm = warm_up(policy, ChainSums(10_001))
        print(f"warm-up: {warm.steps} supervised steps, exact match {warm.exact_match:.2f}", flush=True)
        save_model(policy, folder / "model")
        critic = Critic(load_model(folder / "model"))
        critic.save(folder / "critic-0.safetensors")
        reward = ("--reward", "examples.demo.worker_reward:reward")
        engine = sglang(folder / "model", options.sglang_python, "--dtype=float32")
        with service(folder / "service") as (_, address, _), worker(address, RUN_ID, folder, *reward, *engine):
            print(f"{'step':>5} {'exact match':>12} {'KL':>7} {'explained':>10} {'staleness':>10} {'critic':>7}")
            for step, row in enumerate(train(Trainer(policy, critic), address, folder, options.steps)):
                if step == 0 or step % 10 == 9:
                    figures = (row["exact_match"], row["kl"], row["explained"], row["staleness"], row["critic"])
                    print("{:>5} {:>12.3f} {:>7.3f} {:>10.2f} {:>10.2f} {:>7.1f}".format(step, *figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
