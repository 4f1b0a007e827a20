"""Commands that hold their options alone; what they run is imported when they run.

A parameter of a command whose type is a dataclass stands for options that several commands have: each of its fields is
an option by itself.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import typer

from buffer_cli.exits import exit_code
from buffer_wire.errors import InvalidField
from buffer_wire.limits import is_text

Command = Callable[..., None]


def runs(target: str) -> Callable[[Command], Command]:
    """Have a command run `target`, "module:function", which takes its parameters by name, and end with its exit code.

    The function returns an exit code, or None for success. Errors of the service and of options are printed.
    """

    def declared(command: Command) -> Command:
        own = inspect.signature(command).parameters.values()
        groups: dict[str, Any] = {one.name: one.annotation for one in own if is_dataclass(one.annotation)}

        @functools.wraps(command)
        def run(**given: Any) -> None:  # noqa: ANN401 - values of options
            for name, group in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
            function = pkgutil.resolve_name(target)

            def checked() -> int | None:
                _check_texts(given)
                status: int | None = function(**given)
                return status

            raise typer.Exit(exit_code(checked))

        options = [option for parameter in own for option in _options(parameter)]
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        run.runs = target  # type: ignore[attr-defined]
        return run

    return declared


def _check_texts(given: Mapping[str, object]) -> None:
    """Raise InvalidField for a text with bytes that are no UTF-8, which Python keeps as halves of characters."""
    for name, value in given.items():
        if is_dataclass(value):
            _check_texts(vars(value))
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                raise InvalidField(f"--{name.replace('_', '-')}", ascii(text), "text in UTF-8")


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Options that a parameter stands for; a default of the whole group goes before those of its fields."""
    if not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    for field in fields(parameter.annotation):
        default = field.default
        if parameter.default is not parameter.empty:
            default = getattr(parameter.default, field.name)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=parameter.empty if default is MISSING else default,
            annotation=field.type,
        )
