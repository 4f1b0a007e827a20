"""The receiver of spans."""

from tests.support.traces import received

__all__ = ["received"]
