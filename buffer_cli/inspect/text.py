"""Samples as text: their tokens in segments of one part, version and loss mask, for a terminal or as HTML."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text

from buffer_wire.errors import InvalidField, RolloutBufferError
from rollout_buffer.v1 import groups_pb2

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special ones included."""

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""Colours of versions, in their order; a sample of more versions begins anew with the first."""

PROMPT, LEFT_OUT = "the prompt", "not trained on"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that lie together: `kind` is PROMPT, LEFT_OUT (loss mask 0), or the version that made them."""

    kind: str
    token_ids: tuple[int, ...]
    colour: str
    """Colour of the version; "" for a prompt."""


def tokenizer(path: str) -> Decode:
    """Text of token ids by the tokenizer.json at `path`, a file or a model's directory.

    Raises InvalidField, and RolloutBufferError where the package is missing.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise RolloutBufferError("text of tokens needs the package tokenizers: the extra `text`") from None
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises no others
        raise InvalidField("--tokenizer", path, f"a tokenizer.json, or a directory that has one: {error}") from None
    return lambda token_ids: found.decode(list(token_ids), skip_special_tokens=False)


def segments(
    sample: groups_pb2.Sample, token_ids: Sequence[int], loss_mask: bytes, first: int = 0
) -> Iterator[Segment]:
    """Segments of a sample's tokens from its token `first` on. An empty mask is not known, and taken as ones."""
    colours: dict[str, str] = {}
    for one in sample.spans:
        colours.setdefault(_version(one), _COLOURS[len(colours) % len(_COLOURS)])

    def kind(index: int) -> tuple[str, str]:
        at = first + index
        if at < sample.prompt_len:
            return PROMPT, ""
        version = next((_version(one) for one in sample.spans if one.start <= at < one.end), "")
        trained = not loss_mask or loss_mask[index]
        return (version if trained else LEFT_OUT), colours.get(version, "")

    for (name, colour), indices in groupby(range(len(token_ids)), kind):
        yield Segment(name, tuple(token_ids[index] for index in indices), colour)


def _version(span: groups_pb2.VersionSpan) -> str:
    return f"version {span.version.term}.{span.version.version}"


def as_text(parts: Sequence[Segment], decode: Decode) -> Text:
    """Segments for a terminal: a prompt dim, versions in their colours, and underlined what is not trained on."""
    text = Text()
    for part in parts:
        style = "dim" if part.kind == PROMPT else part.colour
        text.append(decode(part.token_ids), style=f"{style} underline" if part.kind == LEFT_OUT else style)
    return text


def legend(parts: Sequence[Segment]) -> Text:
    """Kinds of the segments, each as it is shown."""
    text = Text()
    for part in {part.kind: part for part in parts}.values():
        style = "dim" if part.kind == PROMPT else "underline" if part.kind == LEFT_OUT else part.colour
        text.append("  ").append(part.kind, style=style)
    return text


def as_html(parts: Sequence[Segment], decode: Decode) -> str:
    """Segments as HTML, each with its kind as what a pointer over it is told."""

    def shown(part: Segment) -> str:
        style = "opacity:.55" if part.kind == PROMPT else f"color:{part.colour}"
        lined = ";text-decoration:underline dotted" if part.kind == LEFT_OUT else ""
        text = html.escape(decode(part.token_ids))
        return f'<span title="{html.escape(part.kind)}" style="{style}{lined}">{text}</span>'

    return f'<pre style="white-space:pre-wrap">{"".join(map(shown, parts))}</pre>'
