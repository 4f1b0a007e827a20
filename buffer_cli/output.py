"""Output of commands: tables, facts and JSON."""

import json
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.markup import escape


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
        console.print(f"  {name:<14} {escape(value)}")
