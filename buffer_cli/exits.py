"""Ends of commands: an error with its notes on standard error, a line each, and an exit code."""

import sys
from collections.abc import Callable

from buffer_wire.errors import InvalidField, RolloutBufferError

EXIT_REFUSED, EXIT_OPTIONS = 1, 2


def exit_code(command: Callable[[], int | None]) -> int:
    """Run the command and return its exit code, 0 where it has none.

    1 after an error of the service, 2 after one of the options.
    """
    try:
        return command() or 0
    except RolloutBufferError as error:
        for line in (f"error: {error.message}", *getattr(error, "__notes__", ())):
            sys.stderr.write(f"{line}\n")
        mistyped = isinstance(error, InvalidField) and error.attributes["field"].startswith("--")
        return EXIT_OPTIONS if mistyped else EXIT_REFUSED
