"""Metrics of a worker for Prometheus: its counters and the state of its engines, read when they are asked for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import ClientError, ClientSession, ClientTimeout
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from buffer_wire.enums import words
from rollout_buffer.v1 import weights_pb2
from rollout_workers.counters import BUNDLE_BOUNDS, Counters, describe
from rollout_workers.slots.slot import EngineSlot
from rollout_workers.weights.server import Listener, host_and_port

if TYPE_CHECKING:
    from aiohttp import web

_ENGINE_TIMEOUT = ClientTimeout(total=5.0)
_PREFIX = "rollout_buffer_worker_"
_STATES = words(weights_pb2.EngineState)


@dataclass(frozen=True, slots=True)
class _Sum:
    """One field of the counters, as a metric."""

    name: str
    text: str
    field: str
    label: str = ""
    """Name of the label of its keys, for a field that counts by key."""


_SUMS = (
    _Sum("pushed_groups", "Answers to pushed groups.", "pushed", "answer"),
    _Sum("pushed_bytes", "Bytes of groups with a final answer, by the way of their payloads.", "pushed_bytes", "way"),
    _Sum("leases", "Leases taken.", "leases"),
    _Sum("lost_leases", "Leases that ended under work on them.", "leases_lost"),
    _Sum("cancelled_leases", "Leases taken back because their group could no longer be fresh.", "leases_cancelled"),
    _Sum("returned_leases", "Leases handed back.", "returned", "kind"),
    _Sum("partial_rollouts", "Leases that came with the work of an earlier attempt.", "partial_rollouts"),
    _Sum("samples", "Samples generated to the end.", "samples"),
    _Sum("retried_samples", "Samples that failed and were tried again, alone.", "samples_again"),
    _Sum(
        "infrastructure_errors",
        "Attempts of samples that failed in generation or reward.",
        "infrastructure_errors",
        "environment",
    ),
    _Sum("tokens", "Tokens received from engines, those of interrupted samples included.", "tokens"),
    _Sum("cached_tokens", "Input tokens that engines took from their prefix caches.", "tokens_cached"),
    _Sum("resumed_tokens", "Generated tokens that came with partial rollouts.", "tokens_resumed"),
    _Sum("pushed_tokens", "Generated tokens of groups with an answer that was no refusal.", "tokens_pushed"),
    _Sum("returned_tokens", "Generated tokens of partial rollouts that the service took back.", "tokens_returned"),
    _Sum("discarded_tokens", "Generated tokens that nobody will train on.", "tokens_discarded", "cause"),
    _Sum("rewarded_groups", "Groups for which the reward function was called.", "rewarded"),
    _Sum("reward_seconds", "Time in the reward function, summed over groups.", "reward_s"),
)

_ENGINE_SUMS: Mapping[str, tuple[str, str, float]] = {
    "engine_reloads": ("Loads of new weights.", "reloads", 1.0),
    "engine_errors": ("Errors of the engine.", "errors", 1.0),
    "engine_decoded_tokens": ("Tokens that the engine has sent.", "decoded_tokens", 1.0),
    "engine_decode_busy_seconds": ("Time in which at least one request decoded.", "decode_busy_ms", 1e-3),
    "engine_decode_request_seconds": ("Time of each request that decoded, summed.", "decode_request_ms", 1e-3),
    "engine_moved_samples": ("Samples that another engine of the worker took over.", "moved_samples", 1.0),
    "engine_surplus_samples": ("Samples beyond their group's size, cut off when it was full.", "surplus_samples", 1.0),
}
_ENGINE_GAUGES: Mapping[str, tuple[str, str, float]] = {
    "engine_running_samples": ("Samples of the worker that run on the engine.", "running_samples", 1.0),
    "engine_max_running_samples": ("Samples that the worker lets run there at once.", "max_running_samples", 1.0),
    "engine_kv_usage_ratio": ("Part of the engine's KV cache in use when last asked.", "kv_usage_milli", 1e-3),
    "engine_last_reload_seconds": ("Time of the last load, from pause to continue.", "last_reload_ms", 1e-3),
}
"""Metrics of an engine by name: text, field of its report, factor."""


class WorkerCollector(Collector):
    """Metrics of one worker. `counters` by the label `work`: training, evaluation."""

    def __init__(
        self, run_id: str, worker_id: str, counters: Mapping[str, Counters], slots: Sequence[EngineSlot]
    ) -> None:
        self._run_id = run_id
        self._worker_id = worker_id
        self._counters = counters
        self._slots = slots

    def address(self, number: int) -> str | None:
        """Base URL of an engine that is a server, counted from 0; None where there is none."""
        addresses = [slot.info.address for slot in self._slots if slot.info.address.startswith("http")]
        return addresses[number].rstrip("/") if number < len(addresses) else None

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        yield from map(self._sum, _SUMS)
        yield self._policy_errors()
        yield self._bundles()
        yield from self._engines()

    def _sum(self, asked: _Sum) -> Metric:
        labels = ["run", "work", *([asked.label] if asked.label else [])]
        family = CounterMetricFamily(_PREFIX + asked.name, asked.text, labels=labels)
        for work, counters in self._counters.items():
            value = getattr(counters, asked.field)
            for key, part in value.items() if asked.label else [("", value)]:
                family.add_metric([self._run_id, work, *([key] if asked.label else [])], part)
        return family

    def _policy_errors(self) -> Metric:
        family = CounterMetricFamily(
            _PREFIX + "policy_errors",
            "Trained samples whose function named what is wrong with the answer.",
            labels=["run", "work", "environment", "failure"],
        )
        for work, counters in self._counters.items():
            for (environment, failure), count in counters.policy_errors.items():
                family.add_metric([self._run_id, work, environment, failure], count)
        return family

    def _bundles(self) -> Metric:
        family = HistogramMetricFamily(
            _PREFIX + "bundle_bytes",
            "Size of push bundles, without payloads written to the store.",
            labels=["run", "work"],
        )
        for work, counters in self._counters.items():
            total, buckets = 0, []
            for bound in BUNDLE_BOUNDS:
                total += counters.bundles[bound]
                buckets.append((f"{bound:g}" if bound != float("inf") else "+Inf", total))
            family.add_metric([self._run_id, work], buckets, counters.bundled_bytes)
        return family

    def _engines(self) -> Iterator[Metric]:
        reports = [slot.full_report(self._worker_id) for slot in self._slots]
        for kind, known in ((CounterMetricFamily, _ENGINE_SUMS), (GaugeMetricFamily, _ENGINE_GAUGES)):
            for name, (text, field, factor) in known.items():
                family = kind(_PREFIX + name, text, labels=["run", "engine"])
                for report in reports:
                    family.add_metric([self._run_id, report.engine_id], getattr(report, field) * factor)
                yield family
        version = GaugeMetricFamily(
            _PREFIX + "engine_version",
            "The version that the engine has loaded, without its term.",
            labels=["run", "engine"],
        )
        state = GaugeMetricFamily(
            _PREFIX + "engine_state", "1 for the state that the engine is in.", labels=["run", "engine", "state"]
        )
        for report in reports:
            version.add_metric([self._run_id, report.engine_id], report.loaded.version)
            for word, value in _STATES.items():
                state.add_metric([self._run_id, report.engine_id, word], float(report.state == value))
        yield from (version, state)


def metrics_server(listen: str, collector: WorkerCollector) -> Listener:
    """Server of `/metrics`, `/engines/N/metrics` and `/livez` at host:port, for everybody who reaches it.

    N: the worker's engines from 0 on, whose own metrics are passed on: engines often listen on loopback alone.
    """
    from aiohttp import web  # noqa: PLC0415 - few workers serve, and aiohttp.web takes long to import

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    async def metrics(_: "web.Request") -> "web.StreamResponse":
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def engine_metrics(request: "web.Request") -> "web.StreamResponse":
        url = collector.address(int(request.match_info["number"]))
        if url is None:
            raise web.HTTPNotFound(text="the worker has no such server\n")
        try:
            async with ClientSession(timeout=_ENGINE_TIMEOUT) as session, session.get(f"{url}/metrics") as answer:
                headers = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
        except (ClientError, TimeoutError) as error:
            raise web.HTTPBadGateway(text=f"{url}: {describe(error)}\n") from error

    async def alive(_: "web.Request") -> "web.StreamResponse":
        return web.Response(text="ok\n")

    host, port = host_and_port(listen)
    handlers = {"/metrics": metrics, "/engines/{number:[0-9]{1,4}}/metrics": engine_metrics, "/livez": alive}
    return Listener({}, host=host, port=port, free=handlers, serves="metrics")
