"""Writes values.schema.json of the chart from chart_schema.yaml, the service's settings and the worker's options.

Bounds of settings are those that pydantic knows. A worker's options check themselves when they are made, so their
bounds are found by making them: whatever is refused there is refused by the schema too.

usage: chart_schema.py [--check]   (--check: write nothing, fail if the file is out of date)
"""

import ast
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from buffer_service.settings import Settings
from buffer_wire.errors import InvalidField
from rollout_workers.engine.options import DEVICES, LaunchOptions, SimulatedOptions
from rollout_workers.engine.registry import SERVERS
from rollout_workers.engine.types import PauseMode
from rollout_workers.options import EVALUATIONS, WorkerOptions

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "scripts/chart_schema.yaml"
TARGET = ROOT / "deploy/helm/rollout-buffer/values.schema.json"

CHART_SETTINGS = {
    *("listen", "admin", "insecure", "data_dir", "store", "store_ca", "payload_store", "store_binary"),
    "durability",
    *("tls_cert", "tls_key", "tls_client_ca", "admin_client_ca", "tokens_file"),
    *("direct_payloads", "payload_listen", "payload_address", "payload_writer", "payload_reader"),
}
"""Settings that the chart gives itself; admin_client_ca it never gives, because probes have no certificate."""

CHART_OPTIONS = {
    *("address", "run_id", "worker_id", "engine_urls", "router", "launch", "simulated"),
    *("access", "weights_dir", "weights_serve", "weights_advertise", "metrics_listen"),
    *("weights_access", "weights_mirrors", "weights_tls_cert", "weights_tls_key"),
}
"""Worker options that the chart gives itself."""

CHOICES = {"pause_mode": tuple(PauseMode), "evaluations": EVALUATIONS, "device": DEVICES, "engine_kind": SERVERS}

LARGEST = 1 << 40
"""Values that are accepted beyond this have no bound."""

Schema = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Writes or checks the file; returns an exit code."""
    text = json.dumps(values_schema(), indent=2) + "\n"
    if "--check" not in arguments:
        TARGET.write_text(text)
        return 0
    if TARGET.read_text() != text:
        print(f"{TARGET.relative_to(ROOT)} is out of date; run `python -m scripts.chart_schema`", file=sys.stderr)
        return 1
    return 0


def values_schema() -> Schema:
    """The whole schema."""
    source = yaml.safe_load(SOURCE.read_text())
    pool = source.pop("pool")
    generated: dict[str, Callable[[], Schema]] = {
        "service": _settings,
        "worker": lambda: _options(WorkerOptions, _worker_with, leave_out=CHART_OPTIONS),
        "launch": lambda: _options(LaunchOptions, _launch_with),
        "simulated": lambda: _options(SimulatedOptions, lambda values: SimulatedOptions(**values)),
    }
    definitions = source["definitions"]
    for name, definition in definitions.items():
        if "generated" in definition:
            definitions[name] = generated[definition["generated"]]()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_closed(source, pool)}


def _closed(node: Any, pool: Schema) -> Any:  # noqa: ANN401 - any JSON value
    """The schema with `$extends: pool` resolved and every object refusing what it does not list."""
    if isinstance(node, list):
        return [_closed(item, pool) for item in node]
    if not isinstance(node, dict):
        return node
    if "$extends" in node:
        properties = {**node.get("properties", {}), **pool["properties"]}
        node = {**pool, **{k: v for k, v in node.items() if k != "$extends"}, "properties": properties}
    closed = {key: _closed(value, pool) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and node.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _settings() -> Schema:
    schema = Settings.model_json_schema()
    properties = {}
    for name, given in schema["properties"].items():
        if name in CHART_SETTINGS:
            continue
        if "$ref" in given:
            given = {**schema["$defs"][given.pop("$ref").rpartition("/")[2]], **given}  # noqa: PLW2901 - resolved
        properties[name] = {key: value for key, value in given.items() if key != "title"}
        properties[name]["description"] = _one_line(given["description"])
    return {"type": "object", "properties": properties}


def _worker_with(values: Mapping[str, Any]) -> object:
    needed = {"address": "a:1", "run_id": "r", "reward": "module:function", "engine_urls": ("http://a:1",)}
    return WorkerOptions(**{**needed, **values})


def _launch_with(values: Mapping[str, Any]) -> object:
    needed = {"model_path": Path("model"), "device": "cuda", "gpus_per_engine": 1}
    return LaunchOptions(**{**needed, **values})


def _options(
    options: type, make: Callable[[Mapping[str, Any]], object], *, leave_out: typing.Container[str] = ()
) -> Schema:
    properties = {}
    documented = _docstrings(options)
    for name, hint in typing.get_type_hints(options).items():
        if name in leave_out:
            continue
        properties[name] = {**_type(name, hint, make), "description": documented.get(name, "")}
    return {"type": "object", "properties": properties}


def _type(name: str, hint: object, make: Callable[[Mapping[str, Any]], object]) -> Schema:
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    if name in CHOICES:
        return {"enum": list(CHOICES[name])}
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": {"type": "string", "minLength": 1}}
    if kinds == {bool}:
        return {"type": "boolean"}
    if kinds <= {int, float}:
        return {"type": "integer" if kinds == {int} else "number", **_bounds(lambda value: make({name: value}))}
    return {"type": "string", "minLength": 1}


def _bounds(make: Callable[[int], object]) -> Schema:
    """Bounds of a number that is checked when it is made; what is accepted is one interval that holds 1 or 2."""
    accepted = _accepted(make)
    least = next(value for value in (-1, 0, 1, 2) if accepted(value))
    bounds = {} if least == -1 else {"minimum": least}
    if least == 1 and accepted(typing.cast("int", 0.5)):
        bounds = {"exclusiveMinimum": 0}
    low, high = 2, LARGEST
    if accepted(high):
        return bounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return {**bounds, "maximum": low}


def _accepted(make: Callable[[int], object]) -> Callable[[int], bool]:
    def accepted(value: int) -> bool:
        try:
            make(value)
        except InvalidField:
            return False
        return True

    return accepted


def _docstrings(options: type) -> dict[str, str]:
    """The string under each field."""
    (definition,) = ast.parse(inspect.getsource(options)).body
    if not isinstance(definition, ast.ClassDef):
        raise TypeError(options)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = _one_line(words)
            case _:
                pass
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
