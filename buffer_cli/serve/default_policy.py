"""`rollout-buffer config policy`."""

import json
from collections.abc import Sequence

from buffer_cli.exits import exit_code
from buffer_cli.policies import default_policy, shown


def print_default_policy(preset: str, assignments: Sequence[str]) -> int:
    """The policy of a run whose creator sets only these things; null is unset. Returns the exit code."""

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
