"""`make bench-fleet`: thousands of workers at one rpc process, what they cost, and what breaks first.

Service and store run as `rollout-buffer serve` starts them, one rpc process each. The load comes from two processes of
their own, in raw HTTP/2 frames, so that it takes little of the machine; what it takes is reported beside. CPU is user
and system time of the rpc process.

    watches      2,000 at once over 50 connections: refused, opened, idle, told of a publish, memory
    pushes       1,000 push streams of one token, each with a group, all left open
    fleet        10,000 watches, 100 connections of 100, on one replica and on two
    workers      4,000 with two connections each, one for a watch and one for a push stream
    idle engines 200 a second ask for tasks of evaluations, of which there are none, and wait for 10 s
    heartbeats   500 a second: leases of 8 tasks kept and an engine reported, by two calls and by one; and as many as go

A publish names 8 files. `--only` runs the named cases alone, whose results replace the former ones.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench import workload
from bench.fleet.load import Called, Opened, load
from bench.fleet.report import tables
from bench.measure import cpu_s, resident_bytes
from bench.ours import Service, service
from bench.roles import Role
from bench.tables import put
from buffer_service.security.roles import Role as TokenRole
from buffer_service.security.token_file import changing
from buffer_service.security.tokens import TokenEntry, TokenSet, digest, new_token
from buffer_wire import layout
from buffer_wire.codec import join_group, join_push
from rollout_buffer.v1 import (
    common_pb2,
    runs_pb2,
    runs_pb2_grpc,
    tasks_pb2,
    tasks_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

RUN = common_pb2.RunRef(run_id="fleet")
_RESULTS = Path(__file__).parents[1] / "results" / "fleet.json"
_WATCH = "/rollout_buffer.v1.WeightService/WatchWeights"
_PUSH = "/rollout_buffer.v1.GroupService/PushGroups"
_EXTEND = "/rollout_buffer.v1.TaskService/ExtendLeases"
_HEARTBEAT = "/rollout_buffer.v1.TaskService/Heartbeat"
_REPORT = "/rollout_buffer.v1.WeightService/ReportEngine"
_LOADERS = 2
_IDLE_S, _PUBLISHES = 10.0, 3
_RATE, _SECONDS, _WORKERS, _LEASES = 500.0, 10.0, 200, 8


@dataclass(frozen=True)
class Replica:
    """A replica: its address, and its rpc process."""

    address: str
    pid: int
    store_pid: int
    unix_socket: str

    @classmethod
    def of(cls, own: Service) -> "Replica":
        """The replica of a service with one rpc process."""
        return cls(own.address, _pid(own, b"buffer_service.app"), _pid(own, b"-server"), own.unix_socket)


def _pid(own: Service, part: bytes) -> int:
    """Pid of the process whose command line has this; 0 for none."""
    for pid in own.pids:
        if part in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


class Scene:
    """A run on one replica or several, and the processes that load them."""

    def __init__(self, replicas: Sequence[Replica], loaders: Sequence[Role], token: str = "") -> None:
        self.replicas = replicas
        self.loaders = loaders
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = grpc.insecure_channel(replicas[0].address)
        self._version = 0

    def call(self, stub: Callable[..., Any], method: str, request: object) -> Any:  # noqa: ANN401 - of any method
        """One call, by gRPC's own client."""
        return getattr(stub(self._channel), method)(request, timeout=30.0, metadata=self._metadata)

    def cpu(self) -> float:
        """Seconds of the rpc processes so far."""
        return cpu_s([replica.pid for replica in self.replicas])

    def load_cpu(self) -> float:
        """Seconds of the load's processes so far."""
        return float(sum(loader.call("cpu") for loader in self.loaders))

    def resident(self) -> int:
        """Bytes of the rpc processes."""
        return sum(resident_bytes(replica.pid) for replica in self.replicas)

    def open(
        self, connections: int, streams: int, method: str, messages: Sequence[bytes], *, more: bool = False
    ) -> Opened:
        """Streams on connections that are spread over loaders and replicas, all at once."""
        for number, loader in enumerate(self.loaders):
            mine = range(number, connections, len(self.loaders))
            # Not by `number`: with as many replicas as loaders each would load one alone.
            addresses = [self.replicas[i // len(self.loaders) % len(self.replicas)].address for i in mine]
            own = messages[number :: len(self.loaders)] if len(messages) > 1 else messages
            loader.start("open", addresses, streams, method, own, self._token, more)
        each: list[Opened] = [loader.wait() for loader in self.loaders]
        return Opened(sum(e.opened for e in each), sum(e.refused for e in each), max(e.seconds for e in each))

    def publish(self) -> float:
        """Publish the next version; the monotonic time before the call."""
        self._version += 1
        files = [
            weights_pb2.WeightFile(name=f"model-{i}.safetensors", size_bytes=1, sha256=bytes(32)) for i in range(8)
        ]
        manifest = weights_pb2.WeightManifest(
            files=weights_pb2.FilesManifest(base_url="http://trainer:1/v", files=files)
        )
        started = time.monotonic()
        self.call(
            weights_pb2_grpc.WeightServiceStub,
            "Publish",
            weights_pb2.PublishRequest(run=RUN, term=1, version=self._version, manifest=manifest),
        )
        return started

    def told(self, number: int) -> list[float]:
        """Times at which the streams had message `number`."""
        for loader in self.loaders:
            loader.start("told", number)
        return sorted(at for loader in self.loaders for at in loader.wait())


@contextmanager
def scene(replicas: int = 1, *, guarded: bool = False) -> Iterator[Scene]:
    """Replicas on one store, a run, and loaders."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_fleet_")))
        flags, token = ["--rpc-processes", "1"], ""
        if guarded:
            token = new_token("fleet")
            with changing(directory / "tokens") as held:
                held[0] = TokenSet([TokenEntry("fleet", TokenRole.ADMIN, ("*",), digest(token), None)])
            flags += ["--tokens-file", str(directory / "tokens")]
        (directory / "0").mkdir()
        started = [Replica.of(stack.enter_context(service(directory / "0", "process", *flags)))]
        for number in range(1, replicas):
            (directory / str(number)).mkdir()
            more = (*flags, "--store", f"unix://{started[0].unix_socket}")
            started.append(Replica.of(stack.enter_context(service(directory / str(number), "memory", *more))))
        loaders = [stack.enter_context(Role(load)) for _ in range(_LOADERS)]
        made = Scene(started, loaders, token)
        policy = runs_pb2.RunPolicy(batch_groups=1, max_queued_groups=100_000, lease_ttl_ms=600_000)
        made.call(runs_pb2_grpc.RunServiceStub, "CreateRun", runs_pb2.CreateRunRequest(run_id="fleet", policy=policy))
        yield made


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


def main() -> None:
    """Run the cases, and write down what they cost, here and in the docs."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description="Cost of fleets of workers.")
    parser.add_argument("--only", choices=CASES, action="append", help="this case; may be repeated")
    chosen = parser.parse_args().only or list(CASES)
    cases = json.loads(_RESULTS.read_text())["cases"] if _RESULTS.exists() else {}
    for name in chosen:
        cases[name] = {**CASES[name](), **_quiet()}
        print(json.dumps({name: cases[name]}, indent=1), flush=True)
    report = {"machine": platform.machine(), "cores": os.cpu_count(), "cases": cases}
    _RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    if set(CASES) <= set(cases):
        lines = tables(cases)
        print("\n".join(lines))
        put("fleet", lines)


def _quiet() -> dict[str, float]:
    """Processes that wanted a core in the last minute: how much others had the machine."""
    return {"load_average": os.getloadavg()[0]}


if __name__ == "__main__":
    main()
