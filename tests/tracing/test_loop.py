"""A loop of three processes with the real exporter: one trace for each group, one for each version."""

from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanContext

from bench.traces.receiver import ReceivedSpan, Receiver
from bench.traces.tree import trace_of, tree
from buffer_wire.tracing import process
from tests.support.service import running_service
from tests.workers.process import worker_process
from tests.workers.training import OPTIONS, endless, write_weights
from trainer_client import BufferClient, Policy
from trainer_client.publish import FilesPublisher

SIMULATED = ("--simulate", "--tokens-per-s", "4000", "--length-median", "12", "--groups-per-engine", "8")
STEPS = 3


def run_loop(tmp_path: Path) -> tuple[list[str], SpanContext]:
    """Train three steps of four groups, and end every process in good order.

    Returns the ids of the groups, and the context of a span of the trainer's own around a call.
    """
    trained: list[str] = []
    with running_service(tmp_path / "data") as service, BufferClient(service.address) as client:
        client.create_run("traced", Policy(batch_groups=4))
        with (
            worker_process(service.address, "traced", tmp_path, *SIMULATED),
            FilesPublisher(tmp_path / "published") as weights,
            client.session("traced", tasks=endless(), publisher=weights, options=OPTIONS) as session,
        ):
            for batch in session:
                trained += [group.group_id for group in batch.groups]
                session.publish(write_weights(b"w" * 100), wait_for=1, timeout_s=30)
                if batch.step == STEPS - 1:
                    break
            with TracerProvider().get_tracer("an application").start_as_current_span("evaluation") as span:
                client.run("traced")
    process.stop()
    return trained, span.get_span_context()


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The one span of this name."""
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_group_is_one_trace_through_worker_service_and_trainer(received: Receiver, tmp_path: Path) -> None:
    trained, own = run_loop(tmp_path)

    assert len(trained) == 4 * STEPS
    roots = {str(span.facts["group"]): span for span in received.spans if span.name == "rollout" and not span.parent_id}
    for group_id in trained:
        trace = trace_of(received.spans, roots[group_id].trace_id)
        print(tree(trace))
        # The first push asks for access to the store.
        hops = [span for span in trace if span.name != "GetWriteAccess"]
        assert sorted((span.name, span.service) for span in hops) == [
            ("generate", "rollout-worker"),
            ("lease", "rollout-worker"),
            ("prepare", "rollout-worker"),
            ("push", "rollout-worker"),
            ("queue", "rollout-buffer"),
            ("reward", "rollout-worker"),
            ("rollout", "rollout-worker"),
            ("train", "rollout-trainer"),
        ]
        assert {span.parent_id for span in hops} == {"", roots[group_id].span_id}
        stages = [span.name for span in hops if span.service == "rollout-worker"]
        assert stages == ["rollout", "lease", "prepare", "generate", "reward", "push"]
        queue, train = named(trace, "queue"), named(trace, "train")
        assert queue.ended_ns <= train.began_ns
        assert queue.facts["staleness"] == train.facts["staleness"]

        # Its training leads to the trace of the version that it made, and that one back to it.
        ((update_id, step_span),) = train.links
        update = trace_of(received.spans, update_id)
        print(tree(update))
        parents = {span.span_id: span.name for span in update}
        below = {(span.name, parents.get(span.parent_id, "")) for span in update}
        assert below - {("GetReadAccess", "pull")} == {
            ("update", ""),
            ("pull", "update"),
            ("PullBatch", "pull"),
            ("train", "update"),
            ("publish", "update"),
            ("Publish", "publish"),
            ("load", "update"),
            ("fetch", "load"),
        }
        of_step = named(update, "train")
        assert of_step.span_id == step_span
        assert (roots[group_id].trace_id, roots[group_id].span_id) in of_step.links
        assert len(of_step.links) == 4
        facts = named(update, "update").facts
        assert named(update, "load").facts["version"] == f"{facts['term']}.{facts['version']}"
        assert facts["version"] == train.facts["version"]

    # What a trainer traces by itself goes on in the service.
    (call,) = trace_of(received.spans, f"{own.trace_id:032x}")
    assert (call.name, call.parent_id, call.is_server) == ("GetRun", f"{own.span_id:016x}", True)
