"""`rollout-buffer config policy`."""

from collections.abc import Sequence

from buffer_cli.output import print_json
from buffer_cli.policies import default_policy, shown


def print_default_policy(preset: str, assignments: Sequence[str] | None) -> None:
    """Print the policy of a run whose creator sets only these things; null is unset."""
    print_json({name: _json(text) for name, text in shown(default_policy(preset, assignments or ()))})


def _json(text: str) -> str | int | bool | None:
    """A value of `shown` as JSON has it."""
    words = {"none": None, "true": True, "false": False}
    if text in words:
        return words[text]
    return int(text) if text.lstrip("-").isdecimal() else text
