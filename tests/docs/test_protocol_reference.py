"""The protocol reference: how comments become the page, and that the page has everything that the contract has."""

from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, SourceCodeInfo

from scripts.protocol_reference import Undocumented, page, prose
from tests.docs.pages import ROOT

FILES = sorted((ROOT / "proto/rollout_buffer/v1").glob("*.proto"))


def contract(*, commented: bool = True) -> FileDescriptorProto:
    """A message with a repeated enum, an optional number and a map, and an enum."""
    file = FileDescriptorProto(name="rollout_buffer/v1/things.proto", package="rollout_buffer.v1", syntax="proto3")
    thing = file.message_type.add(name="Thing")
    # Types 14, 4, 11, 9: enum, uint64, message, string; labels 3, 1: repeated, optional.
    thing.field.add(name="kinds", number=1, type=14, label=3, type_name=".rollout_buffer.v1.Kind")
    thing.field.add(name="size_bytes", number=2, type=4, label=1, proto3_optional=True, oneof_index=0)
    thing.oneof_decl.add(name="_size_bytes")
    thing.field.add(name="data", number=3, type=11, label=3, type_name=".rollout_buffer.v1.Thing.DataEntry")
    entry = thing.nested_type.add(name="DataEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=9, label=1)
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="KIND_UNSPECIFIED", number=0)
    texts = {
        (12,): " Things.\n\n More of them:\n   A  first\n",
        (4, 0): " A thing.\n",
        (4, 0, 2, 0): " What it is: a | b,\n below <2>.\n",
        (4, 0, 2, 1): " Bytes, at most 5.\n",
        (4, 0, 2, 2): " Data.\n",
        (5, 0): " Kinds.\n",
        (5, 0, 2, 0): " Not set.\n",
    }
    if not commented:
        del texts[4, 0, 2, 1]
    file.source_code_info.location.extend(
        SourceCodeInfo.Location(path=path, leading_comments=text) for path, text in texts.items()
    )
    return file


def test_fields_have_their_type_and_their_comment_in_one_line() -> None:
    text = page([contract()])
    assert r"| `kinds` | 1 | repeated [Kind](#kind) | What it is: a \| b, below &lt;2>. |" in text
    assert "| `size_bytes` | 2 | optional `uint64` | Bytes, at most 5. |" in text
    assert "| `data` | 3 | `map<string, string>` | Data. |" in text
    assert "| `KIND_UNSPECIFIED` | 0 | Not set. |" in text


def test_what_has_no_comment_is_named() -> None:
    with pytest.raises(Undocumented, match=r"things\.proto: Thing\.size_bytes has no comment"):
        page([contract(commented=False)])


def test_what_a_comment_indents_stays_as_it_is() -> None:
    assert prose(" One\n two.\n   A  first\n   B  second\n And on.\n") == (
        "One\ntwo.\n\n    A  first\n    B  second\n\nAnd on.\n"
    )


@pytest.mark.parametrize("source", FILES, ids=lambda source: source.stem)
def test_the_page_names_everything_in_the_contract(source: Path) -> None:
    """`make proto-check` compares the page with the files; this needs no compiler."""
    file = import_module(f"rollout_buffer.v1.{source.stem}_pb2").DESCRIPTOR
    text = (ROOT / "docs/protocol_reference.md").read_text()
    names = [f"### {message}\n" for message in (*file.message_types_by_name, *file.enum_types_by_name)]
    for message in file.message_types_by_name.values():
        names += [f"| `{field.name}` | {field.number} |" for field in message.fields]
    for enum in file.enum_types_by_name.values():
        names += [f"| `{value.name}` | {value.number} |" for value in enum.values]
    for service in file.services_by_name.values():
        names += [f"### {service.name}\n", *(f"| `{method.name}` |" for method in service.methods)]
    assert [name for name in names if name not in text] == []
