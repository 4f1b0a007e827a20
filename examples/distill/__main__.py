"""`python -m examples.distill`: on-policy distillation, a student that learns from a teacher on its own samples.

The student's engine generates; a second SGLang server, the teacher's, is asked by the worker's reward function how
likely each of these tokens is. The trainer takes the difference as each token's advantage, which is the gradient of the
reverse KL. No reward is trained on.
"""

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from examples.demo.loop import buffer_tasks
from examples.demo.model import build_model, save_model, write_weights
from examples.demo.processes import service, sglang, worker
from examples.demo.tasks import ChainSums
from examples.demo.warmup import WarmUpConfig, warm_up
from rollout_workers.engine.sglang.launch import SglangLauncher, free_port
from rollout_workers.engine.sglang.server import SglangServerOptions
from trainer_client import BufferClient, Policy, SessionOptions
from trainer_client.collate import PaddedBatch, collate
from trainer_client.objectives import policy_gradient_loss, selected_logprobs, tis_weights
from trainer_client.publish import FilesPublisher

RUN_ID = "distill"
POLICY = Policy(batch_groups=32, max_queued_groups=32, overflow_action="drop_oldest", max_staleness=2)


def train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: PaddedBatch) -> dict[str, float]:
    """One optimizer step; exact match, and reverse KL to the teacher in nats a token, both from before it."""
    teacher = batch.extras["teacher_logprobs"]
    assert isinstance(teacher, torch.Tensor)  # noqa: S101 - a column by token, not a ragged one
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    logprobs = selected_logprobs(logits, batch.token_ids)
    # log π_teacher − log π_student of what the student drew: its mean is minus the reverse KL, and a baseline besides.
    advantages = teacher - logprobs.detach()
    advantages = advantages - advantages[batch.loss_mask].mean()
    loss = policy_gradient_loss(
        logprobs,
        advantages,
        batch.loss_mask,
        weights=tis_weights(logprobs.detach(), batch.logprobs, batch.loss_mask, cap=2.0),
        loss_tokens=batch.total_loss_tokens,
    )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    drawn = batch.logprobs[batch.loss_mask] - teacher[batch.loss_mask]
    return {"exact_match": batch.rewards.mean().item(), "reverse_kl": drawn.mean().item()}


def train(student: Qwen3ForCausalLM, address: str, scratch: Path, steps: int) -> Iterator[dict[str, float]]:
    """Figures of each step."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4, weight_decay=0.0)
    with (
        BufferClient(address) as client,
        FilesPublisher(scratch / "weights") as publisher,
        client.session(
            RUN_ID,
            policy=POLICY,
            tasks=buffer_tasks(ChainSums(1)),
            publisher=publisher,
            options=SessionOptions(pull_timeout_s=300.0),
        ) as session,
    ):
        for batch in itertools.islice(session, steps):
            yield train_step(student, optimizer, collate(batch, extras=("teacher_logprobs",)))
            session.publish(lambda directory: write_weights(student, directory))
            session.checkpoint()  # nothing is resumed here: what the steps so far had is let go


def models(scratch: Path, *, teacher_at: float, student_at: float) -> Qwen3ForCausalLM:
    """Warm both up to an exact match, write them, and return the student."""
    student = build_model(1)
    for name, model, target in (("teacher", build_model(2), teacher_at), ("student", student, student_at)):
        report = warm_up(model, ChainSums(1_001), WarmUpConfig(target_exact_match=target, max_steps=1_500))
        print(f"{name}: exact match {report.exact_match:.2f} after {report.steps} supervised steps", flush=True)
        save_model(model, scratch / name)
    return student


async def main(argv: list[str] | None = None) -> int:
    """Print a line for every tenth step; 0 when all came."""
    parser = argparse.ArgumentParser(prog="python -m examples.distill", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="distill-") as directory:
        scratch = Path(directory)
        student = models(scratch, teacher_at=0.9, student_at=0.3)
        teacher = SglangServerOptions(
            python=options.sglang_python,
            model_path=scratch / "teacher",
            log_path=scratch / "teacher.log",
            dtype="float32",
            port=free_port(),
        )
        reward = ("--reward", "examples.distill.teacher:reward")
        engine = sglang(scratch / "student", options.sglang_python, "--dtype=float32")
        launcher = SglangLauncher(teacher)
        os.environ["TEACHER_URL"] = launcher.base_url
        # Both engines start side by side; there is no task before the trainer's session.
        with service(scratch / "service") as (_, address, _), worker(address, RUN_ID, scratch, *reward, *engine):
            async with launcher:
                await asyncio.to_thread(_print, train(student, address, scratch, options.steps))
    return 0


def _print(rows: Iterator[dict[str, float]]) -> None:
    print(f"{'step':>5} {'exact match':>12} {'reverse KL':>11}")
    for step, row in enumerate(rows):
        if step == 0 or step % 10 == 9:
            print(f"{step:>5} {row['exact_match']:>12.3f} {row['reverse_kl']:>11.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
