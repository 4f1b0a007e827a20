"""Output of commands: tables, facts and JSON."""

import json
import textwrap
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.text import Text


def show(what: RenderableType) -> None:
    """Print for people."""
    Console(highlight=False).print(what)


def print_json(values: object) -> None:
    """Print for programs."""
    print(json.dumps(values, indent=2))


def values_of(message: Message) -> dict[str, Any]:
    """Fields of a message as JSON values, those without presence included."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_facts(console: Console, title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a title, which may have markup, and facts below it, a line each."""
    console.print(title)
    for name, value in facts:
        print_fact(console, name, value)


def print_fact(console: Console, name: str, value: str) -> None:
    """Print a name and what is said of it, without markup; what does not fit goes on below its beginning."""
    line = f"  {name:<14} {value}"
    shown = textwrap.fill(line, console.width, subsequent_indent=" " * 17, break_on_hyphens=False)
    console.print(Text(shown, no_wrap=True, overflow="ignore"))


_LARGE = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"))


def count(value: int, exact_below: int = 10**9) -> str:
    """A count with each of its digits, or with four figures from `exact_below` on, at least 1,000,000: 12.35 G."""
    for unit, name in _LARGE:
        if value >= max(unit, exact_below):
            return f"{value / unit:,.4g} {name}"
    return f"{value:,}"
