"""The training loop: all that a trainer does with the buffer, from its tasks to its published weights."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from examples.demo.learner import Learner, TrainBatch
from examples.demo.model import write_weights
from examples.demo.records import DemoStep
from examples.demo.tasks import MAX_ANSWER_TOKENS, ArithmeticTask, ChainSums
from examples.demo.vocabulary import EOS_ID
from trainer_client import TrainerSession
from trainer_client.batch import Batch
from trainer_client.collate import collate
from trainer_client.objectives import grpo_advantages
from trainer_client.policy import Policy
from trainer_client.tasks import SamplingParams, Task

RUN_ID = "demo"
GROUP_SIZE = 8
POLICY = Policy(batch_groups=32, max_queued_groups=32, overflow_action="drop_oldest", max_staleness=4)
"""Queue-drop with a queue of one batch, and a gate: no group more than 4 versions old is trained on."""


def buffer_tasks(tasks: ChainSums) -> Iterator[Task]:
    """The arithmetic tasks as the buffer takes them. The feeder's cursor is the index into this stream."""
    return (_buffer_task(task) for task in tasks.stream())


def _buffer_task(task: ArithmeticTask) -> Task:
    return Task(
        prompt_token_ids=task.prompt_ids,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_new_tokens=MAX_ANSWER_TOKENS, temperature=1.0, stop_token_ids=[EOS_ID]),
        environment="chain_sum",
        metadata={"answer": task.answer},
    )


def train(session: TrainerSession, learner: Learner, steps: int, on_step: Callable[[DemoStep], None]) -> list[DemoStep]:
    """`steps` batches, each one optimizer step, one publish and, now and then, a checkpoint."""
    records: list[DemoStep] = []
    started = last = time.perf_counter()
    for batch in islice(session, steps):
        metrics = learner.step(_train_batch(batch))
        version = session.publish(partial(write_weights, learner.model))
        now = time.perf_counter()
        rewards = [reward for group in batch.groups for reward in group.rewards.tolist()]
        records.append(
            DemoStep(
                step=batch.step,
                reward=sum(rewards) / len(rewards),
                staleness_mean=batch.info.staleness_mean,
                staleness_max=batch.info.staleness_max,
                version=version,
                queued_groups=batch.info.queued_groups,
                tokens=metrics.loss_tokens,
                tokens_per_s=metrics.loss_tokens / (now - last),
                waited_s=batch.info.waited_s,
                train_s=metrics.step_s,
                mean_step_s=(now - started) / (len(records) + 1),
            )
        )
        last = now
        on_step(records[-1])
        if batch.step % 10 == 9:
            session.checkpoint()
    return records


def _train_batch(batch: Batch) -> TrainBatch:
    """Pad, and turn rewards into group-relative advantages."""
    padded = collate(batch)
    return TrainBatch(
        token_ids=padded.token_ids,
        prompt_len=padded.prompt_len,
        loss_mask=padded.loss_mask,
        behaviour_logprobs=padded.logprobs,
        advantages=grpo_advantages(padded.rewards.reshape(-1, GROUP_SIZE)).reshape(-1),
        staleness=padded.staleness,
    )
