"""The receiver of spans, and the sampler that takes all."""

import pytest

from tests.support.traces import received

__all__ = ["received"]


@pytest.fixture(autouse=True)
def all_groups_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
