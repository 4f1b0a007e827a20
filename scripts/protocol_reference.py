"""Writes docs/protocol_reference.md from the proto files and the comments in them.

Every service, RPC, message, field, enum and value is on the page with its comment, which states unit and limits; one
without a comment is an error. Needs an interpreter with constraints/proto.txt: grpc_tools compiles the files.

usage: protocol_reference.py [--check]   (--check: write nothing, fail if the page is out of date)
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
TARGET = ROOT / "docs/protocol_reference.md"

INTRODUCTION = """\
# Protocol reference

Every service, RPC, message and field, with unit and limits. How they work together: [protocol](protocol.md); what may
change in them: [compatibility](compatibility.md). `python -m scripts.protocol_reference` writes this page from the
comments of [`proto/rollout_buffer/v1/`](../proto/rollout_buffer/v1/): change those, not this. `make proto-check` fails
where the two differ.
"""

# Numbers of fields in descriptor.proto, of which the paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES, _SYNTAX = 4, 5, 6, 12
_FIELDS, _VALUES, _METHODS = 2, 2, 2

CommentPath = tuple[int, ...]


class Undocumented(ValueError):
    """Something in the contract has no comment; the message names it."""


def main(arguments: list[str]) -> int:
    """Writes or checks the page; returns an exit code."""
    text = page(compiled(SOURCES).file)
    if "--check" not in arguments:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        print(
            f"{TARGET.relative_to(ROOT)} is out of date; run `.venv-proto/bin/python -m scripts.protocol_reference`",
            file=sys.stderr,
        )
        return 1
    print(f"{TARGET.relative_to(ROOT)} matches the proto files")
    return 0


def compiled(sources: Path) -> FileDescriptorSet:
    """The contract's proto files below a folder, in order of their paths, with comments. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"-I{sources}", "--include_source_info"),
                *(f"--descriptor_set_out={out.name}", *sorted(map(str, sources.rglob("v1/*.proto")))),
            ],
            check=True,
        )
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


def page(files: Sequence[FileDescriptorProto]) -> str:
    """The whole page. Raises Undocumented."""
    documented = [Documented(file, comments(file)) for file in sorted(files, key=lambda file: file.name)]
    parts = [INTRODUCTION, _index(documented)]
    for file in documented:
        parts.extend(file.sections())
    return "\n".join(parts)


def comments(file: FileDescriptorProto) -> dict[CommentPath, str]:
    """The comments above things, by where they are in the file."""
    return {
        tuple(location.path): location.leading_comments
        for location in file.source_code_info.location
        if location.leading_comments
    }


@dataclass(frozen=True)
class Documented:
    """A file and the comments in it, by the path of what they stand above."""

    file: FileDescriptorProto
    comments: dict[CommentPath, str]

    @property
    def name(self) -> str:
        """Without its folder."""
        return Path(self.file.name).name

    def sections(self) -> Iterator[str]:
        """Its heading, what it is about, its services, messages and enums."""
        yield f"## {self.name}\n"
        yield prose(self.comment((_SYNTAX,), self.name))
        for index, service in enumerate(self.file.service):
            yield from self._service((_SERVICES, index), service)
        for index, message in enumerate(self.file.message_type):
            yield from self._message((_MESSAGES, index), message)
        for index, enum in enumerate(self.file.enum_type):
            yield from self._enum((_ENUMS, index), enum)

    def comment(self, path: CommentPath, name: str) -> str:
        """Comment above it. Raises Undocumented."""
        text = self.comments.get(path, "")
        if not text.strip():
            raise Undocumented(f"{self.file.name}: {name} has no comment")
        return text

    def _service(self, path: CommentPath, service: ServiceDescriptorProto) -> Iterator[str]:
        yield f"### {service.name}\n"
        yield prose(self.comment(path, service.name))
        yield "| RPC | request | reply | |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            text = self.comment((*path, _METHODS, index), f"{service.name}.{method.name}")
            request = "stream of " * method.client_streaming + link(method.input_type)
            reply = "stream of " * method.server_streaming + link(method.output_type)
            yield f"| `{method.name}` | {request} | {reply} | {cell(text)} |"
        yield ""

    def _message(self, path: CommentPath, message: DescriptorProto) -> Iterator[str]:
        yield f"### {message.name}\n"
        yield prose(self.comment(path, message.name))
        if not message.field:
            yield "No fields.\n"
            return
        yield "| field | no. | type | |\n|---|---|---|---|"
        maps = {f"{message.name}.{nested.name}": nested for nested in message.nested_type}
        for index, field in enumerate(message.field):
            text = self.comment((*path, _FIELDS, index), f"{message.name}.{field.name}")
            if field.HasField("oneof_index") and not field.proto3_optional:
                text = f"One of `{message.oneof_decl[field.oneof_index].name}`: {text.strip()}"
            yield f"| `{field.name}` | {field.number} | {type_of(field, maps)} | {cell(text)} |"
        yield ""

    def _enum(self, path: CommentPath, enum: EnumDescriptorProto) -> Iterator[str]:
        yield f"### {enum.name}\n"
        yield prose(self.comment(path, enum.name))
        yield "| value | no. | |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            text = self.comment((*path, _VALUES, index), value.name)
            yield f"| `{value.name}` | {value.number} | {cell(text)} |"
        yield ""


def _index(files: Sequence[Documented]) -> str:
    rows = ["| service | in | RPCs |", "|---|---|---|"]
    for file in files:
        for service in file.file.service:
            rpcs = ", ".join(f"`{method.name}`" for method in service.method)
            rows.append(f"| [{service.name}](#{service.name.lower()}) | [{file.name}](#{anchor(file.name)}) | {rpcs} |")
    return "\n".join([*rows, ""])


def type_of(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    """A field's type as a proto file writes it; messages and enums of ours are links."""
    if field.type_name:
        local = ".".join(field.type_name.split(".")[-2:])
        if local in maps:
            key, value = (type_of(part, {}).strip("`") for part in maps[local].field)
            return f"`map<{key}, {value}>`"
        name = link(field.type_name)
    else:
        name = f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    if field.proto3_optional:
        return f"optional {name}"
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def link(type_name: str) -> str:
    """To the section of a message or enum of the page, from its full name."""
    name = type_name.rsplit(".", 1)[-1]
    return f"[{name}](#{name.lower()})"


def anchor(heading: str) -> str:
    """That of a heading that is the name of a file."""
    return heading.lower().replace(".", "")


def prose(comment: str) -> str:
    """A comment as paragraphs; what it indents is kept as it stands."""
    out: list[str] = []
    for line in comment.rstrip().splitlines():
        indented = line.startswith("   ")
        if indented != bool(out and out[-1].startswith("    ")):
            out.append("")
        out.append(f"    {line.strip()}" if indented else _escaped(line.strip()))
    return "\n".join([*out, ""]).lstrip("\n")


def cell(comment: str) -> str:
    """A comment in one line of a table."""
    return _escaped(" ".join(comment.split())).replace("|", r"\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
