"""Optimizer steps, batches and publishes in other proportions than one to one, on a real service."""

import pytest
import torch

from tests.support.push import PushingWorker
from tests.support.service import ServiceProcess
from tests.trainer_client.test_service import tasks
from trainer_client import BufferClient, Policy, SessionOptions
from trainer_client.collate import PaddedBatch, collate

OPTIONS = SessionOptions(pull_timeout_s=30)


def backward(weight: torch.Tensor, batch: PaddedBatch, divisor: int = 1) -> None:
    """Gradients of a sum over the tokens that count, as a policy-gradient loss is, over `divisor`."""
    loss = (weight * batch.loss_mask * batch.rewards[:, None]).sum() / divisor
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_several_optimizer_steps_on_one_batch_are_one_version(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    policy = Policy(
        batch_groups=6,
        max_queued_groups=12,
        overflow_action="block",
        max_staleness=prefetch + 1,
        stale_action="recycle",
    )
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    steps, seen = 0, []
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(24), prefetch=prefetch, options=OPTIONS) as session,
    ):
        for batch in session:
            assert batch.info.train_version == session.version == batch.step
            assert batch.info.staleness_max <= prefetch + 1
            for part in range(3):
                groups = batch.groups[part::3]
                padded = collate(batch, groups=groups)
                loss_tokens = sum(sample.loss_tokens for group in groups for sample in group.samples)
                backward(weight, padded, loss_tokens)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                seen += [group.task_id for group in groups]
            session.publish()
        assert (steps, session.version, session.next_step) == (12, 4, 4)
    assert sorted(seen) == sorted(f"t{i}" for i in range(24))
    assert client.run(run_id).committed_steps == 4
    assert weight.item() != 0.0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_several_batches_are_one_version(
    service: ServiceProcess, client: BufferClient, run_id: str, prefetch: int
) -> None:
    every = 3
    policy = Policy(
        batch_groups=2, max_queued_groups=8, overflow_action="block", batches_per_publish=every, max_staleness=2
    )
    published = []
    with (
        PushingWorker(service.address, run_id),
        client.session(run_id, policy=policy, tasks=tasks(24), prefetch=prefetch, options=OPTIONS) as session,
    ):
        for batch in session:
            # Exact, also of batches that were pulled before the publish that they are trained after.
            assert batch.info.train_version == session.version == batch.step // every
            assert batch.info.staleness_max <= 2
            if batch.step % every == every - 1:
                published.append(session.publish())
                assert client.run(run_id).committed_steps == batch.step + 1
    assert published == [1, 2, 3, 4]


def test_a_step_of_gradients_from_micro_batches_equals_the_step_of_the_whole_batch(
    service: ServiceProcess, client: BufferClient, run_id: str
) -> None:
    policy = Policy(batch_groups=6, micro_batch_groups=2, max_queued_groups=6, overflow_action="block")
    with PushingWorker(service.address, run_id):
        with client.session(run_id, policy=policy, tasks=tasks(6), options=OPTIONS) as session:
            weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            for micro in session.micro_batches():
                backward(weight, collate(micro))
                if micro.final:
                    break
            assert weight.grad is not None
            gradient = weight.grad / micro.info.total_loss_tokens
        # The same groups once more, and whole: nothing of the step was committed.
        with client.session(run_id, next_step=0, options=OPTIONS) as session:
            whole = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            batch = next(session)
            assert batch.info.replayed
            backward(whole, collate(batch), batch.info.total_loss_tokens)
    assert whole.grad is not None
    assert gradient.item() == pytest.approx(whole.grad.item(), rel=1e-12)
    assert gradient.item() != 0.0
