"""Tests of which of gRPC's own lines the log leaves out."""

import logging
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from buffer_service.observability import logs

GRPC = logging.getLogger("grpc._cython.cygrpc")


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    handlers, level, filters = logging.root.handlers[:], logging.root.level, GRPC.filters[:]
    logs.configure("info", "console")
    yield
    logging.root.handlers[:], GRPC.filters[:] = handlers, filters
    logging.root.setLevel(level)


def told(error: Exception, text: str) -> bool:
    """Tell whether gRPC's line about an error is one of the log."""
    record = GRPC.makeRecord(GRPC.name, logging.ERROR, "f", 1, text, (), (type(error), error, None))
    return bool(GRPC.filter(record))


def test_a_reply_that_finds_its_client_gone_is_no_error() -> None:
    assert not told(cygrpc.ExecuteBatchError("failed"), "ExecuteBatchError raised in core by servicer method [/a/B]")
    assert told(ValueError("bad"), "Unexpected [ValueError] raised by servicer method [/a/B]")
    assert not told(ValueError("bad"), "Invalid encoding of a header")
