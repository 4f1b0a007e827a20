"""Table of `rollout-buffer run evaluations`."""

import json
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from buffer_cli.calls import Calls, calling, run_ref
from buffer_cli.exits import exit_code
from rollout_buffer.v1 import evaluations_pb2, evaluations_pb2_grpc


def list_evaluations(address: str, timeout_s: float, run_id: str, *, as_json: bool) -> int:
    """Print the evaluations of a run; returns the exit code."""

    def command() -> int:
        found = _listed(address, timeout_s, run_id)
        if as_json:
            print(json.dumps([_values(evaluation) for evaluation in found], indent=2))
        elif found:
            Console(highlight=False).print(_table(found))
        else:
            print(f"run {run_id} has no evaluation")
        return 0

    return exit_code(command)


def _listed(address: str, timeout_s: float, run_id: str) -> Sequence[evaluations_pb2.Evaluation]:
    request = evaluations_pb2.ListEvaluationsRequest(run=run_ref(run_id))
    with calling(Calls, address, timeout_s) as calls:
        stub = evaluations_pb2_grpc.EvaluationServiceStub(calls.channel)
        return calls.call(stub.ListEvaluations, request).evaluations


def _values(evaluation: evaluations_pb2.Evaluation) -> dict[str, object]:
    values: dict[str, object] = MessageToDict(
        evaluation, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values | {"waits_on": waits_on(evaluation)}


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
    return f"{evaluation.version.epoch}.{evaluation.version.version}"
