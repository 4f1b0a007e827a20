"""The takeover of a run from a candidate, as the record notes it."""

from pathlib import Path
from typing import Any

from buffer_conformance.record import Record
from buffer_conformance.scenarios.trainer import TrainerSuite
from buffer_conformance.stage import Stage, SuiteOptions


class Surroundings(Stage):
    """A stage without a candidate and without a proxy."""

    def __init__(self, folder: Path) -> None:
        self.options, self.record = SuiteOptions(command=["none"], folder=folder), Record()

    async def end_candidate(self, within_s: float, *, terminate: bool) -> None:
        pass


class Service:
    """Answers a resume, and remembers what the record had noted by then."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.noted: list[str] = []

    async def call(self, method: str, **_: Any) -> None:
        assert method == "Resume"
        self.noted = [mark.kind for mark in self.record.marks]


async def test_a_takeover_is_noted_before_the_candidate_can_be_refused_for_it(tmp_path: Path) -> None:
    stage = Surroundings(tmp_path)
    service = Service(stage.record)
    await TrainerSuite(stage, service).taken_over()  # type: ignore[arg-type]
    assert service.noted == ["taken_over"]
