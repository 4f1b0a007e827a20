"""Promises that all boundaries share."""

from buffer_wire.errors.base import RolloutBufferError

MOST_SAID = 4_096
"""Characters of an error: what a peer sends is quoted in part."""


def refused_by_name(error: RolloutBufferError) -> None:
    """Check that an error names the field, and the limit or the reason, in a text of a bounded size."""
    told = error.attributes
    assert told["field"], error
    assert told.get("limit") or told.get("why"), error
    said_in_short(str(error))


def said_in_short(text: str) -> None:
    """Check that a text is one, and not longer than what anybody reads."""
    assert 0 < len(text) <= MOST_SAID, f"{len(text)} characters"
