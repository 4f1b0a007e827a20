from pathlib import Path
from typing import Any

import pytest

from buffer_wire.errors import InvalidField
from rollout_workers.engine.options import LaunchOptions, SimulatedOptions
from rollout_workers.options import WorkerOptions, default_worker_id

NEEDED: dict[str, Any] = {"address": "127.0.0.1:50051", "run_id": "r", "reward": "m:f"}


def test_every_source_of_engines_is_told_by_its_name() -> None:
    assert WorkerOptions(**NEEDED, engine_urls=("http://a:1", "http://b:1")).source == "url"
    assert WorkerOptions(**NEEDED, router="http://r:1").source == "router"
    assert WorkerOptions(**NEEDED, launch=LaunchOptions(Path("m"), engines=3)).source == "launch"
    assert WorkerOptions(**NEEDED, simulated=SimulatedOptions(engines=4)).source == "simulate"


@pytest.mark.parametrize("sources", [{}, {"simulated": SimulatedOptions(), "engine_urls": ("http://a:1",)}])
def test_exactly_one_source_of_engines_is_named(sources: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r"engine_urls \(--engine\), router, launch and simulated \(--simulate\)"):
        WorkerOptions(**NEEDED, **sources)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", "localhost"),
        ("run_id", "a b"),
        ("reward", "module.function"),
        ("worker_id", ""),
        ("worker_id", "x" * 101),
        ("groups_per_engine", 0),
        ("groups_per_engine", 257),
        ("pause_mode", "gently"),
        ("prefix_cache", "sample"),
        ("lease_wait_s", 61.0),
        ("drain_grace_s", 0.0),
        ("reload_timeout_s", float("nan")),
        ("service_timeout_s", float("inf")),
        ("keep_versions", 0),
        ("engine_urls", ("localhost:30000",)),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(field: str, value: object) -> None:
    given: dict[str, Any] = {**NEEDED, "engine_urls": ("http://a:1",), field: value}
    with pytest.raises(InvalidField) as caught:
        WorkerOptions(**given)
    assert caught.value.attributes["field"] == field


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("device", {"device": "tpu"}),
        ("gpus_per_engine", {"device": "cuda", "engines": 2}),
        ("gpus_per_engine", {"gpus_per_engine": 1}),
        ("gpus_per_engine", {"device": "cuda", "gpus_per_engine": 65}),
    ],
)
def test_launched_servers_that_could_not_work_are_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        LaunchOptions(Path("m"), **given)
    assert caught.value.attributes["field"] == f"launch.{field}"


def test_default_worker_id_is_a_legal_one() -> None:
    WorkerOptions(**NEEDED, simulated=SimulatedOptions(), worker_id=default_worker_id())


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("engine_kind", {"engine_urls": ("http://a:1",), "engine_kind": "an abacus"}),
        ("engine_kind", {"engine_urls": ("http://a:1",), "engine_kind": "simulated"}),
        ("engine_kind", {"launch": LaunchOptions(Path("m")), "engine_kind": "vllm", "pause_mode": "abort"}),
        ("engine_kind", {"router": "http://a:1", "engine_kind": "vllm", "pause_mode": "abort"}),
        ("pause_mode", {"engine_urls": ("http://a:1",), "engine_kind": "vllm"}),
        (
            "prefix_cache",
            {"engine_urls": ("http://a:1",), "engine_kind": "vllm", "pause_mode": "abort", "prefix_cache": "group"},
        ),
        ("prefix_cache", {"evaluations": "only", "prefix_cache": "group"}),
        ("sglang_version", {"engine_urls": ("http://a:1",), "sglang_version": "new"}),
        ("sglang_version", {"simulated": SimulatedOptions(), "sglang_version": "0.5.23"}),
    ],
)
def test_what_a_kind_of_engines_cannot_do_is_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        WorkerOptions(**NEEDED, **given)
    assert caught.value.attributes["field"] == field
