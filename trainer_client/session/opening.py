"""Opening a session: find or create the run, take it over (rank 0) or join it (the others), and end it in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from buffer_wire.errors import InvalidField
from trainer_client.client.operations import ServiceClient
from trainer_client.session.outcomes import reported
from trainer_client.session.plan import SessionPlan
from trainer_client.session.session import TrainerSession
from trainer_client.state import Resumed, RunState


@contextmanager
def open_session(client: ServiceClient, plan: SessionPlan) -> Iterator[TrainerSession]:
    """Take the run over (rank 0) or join it, and run a session until the block ends.

    Raises RunExists or InvalidPolicy for a policy that the run does not have, UnknownRun, StepAhead and ReplayGap.
    Raises InvalidField for more prefetch than the policy allows, and for tasks with `report` in a run without
    record_groups.
    """
    if plan.prefetch < 0:
        raise InvalidField("prefetch", plan.prefetch, "at least 0")
    hears = plan.rank == 0 and reported(plan.tasks)
    run = _find_run(client, plan, record=hears)
    if hears and not run.policy.record_groups:
        command = f"rollout-buffer run policy {plan.run_id} --set record_groups=true"
        raise InvalidField("policy.record_groups", "false", f"true, because the tasks have report(): {command}")
    declared = run.policy.prefetch_batches or 0
    if run.policy.max_staleness is not None and plan.prefetch > declared:
        raise InvalidField("prefetch", plan.prefetch, f"at most the policy's prefetch_batches, {declared}")
    start = _take_over(client, plan) if plan.rank == 0 else plan.start or _joined(run)
    session = TrainerSession(client, plan, run, start)
    try:
        yield session
    finally:
        session.close()


def _find_run(client: ServiceClient, plan: SessionPlan, *, record: bool) -> RunState:
    if plan.rank != 0 or plan.policy is None:
        return client.run(plan.run_id)
    policy = plan.policy
    if plan.prefetch and policy.prefetch_batches is None:
        policy = replace(policy, prefetch_batches=plan.prefetch)
    if record and policy.record_groups is None:
        policy = replace(policy, record_groups=True)
    return client.create_run(plan.run_id, policy)


def _take_over(client: ServiceClient, plan: SessionPlan) -> Resumed:
    start = client.resume(
        plan.run_id,
        next_step=plan.next_step,
        mode=plan.options.mode,
        allow_regenerate=plan.options.allow_regenerate,
    )
    if plan.publisher is not None:
        plan.publisher.resumed(start.next_step)
    return start


def _joined(run: RunState) -> Resumed:
    """Derive the start from the run's state: exact when rank 0 resumed after the last committed step."""
    return Resumed(
        term=run.term,
        next_step=run.committed_steps,
        next_unassembled_step=run.next_step,
        version=run.published.version,
        cursor=run.cursor,
        feeder_state=b"",
    )
