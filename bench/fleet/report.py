"""Tables of what fleets cost and of what gives out first, as `docs/benchmark.md` has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.tables import table

BEAT_S = 20.0
"""Time between two heartbeats of a worker: a third of the default lease_ttl_ms."""
ASK_S = 10.0
"""Time for which an engine waits for tasks of evaluations before it asks again: the worker's default lease_wait_s."""
CONNECTIONS, CONNECTIONS_OF_A_WORKER = 16_384, 2
"""Default of max_connections, and the connections that a worker holds."""
TOLD_S = 1.0
"""Time in which all are to be told of a publish."""
_GIB = 1 << 30

Cases = Mapping[str, Mapping[str, Any]]

_WATCHES = {
    "watches": "2,000 watches over 50 connections",
    "fleet of 10,000, one replica": "10,000 watches over 100 connections",
    "fleet of 10,000, two replicas": "the same on two replicas",
}


def tables(cases: Cases) -> list[str]:
    """Lines of the tables, with what gives out first."""
    return ["", *_streams(cases), "", *_told(cases), "", *_calls(cases["heartbeats"]), "", *_first(cases), ""]


def _streams(cases: Cases) -> list[str]:
    rows: list[Sequence[object]] = []
    for name, shown in _WATCHES.items():
        case = cases[name]
        rows.append((shown, case["refused"], _us(case["opened_us_cpu_each"]), _idle(case), _kb(case)))
    case = cases["pushes"]
    rows.append(
        ("1,000 push streams of one token, a group each", case["refused"], _us(case["us_cpu_each"]), "–", _kb(case))
    )
    case = cases["workers"]
    refused = case["watches_refused"] + case["pushes_refused"]
    shown = "4,000 workers: two connections, a watch, a push stream"
    rows.append((shown, refused, _us(case["us_cpu_each"]), _idle(case), _kb(case)))
    return table(("opened at once", "refused", "CPU of each", "idle, all", "memory of each"), rows)


def _told(cases: Cases) -> list[str]:
    rows = [
        (
            shown,
            f"{case['told_p50_s']:.2f} s",
            f"{case['told_p99_s']:.2f} s",
            _us(case["told_us_cpu_each"]),
            _us(case["load_us_cpu_each"]),
        )
        for name, shown in _WATCHES.items()
        for case in [cases[name]]
    ]
    return table(("told of a publish", "p50", "p99", "CPU of each", "load's CPU of each"), rows)


def _calls(calls: Mapping[str, Mapping[str, float]]) -> list[str]:
    rows = []
    for name in ("ExtendLeases", "ReportEngine", "Heartbeat"):
        paced, most = calls[name], calls[f"{name}, as many as go"]
        costs = (paced["us_cpu_each"], most["us_cpu_each"], most["store_us_cpu_each"])
        rows.append((f"`{name}`", paced["failed"] + most["failed"], *map(_us, costs)))
    return table(("call", "failed", "CPU at 500/s", "CPU at full load", "store's CPU"), rows)


def _first(cases: Cases) -> list[str]:
    beat, worker = cases["heartbeats"]["Heartbeat"], cases["workers"]
    idle = cases["idle engines"]["us_cpu_each"]
    told = cases["fleet of 10,000, one replica"]["told_us_cpu_each"]
    limits = [
        ("connections, `--max-connections`", f"{CONNECTIONS:,}", CONNECTIONS / CONNECTIONS_OF_A_WORKER),
        ("memory, with 1 GiB for workers", _kb(worker), _GIB / 1e3 / worker["rss_kb_each"]),
        (f"CPU to tell all within {TOLD_S:.0f} s", _us(told), TOLD_S * 1e6 / told),
        ("CPU of idle engines that wait for evaluations", _us(idle), ASK_S * 1e6 / idle),
        ("CPU of heartbeats", _us(beat["us_cpu_each"]), BEAT_S * 1e6 / beat["us_cpu_each"]),
    ]
    limits.sort(key=lambda limit: limit[2])
    rows = [(name, number, f"{workers:,.0f}") for name, number, workers in limits]
    return table(("gives out, the first one first", "number", "workers of one process, a core"), rows)


def _us(value: float) -> str:
    return f"{value:,.0f} µs"


def _kb(case: Mapping[str, float]) -> str:
    return f"{case['rss_kb_each']:.0f} KB"


def _idle(case: Mapping[str, float]) -> str:
    return f"{case['idle_core']:.3f} core"
