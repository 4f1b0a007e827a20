"""`rollout-buffer config`."""

import json
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from buffer_service.settings import Settings


def print_settings() -> int:
    """The settings that the environment gives; returns the exit code."""
    try:
        settings = Settings()
    except ValidationError as error:
        sys.stderr.write(explained(error))
        return 2
    print(json.dumps(settings.redacted(), indent=2))
    return 0


def print_default_policy(preset: str, assignments: Sequence[str]) -> int:
    """The policy of a run whose creator sets only these things; null is unset. Returns the exit code."""
    from buffer_cli.exits import exit_code
    from buffer_cli.policies import default_policy, shown

    def show() -> int:
        print(json.dumps({name: _json(text) for name, text in shown(default_policy(preset, assignments))}, indent=2))
        return 0

    return exit_code(show)


def _json(text: str) -> str | int | bool | None:
    """A value of `shown` as JSON has it."""
    words = {"none": None, "true": True, "false": False}
    if text in words:
        return words[text]
    return int(text) if text.lstrip("-").isdecimal() else text


def explained(error: ValidationError) -> str:
    """One line per setting that is refused. Values are left out: they may be secrets."""
    lines = []
    for item in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        where = f"{name} (--{name.replace('_', '-')}, RB_{name.upper()}): " if name else ""
        lines.append(f"error: {where}{item['msg'].removeprefix('Value error, ')}\n")
    return "".join(lines)
