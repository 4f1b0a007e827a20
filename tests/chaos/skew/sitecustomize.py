"""Wall clock of a Python program that is wrong by CLOCK_OFF_S seconds, as a host's is that nobody sets.

Imported by every interpreter that has this folder on its path. The monotonic clock is left alone.
"""

import os
import time

_OFF_S = int(os.environ["CLOCK_OFF_S"])
_time, _time_ns = time.time, time.time_ns


def _skewed() -> float:
    return _time() + _OFF_S


def _skewed_ns() -> int:
    return _time_ns() + _OFF_S * 10**9


time.time, time.time_ns = _skewed, _skewed_ns
