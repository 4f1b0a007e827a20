"""`rollout-buffer config`: settings, and what is wrong with them."""

import json
import sys

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


def explained(error: ValidationError) -> str:
    """One line per setting that is refused. Values are left out: they may be secrets."""
    lines = []
    for item in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        where = f"{name} (--{name.replace('_', '-')}, RB_{name.upper()}): " if name else ""
        lines.append(f"error: {where}{item['msg'].removeprefix('Value error, ')}\n")
    return "".join(lines)
