"""One error tree: unique reasons, valid status codes, and a round trip over the wire for each."""

import pickle
from pathlib import Path

import grpc
import pytest

from buffer_wire import status
from buffer_wire.errors import InvalidField, RolloutBufferError, StaleTerm, by_reason

pytestmark = pytest.mark.matrix

REASONS = sorted(by_reason())


def test_reasons_are_unique_over_the_tree() -> None:
    def count(cls: type[RolloutBufferError]) -> int:
        return ("reason" in vars(cls)) + sum(count(child) for child in cls.__subclasses__())

    assert count(RolloutBufferError) == len(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_every_error_survives_the_wire(reason: str) -> None:
    cls = by_reason()[reason]
    error = cls.from_wire("what happened", {"run_id": "r", "limit": "3"})
    code, details, trailing = status.status_of(error)
    assert isinstance(code, grpc.StatusCode)
    back = status.error_of(code, details, trailing)
    assert type(back) is cls
    assert (back.message, dict(back.attributes)) == ("what happened", {"run_id": "r", "limit": "3"})


def test_an_error_of_another_process_comes_whole() -> None:
    error = InvalidField("steps", 0, "at least 1")
    error.add_note("of the third run")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is InvalidField
    assert (str(back), back.message, back.attributes) == (str(error), error.message, error.attributes)
    assert back.__notes__ == ["of the third run"]


def test_errors_carry_their_data() -> None:
    error = StaleTerm(term=1, current=2)
    assert dict(error.attributes) == {"term": "1", "current": "2"}
    assert not error.retryable


def test_long_values_are_shortened_in_messages() -> None:
    assert len(str(InvalidField("x", "y" * 10_000, "short"))) < 300


@pytest.mark.parametrize(
    ("code", "reason", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, "service_unreachable", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "service_unreachable", True),
        (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated", False),
        (grpc.StatusCode.PERMISSION_DENIED, "permission_denied", False),
        (grpc.StatusCode.INTERNAL, "internal", False),
    ],
)
def test_a_status_without_detail_is_still_an_error_of_the_tree(
    code: grpc.StatusCode, reason: str, retryable: bool
) -> None:
    error = status.error_of(code, "connection refused", None)
    assert (error.reason, error.retryable) == (reason, retryable)
    assert "connection refused" in str(error)


def test_every_reason_is_in_the_protocol_page_with_its_status() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for reason, cls in by_reason().items():
        assert f"| `{reason}` | {cls.code} | {'yes' if cls.retryable else 'no'} |" in page, reason
