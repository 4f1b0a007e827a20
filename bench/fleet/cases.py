"""Cases of `make bench-fleet`: each loads a scene of its own, and says what that cost."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench import workload
from bench.fleet.scene import RUN, Scene, scene
from bench.measure import cpu_s
from buffer_wire import layout
from buffer_wire.codec import join_group, join_push
from rollout_buffer.v1 import (
    common_pb2,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
)

if TYPE_CHECKING:
    from bench.fleet.load import Called

_WATCH = "/rollout_buffer.v1.WeightService/WatchWeights"
_PUSH = "/rollout_buffer.v1.GroupService/PushGroups"
_EXTEND = "/rollout_buffer.v1.TaskService/ExtendLeases"
_HEARTBEAT = "/rollout_buffer.v1.TaskService/Heartbeat"
_REPORT = "/rollout_buffer.v1.WeightService/ReportEngine"
_IDLE_S, _PUBLISHES = 10.0, 3
_RATE, _SECONDS, _WORKERS, _LEASES = 500.0, 10.0, 200, 8


def _percentile(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def watches(connections: int, streams: int, replicas: int = 1) -> dict[str, float]:
    """Watches that come at once, idle, and are told of publishes."""
    with scene(replicas) as s:
        before, cpu = s.resident(), s.cpu()
        opened = s.open(connections, streams, _WATCH, [weights_pb2.WatchWeightsRequest(run=RUN).SerializeToString()])
        opening_cpu = s.cpu() - cpu
        time.sleep(1.0)
        each = (s.resident() - before) / max(1, opened.opened)
        cpu = s.cpu()
        time.sleep(_IDLE_S)
        idle = (s.cpu() - cpu) / _IDLE_S
        cpu, load_cpu = s.cpu(), s.load_cpu()
        p50, p99, last = [], [], []
        for number in range(1, _PUBLISHES + 1):
            started = s.publish()
            times = [at - started for at in s.told(number)]
            p50.append(_percentile(times, 0.5))
            p99.append(_percentile(times, 0.99))
            last.append(times[-1])
        told = _PUBLISHES * opened.opened
        return {
            "watches": opened.opened,
            "refused": opened.refused,
            "opened_s": opened.seconds,
            "opened_us_cpu_each": 1e6 * opening_cpu / max(1, opened.opened),
            "idle_core": idle,
            "told_p50_s": statistics.median(p50),
            "told_p99_s": statistics.median(p99),
            "told_last_s": statistics.median(last),
            "told_us_cpu_each": 1e6 * (s.cpu() - cpu) / told,
            "load_us_cpu_each": 1e6 * (s.load_cpu() - load_cpu) / told,
            "rss_kb_each": each / 1e3,
        }


def _bundles(number: int) -> list[bytes]:
    """Messages of push streams, each with another group of 2 KB."""
    size = workload.Size("2kb", 2_000, 1, 1)
    payload = layout.write_payload(workload.arrays(size))
    groups = [join_group(workload.header(size, f"g{i}", 0), payload) for i in range(number)]
    return [join_push(RUN, 1, [group]) for group in groups]


def workers(number: int) -> dict[str, float]:
    """Workers as they are: each with a connection for its watch, and one for its push stream."""
    with scene() as s:
        before, cpu = s.resident(), s.cpu()
        watching = s.open(number, 1, _WATCH, [weights_pb2.WatchWeightsRequest(run=RUN).SerializeToString()])
        pushing = s.open(number, 1, _PUSH, _bundles(number), more=True)
        cpu = s.cpu() - cpu
        time.sleep(1.0)
        each = (s.resident() - before) / number / 1e3
        cpu_before = s.cpu()
        time.sleep(_IDLE_S)
        return {
            "workers": number,
            "watches_refused": watching.refused,
            "pushes_refused": pushing.refused,
            "opened_s": watching.seconds + pushing.seconds,
            "us_cpu_each": 1e6 * cpu / number,
            "idle_core": (s.cpu() - cpu_before) / _IDLE_S,
            "rss_kb_each": each,
        }


def pushes(streams: int) -> dict[str, float]:
    """Push streams of one token, each with a group of 2 KB, left open."""
    with scene(guarded=True) as s:
        bundles = _bundles(streams)
        before, cpu = s.resident(), s.cpu()
        opened = s.open(100, streams // 100, _PUSH, bundles, more=True)
        cpu = s.cpu() - cpu
        time.sleep(1.0)
        view = s.call(runs_pb2_grpc.RunServiceStub, "GetRun", runs_pb2.GetRunRequest(run=RUN))
        return {
            "streams": opened.opened,
            "refused": opened.refused,
            "opened_s": opened.seconds,
            "accepted": view.run.groups.accepted.groups,
            "us_cpu_each": 1e6 * cpu / streams,
            "rss_kb_each": (s.resident() - before) / streams / 1e3,
        }


def heartbeats() -> dict[str, dict[str, float]]:
    """Heartbeats of workers with an engine that holds leases, by each call."""
    with scene() as s:
        held = [_leases(s, f"worker-{i}") for i in range(_WORKERS)]
        requests = {
            "ExtendLeases": (_EXTEND, _extends(held)),
            "ReportEngine": (_REPORT, _reports()),
            "Heartbeat": (_HEARTBEAT, _heartbeats(held)),
        }
        measured = {name: _called(s, method, messages, _RATE) for name, (method, messages) in requests.items()}
        for name, (method, messages) in requests.items():
            measured[f"{name}, as many as go"] = _called(s, method, messages, 0.0)
        return measured


def idle() -> dict[str, float]:
    """Engines that ask for tasks of evaluations, wait for them for 10 s, and ask again."""
    with scene() as s:
        asks = [
            tasks_pb2.LeaseTasksRequest(
                run=RUN,
                worker_id=f"worker-{i}",
                instance_id="i",
                request_id="1",
                engine_id=f"worker-{i}",
                loaded=common_pb2.WeightVersion(term=1),
                max_tasks=_LEASES,
                wait_ms=10_000,
                sink=tasks_pb2.TASK_SINK_EVALUATIONS,
            ).SerializeToString()
            for i in range(2_000)
        ]
        return _called(s, "/rollout_buffer.v1.TaskService/LeaseTasks", asks, 200.0, 2 * _SECONDS)


def _leases(s: Scene, worker: str) -> list[str]:
    sampling = tasks_pb2.SamplingParams(max_new_tokens=8)
    tasks = [tasks_pb2.Task(prompt_token_ids=[1], group_size=1, sampling=sampling) for _ in range(_LEASES)]
    number = int(worker.rpartition("-")[2]) * _LEASES
    submit = tasks_pb2.SubmitTasksRequest(
        run=RUN, term=1, expected_cursor=number, cursor=number + _LEASES, request_id=worker, tasks=tasks
    )
    s.call(tasks_pb2_grpc.TaskServiceStub, "SubmitTasks", submit)
    ask = tasks_pb2.LeaseTasksRequest(
        run=RUN,
        worker_id=worker,
        instance_id="i",
        request_id="1",
        engine_id=worker,
        loaded=common_pb2.WeightVersion(term=1),
        max_tasks=_LEASES,
    )
    return [lease.lease_id for lease in s.call(tasks_pb2_grpc.TaskServiceStub, "LeaseTasks", ask).leases]


def _extends(held: Sequence[Sequence[str]]) -> list[bytes]:
    return [
        tasks_pb2.ExtendLeasesRequest(
            run=RUN, worker_id=f"worker-{i}", instance_id="i", lease_ids=leases
        ).SerializeToString()
        for i, leases in enumerate(held)
    ]


def _report(number: int) -> weights_pb2.EngineReport:
    return weights_pb2.EngineReport(
        engine_id=f"worker-{number}",
        worker_id=f"worker-{number}",
        state=weights_pb2.ENGINE_STATE_READY,
        loaded=common_pb2.WeightVersion(term=1),
        decoded_tokens=1_000,
    )


def _reports() -> list[bytes]:
    return [weights_pb2.ReportEngineRequest(run=RUN, report=_report(i)).SerializeToString() for i in range(_WORKERS)]


def _heartbeats(held: Sequence[Sequence[str]]) -> list[bytes]:
    joined = tasks_pb2.HeartbeatRequest
    return [
        joined(
            run=RUN,
            extensions=[tasks_pb2.ExtendLeasesRequest(worker_id=f"worker-{i}", instance_id="i", lease_ids=leases)],
            reports=[weights_pb2.ReportEngineRequest(report=_report(i))],
        ).SerializeToString()
        for i, leases in enumerate(held)
    ]


def _called(
    s: Scene, method: str, messages: Sequence[bytes], per_s: float, seconds: float = _SECONDS
) -> dict[str, float]:
    """Cost of calls at this rate; 0: as many as go, 64 under way."""
    (replica,), loader = s.replicas, s.loaders[0]
    cpu, store, load_cpu = s.cpu(), cpu_s([replica.store_pid]), loader.call("cpu")
    called: Called = loader.call("call", [replica.address] * 50, method, messages, per_s, seconds)
    times = sorted(called.times_s)
    return {
        "calls": called.calls,
        "failed": called.failed,
        "per_s": called.calls / called.seconds,
        "p50_ms": 1e3 * _percentile(times, 0.5),
        "p99_ms": 1e3 * _percentile(times, 0.99),
        "us_cpu_each": 1e6 * (s.cpu() - cpu) / called.calls,
        "store_us_cpu_each": 1e6 * (cpu_s([replica.store_pid]) - store) / called.calls,
        "load_us_cpu_each": 1e6 * (loader.call("cpu") - load_cpu) / called.calls,
    }


CASES: dict[str, Callable[[], Any]] = {
    "watches": lambda: watches(50, 40),
    "pushes": lambda: pushes(1_000),
    "fleet of 10,000, one replica": lambda: watches(100, 100),
    "fleet of 10,000, two replicas": lambda: watches(100, 100, replicas=2),
    "workers": lambda: workers(4_000),
    "idle engines": idle,
    "heartbeats": heartbeats,
}
