"""One rank of the trainer. `python -m examples.fsdp` starts four; on a real cluster it is torchrun that would.

Every rank iterates over its shard of the step's batch, and all take the optimizer step together. A rank that is lost
ends the others; started again they go on from the last checkpoint, with the batches that they had.
"""

import argparse
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.fsdp import checkpoint, records
from examples.fsdp.model import build_model, shard
from examples.fsdp.tasks import tasks
from trainer_client import Batch, BufferClient, Policy, Resumed, SessionOptions, TrainerSession
from trainer_client.collate import collate
from trainer_client.objectives import aipo_loss, grpo_advantages, selected_logprobs
from trainer_client.publish import FilesPublisher, PublishFailed

RUN_ID = "fsdp"
BATCH_GROUPS = 32
POLICY = Policy(batch_groups=BATCH_GROUPS, max_queued_groups=2 * BATCH_GROUPS, overflow_action="block", max_staleness=4)
_LEARNING_RATE = 3e-3
_MAX_GRAD_NORM = 1.0
_DELTA = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Settings, the same on every rank but for the rank."""

    address: str
    """host:port of the service."""
    out: Path
    """Folder of checkpoints, weights and records; all ranks see it."""
    steps: int
    rank: int
    world_size: int
    checkpoint_every: int = 3
    """Distance in steps."""
    keep_versions: int = 3
    """Newest versions of the weights that stay on disk in any case."""
    timeout_s: float = 120.0
    """Longest wait of a rank for the others, and for a batch."""
    seed: int = 1


class RankLost(RuntimeError):
    """Another rank is gone, or stands still; the message says at what."""


def train(options: TrainerOptions, on_step: Callable[[records.StepView], None] = lambda _: None) -> None:
    """Train up to `options.steps`, from the newest checkpoint if there is one. `on_step` is told on rank 0.

    torch.distributed is initialised. Raises PublishFailed, RankLost, and what the session raises.
    """
    model = shard(build_model(options.seed), options.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    next_step = checkpoint.load(options.out / "checkpoints", model, optimizer)
    with ExitStack() as stack:
        session = _enter(stack, options, next_step)
        for batch in itertools.islice(session, max(0, options.steps - next_step)):
            began = time.monotonic()
            try:
                record = _optimizer_step(model, optimizer, batch, options.world_size)
            except RuntimeError as error:  # torch's errors of process groups all are
                raise RankLost(f"step {batch.step}: {str(error).partition(chr(10))[0]}") from error
            records.append(options.out / f"rank{options.rank}.jsonl", record)
            trained = time.monotonic()
            # On every rank: all gather, one tensor after another, rank 0 writes them. Its failure is raised on all.
            session.publish(model)
            published = time.monotonic()
            if session.next_step % options.checkpoint_every == 0:
                checkpoint.save(options.out / "checkpoints", model, optimizer, session.next_step)
                session.checkpoint()
            tokens = torch.zeros(options.world_size, dtype=torch.int64)
            tokens[options.rank] = record.tokens
            dist.all_reduce(tokens)
            if options.rank == 0:
                on_step(
                    records.StepView(
                        step=batch.step,
                        version=session.version,
                        tokens=tokens.tolist(),
                        reward=record.reward,
                        loss=record.loss,
                        staleness=batch.info.staleness_mean,
                        waited_s=batch.info.waited_s,
                        trained_s=trained - began,
                        published_s=published - trained,
                    )
                )


def _enter(stack: ExitStack, options: TrainerOptions, next_step: int) -> TrainerSession:
    """Rank 0 takes the run over and publishes; the others join where it began."""
    client = stack.enter_context(BufferClient(options.address))
    session_options = SessionOptions(pull_timeout_s=options.timeout_s)
    if options.rank == 0:
        publisher = stack.enter_context(FilesPublisher(options.out / "weights", keep=options.keep_versions))
        leading = client.session(
            RUN_ID,
            policy=POLICY,
            tasks=tasks(options.seed),
            publisher=publisher,
            next_step=next_step,
            world_size=options.world_size,
            options=session_options,
        )
        session = stack.enter_context(leading)
        dist.broadcast_object_list([session.start], src=0)
        return session
    box: list[Resumed | None] = [None]
    dist.broadcast_object_list(box, src=0)
    joining = client.session(
        RUN_ID, rank=options.rank, world_size=options.world_size, start=box[0], options=session_options
    )
    return stack.enter_context(joining)


def _optimizer_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, world_size: int
) -> records.StepRecord:
    """One step on this rank's shard. FSDP's collectives are inside forward and backward: one of each, on all ranks."""
    padded = collate(batch)
    sizes = torch.bincount(padded.group_index)
    logprobs = selected_logprobs(model(padded.token_ids), padded.token_ids)
    loss = aipo_loss(
        logprobs,
        padded.logprobs,
        grpo_advantages(padded.rewards, sizes),
        padded.loss_mask,
        delta=_DELTA,
        loss_tokens=padded.total_loss_tokens,  # of all ranks: the ranks' losses add up to the whole batch's
    )
    # FSDP takes the mean of the ranks' gradients, and it is their sum that is wanted.
    (loss * world_size).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    sums = torch.stack([loss.detach().double(), padded.rewards.double().sum()])
    dist.all_reduce(sums)
    return records.StepRecord(
        step=batch.step,
        groups=[group.sequence for group in batch.groups],
        sha256=records.payload_digest(batch),
        tokens=batch.info.shard_tokens,
        total_groups=batch.info.total_groups,
        total_tokens=batch.info.total_tokens,
        loss=sums[0].item(),
        reward=sums[1].item() / batch.info.total_samples,
        grad_norm=float(_whole(norm)),
    )


def _whole(tensor: Tensor) -> Tensor:
    full_tensor: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return full_tensor() if full_tensor is not None else tensor


def main(argv: list[str] | None = None) -> int:
    """Run one rank; RANK and WORLD_SIZE are in the environment, as torchrun sets them."""
    parser = argparse.ArgumentParser(prog="python -m examples.fsdp.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, help="host:port of the service")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints, weights and records go")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=3, help="steps (default 3)")
    parser.add_argument("--keep-versions", type=int, default=3, help="versions that stay on disk (default 3)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="longest wait for the other ranks")
    parser.add_argument(
        "--rendezvous", type=Path, help="a new file where the ranks meet; default: torchrun's variables"
    )
    given = parser.parse_args(argv)
    options = TrainerOptions(
        address=given.address,
        out=given.out.resolve(),
        steps=given.steps,
        checkpoint_every=given.checkpoint_every,
        keep_versions=given.keep_versions,
        timeout_s=given.timeout_s,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method="env://" if given.rendezvous is None else f"file://{given.rendezvous.resolve()}",
        rank=options.rank,
        world_size=options.world_size,
        timeout=timedelta(seconds=options.timeout_s),
    )
    if options.rank == 0:
        print(records.HEADER, flush=True)
    try:
        train(options, lambda view: print(records.table_row(view), flush=True))
    except (PublishFailed, RankLost) as error:
        traceback.print_exception(error)
        hint = "start all ranks again with the same --out: they go on from the last checkpoint"
        print(f"rank {options.rank} ends: {error}; {hint}", file=sys.stderr, flush=True)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
