"""Table of `rollout-buffer run evaluations`."""

from collections.abc import Sequence

from rich.table import Table

from buffer_cli.calls import Calls, calling, run_ref
from buffer_cli.options import CallOptions
from buffer_cli.output import print_json, show, values_of
from rollout_buffer.v1 import evaluations_pb2, evaluations_pb2_grpc


def list_evaluations(name: str, service: CallOptions, *, as_json: bool) -> None:
    """Print the evaluations of a run."""
    with calling(Calls, service) as calls:
        stub = evaluations_pb2_grpc.EvaluationServiceStub(calls.channel)
        request = evaluations_pb2.ListEvaluationsRequest(run=run_ref(name))
        found = calls.call(stub.ListEvaluations, request).evaluations
    if as_json:
        print_json([{**values_of(one), "waits_on": waits_on(one)} for one in found])
    elif found:
        show(_table(found))
    else:
        print(f"run {name} has no evaluation")


def _table(found: Sequence[evaluations_pb2.Evaluation]) -> Table:
    table = Table("evaluation", "version", "tasks", "pending", "leased", "finished", "failed", "stored", "waits on")
    for one in found:
        counts = (one.tasks, one.pending, one.leased, one.finished, one.failed)
        table.add_row(
            one.eval_id,
            _label(one),
            *(f"{count:,}" for count in counts),
            f"{one.stored_bytes / (1 << 20):.1f} MiB",
            waits_on(one),
        )
    return table


def waits_on(evaluation: evaluations_pb2.Evaluation) -> str:
    """Name whom an evaluation waits on; empty when it is done."""
    if evaluation.leased:
        return "the workers"
    return f"a worker that evaluates, with weights {_label(evaluation)}" if evaluation.pending else ""


def _label(evaluation: evaluations_pb2.Evaluation) -> str:
    return f"{evaluation.version.term}.{evaluation.version.version}"
