"""`rollout-buffer inspect wandb`: samples of a step, or of the queue, as a table of a Weights & Biases run."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from buffer_cli.calls import run_ref
from buffer_cli.exits import EXIT_OPTIONS, EXIT_REFUSED
from buffer_cli.inspect.calls import InspectCalls, on_run
from buffer_cli.inspect.commands import PageOptions
from buffer_cli.inspect.text import PROMPT, Decode, as_html, segments, tokenizer
from buffer_cli.options import CallOptions
from buffer_wire.enums import word
from buffer_wire.errors import UnknownGroup
from rollout_buffer.v1 import groups_pb2
from rollout_buffer.v1 import inspect_pb2 as pb

TABLE = "rollouts"
MAX_TOKENS = 65_536
"""Tokens of a sample that one call answers with; longer samples are cut off there."""


def export(
    service: CallOptions, run_id: str | None, project: str, step: int | None, limit: int, tokenizer_path: str | None
) -> int | None:
    """Log the table to a run of its own in the project; returns an exit code. Raises RolloutBufferError."""
    try:
        import wandb  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        sys.stderr.write("inspect wandb needs the package wandb: the extra `wandb`\n")
        return EXIT_OPTIONS
    decode = tokenizer(tokenizer_path) if tokenizer_path else _as_numbers
    with on_run(service, run_id) as (calls, run):
        rows = list(_rows(calls, run, step, limit, decode))
    if not rows:
        sys.stderr.write("no group is queued\n" if step is None else f"no group of step {step} is left\n")
        return EXIT_REFUSED
    table = wandb.Table(columns=list(rows[0]))
    for row in rows:
        table.add_data(*({**row, "tokens": wandb.Html(row["tokens"])}.values()))
    settings = {"service": service.address, "run": run, "step": step}
    with wandb.init(project=project, job_type=TABLE, config=settings) as logged:
        logged.log({TABLE: table})
    print(f"{len(rows)} samples of run {run} are in the table {TABLE} of project {project}")
    return None


def _rows(calls: InspectCalls, run_id: str, step: int | None, limit: int, decode: Decode) -> Iterator[dict[str, Any]]:
    """A row for each sample of up to `limit` groups; groups that go meanwhile are left out."""
    request = pb.ListGroupsRequest(run=run_ref(run_id), step=step)
    for group in calls.listed(calls.stub.ListGroups, request, "groups", PageOptions(limit=limit)).groups[:limit]:
        for index in range(group.samples):
            wanted = pb.GetGroupRequest(
                run=run_ref(run_id),
                group_id=group.group_id,
                include_samples=True,
                tokens_of_sample=index,
                max_tokens=MAX_TOKENS,
            )
            try:
                found = calls.call(calls.stub.GetGroup, wanted)
            except UnknownGroup:
                break
            yield {"step": step, "group": group.group_id, "sample": index, **_row(found, index, decode)}


def _row(found: pb.GetGroupResponse, index: int, decode: Decode) -> dict[str, Any]:
    sample, token_ids = found.header.samples[index], found.token_ids
    parts = list(segments(sample, token_ids, found.loss_mask))
    return {
        "environment": found.header.environment,
        "reward": sample.reward,
        "ended by": word(groups_pb2.FinishReason, sample.finish_reason),
        "failure": sample.failure,
        "prompt tokens": sample.prompt_len,
        "response tokens": sample.tokens - sample.prompt_len,
        "trained tokens": sample.loss_tokens,
        "versions": ", ".join(dict.fromkeys(f"{one.version.term}.{one.version.version}" for one in sample.spans)),
        "prompt": decode([token for part in parts if part.kind == PROMPT for token in part.token_ids]),
        "response": decode([token for part in parts if part.kind != PROMPT for token in part.token_ids]),
        "tokens": as_html(parts, decode),
    }


def _as_numbers(token_ids: Sequence[int]) -> str:
    """Token ids themselves, where nobody knows their text."""
    return "".join(f"{token} " for token in token_ids)
