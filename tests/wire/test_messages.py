"""Messages of values with the same fields: nothing is forgotten on the way, and what is not set stays so."""

from dataclasses import dataclass

import pytest

from buffer_wire.messages import message_of, value_of
from rollout_buffer.v1 import common_pb2, tasks_pb2, weights_pb2


@dataclass(frozen=True)
class Version:
    term: int = 0
    version: int = 0


@dataclass(frozen=True)
class Report:
    state: str
    loaded: Version
    prepared: Version | None
    note: str = "unsaid"


def message(report: Report) -> weights_pb2.EngineReport:
    mine = {"state", "loaded", "prepared"}
    others = {field.name: None for field in weights_pb2.EngineReport.DESCRIPTOR.fields if field.name not in mine}
    return message_of(weights_pb2.EngineReport, report, **others)


@pytest.mark.parametrize("prepared", [None, Version(2, 8)])
def test_words_and_dataclasses_travel_there_and_back(prepared: Version | None) -> None:
    report = Report("loading", Version(2, 7), prepared)
    sent = message(report)
    assert sent.state == weights_pb2.ENGINE_STATE_LOADING
    assert sent.HasField("prepared") == (prepared is not None)
    assert value_of(Report, sent) == report


def test_what_is_given_takes_the_place_of_what_is_there() -> None:
    sent = message_of(common_pb2.WeightVersion, Version(1, 2), version=9)
    assert (sent.term, sent.version) == (1, 9)
    assert value_of(Version, sent, term=4) == Version(4, 9)


@dataclass(frozen=True)
class Wanted:
    version: Version
    manifest: bytes


def test_a_serialized_message_is_that_message_and_empty_bytes_are_none() -> None:
    manifest = weights_pb2.WeightManifest(files=weights_pb2.FilesManifest(base_url="/w"))
    sent = message_of(tasks_pb2.WantedWeights, Wanted(Version(1, 2), manifest.SerializeToString()))
    assert sent.manifest == manifest
    assert not message_of(tasks_pb2.WantedWeights, Wanted(Version(1, 2), b"")).HasField("manifest")


def test_a_field_that_nobody_gives_is_no_silent_zero() -> None:
    with pytest.raises(AttributeError, match="term"):
        message_of(common_pb2.WeightVersion, object())


def test_a_word_that_the_wire_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match="asleep"):
        message(Report("asleep", Version(), None))


def test_an_enum_without_a_value_is_unspecified_and_one_of_a_later_version_is_refused() -> None:
    assert value_of(Report, weights_pb2.EngineReport()).state == "unspecified"
    with pytest.raises(ValueError, match="99"):
        value_of(Report, weights_pb2.EngineReport(state=99))  # type: ignore[arg-type]
