"""The stand-ins for Miles and slime beside the real ones: fields, defaults and parameters, one by one."""

import argparse
import dataclasses
import importlib
import inspect
import sys
from enum import Enum
from typing import Any

import pytest

from examples.miles import stand_in
from examples.miles.stand_in_samples import MilesSample
from tests.support.upstreams import checkout, needs

THINGS = [
    pytest.param(name, path, attribute, id=f"{name}.{path}.{attribute}", marks=needs(name))
    for name, contents in stand_in.CONTENTS.items()
    for path, attributes in contents.items()
    for attribute in attributes
]
CHOSEN = {
    "eval_datasets", "hf_checkpoint", "input_key", "label_key", "n_samples_per_prompt", "rollout_batch_size",
    "rollout_max_response_len", "start_rollout_id",
}  # fmt: skip
"""Chosen: what a job sets, or the framework works out after parsing."""
NAMELESS = {"args", "kwargs"}


def parameters(thing: Any) -> dict[str, tuple[object, object]]:
    """Parameters by name, kind and default."""
    return {
        name: (given.kind, given.default)
        for name, given in inspect.signature(thing).parameters.items()
        if name not in NAMELESS
    }


def fields(thing: Any) -> dict[str, object]:
    """Fields by name, the default."""
    return {
        each.name: each.default if each.default_factory is dataclasses.MISSING else shown(each.default_factory())
        for each in dataclasses.fields(thing)
    }


def shown(value: Any) -> Any:
    return fields(type(value)) if dataclasses.is_dataclass(value) else value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize(("name", "path", "attribute"), THINGS)
def test_stand_in_has_what_the_real_one_has(name: str, path: str, attribute: str) -> None:
    real: Any = getattr(importlib.import_module(f"{name}.{path}"), attribute)
    ours = stand_in.CONTENTS[name][path][attribute]
    if not dataclasses.is_dataclass(real):
        assert parameters(ours) == parameters(real)
        return
    assert {key: shown(value) for key, value in fields(ours).items()} == {
        key: shown(value) for key, value in fields(real).items()
    }


@pytest.mark.parametrize("name", ["miles", "slime"])
def test_samples_are_taken_apart_and_made_alike(name: str) -> None:
    if checkout(name) is None:
        pytest.skip(f"no checkout of {name}")
    ours = stand_in.CONTENTS[name]["utils.types"]["Sample"]
    real = importlib.import_module(f"{name}.utils.types").Sample
    assert [{each.name: each.value for each in of.Status} for of in (ours,)] == [
        {each.name: each.value for each in real.Status}
    ]
    filled = real(tokens=[1], reward=0.5, metadata={"a": 1}, remove_sample=True).to_dict() | {"unknown_to_both": 7}
    assert ours.from_dict(dict(filled)).to_dict() == real.from_dict(dict(filled)).to_dict() == filled


@needs("miles")
def test_retry_keeps_what_the_real_one_keeps() -> None:
    real = importlib.import_module("miles.utils.types").Sample
    given: Any = {name: "x" for name in fields(real) if name not in ("status", "spec_info", "prefix_cache_info")}
    samples = [of(**given) for of in (MilesSample, real)]
    for sample in samples:
        sample.reset_for_retry()
    assert samples[0].to_dict() == samples[1].to_dict()


@pytest.mark.parametrize("name", ["miles", "slime"])
def test_arguments_have_the_real_parsers_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if checkout(name) is None:
        pytest.skip(f"no checkout of {name}")
    monkeypatch.setattr(sys, "argv", ["train.py", "--rollout-batch-size", "8"])
    provider = getattr(importlib.import_module(f"{name}.utils.arguments"), f"get_{name}_extra_args_provider")()
    parser = provider(argparse.ArgumentParser())
    # A default that is text goes through the argument's type, as when it is parsed.
    defaults = {
        action.dest: (
            parser._get_value(action, action.default)
            if action.dest in stand_in.DEFAULTS and isinstance(action.default, str)
            else action.default
        )
        for action in parser._actions
    }
    known = {key: value for key, value in stand_in.DEFAULTS.items() if key in defaults}
    assert known == {key: defaults[key] for key in known}
    assert defaults.keys() >= CHOSEN - {"eval_datasets"}
    if name == "miles":
        assert stand_in.DEFAULTS.keys() <= defaults.keys()
