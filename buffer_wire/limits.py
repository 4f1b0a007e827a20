"""Bounds of the wire contract that code on both sides checks. The .proto files document the same numbers."""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

MAX_MESSAGE_BYTES = 64 << 20
"""Largest gRPC message either side accepts by default; a bundle is best about 1 MiB."""

MAX_HEADER_BYTES = 1 << 20
MAX_SAMPLES = 1_024
MAX_TOKENS = 4_194_304
MAX_COLUMNS = 64
MAX_ITEM_DIMENSIONS = 4
MAX_METADATA_BYTES = 256 << 10
MAX_POLICY_CHARS = 64
MAX_RECORDED_METADATA_BYTES = 1 << 10
"""Largest metadata of a task that a run's recording keeps."""
MAX_PROMPT_TOKENS = 1_048_576
MAX_NEW_TOKENS = 1_048_576
MAX_TASKS_PER_SUBMIT = 4_096
MAX_LEASES_PER_REQUEST = 256
MAX_PARTS_OF_HEARTBEAT = 256
MAX_GROUPS_PER_BUNDLE = 1_024
MAX_BLOB_BYTES = 8 << 20
"""Largest blob, and so the largest encoded image of one, in bytes."""
MAX_BLOBS_BYTES = 1 << 30
"""Bytes of all blobs of a run together."""
MAX_IMAGES = 64
"""Most images of one prompt."""
MAX_PARTS_OF_MESSAGE = 256
MAX_LOCATION_CHARS = 2_048
MAX_MANIFEST_BYTES = 1 << 20
MAX_WEIGHT_FILE_BYTES = 1 << 42
"""Largest file of weights, or patch of one, in bytes: a worker counts the pieces of what it fetches."""
MAX_PATCHES = 4
"""Most patches of one file of weights."""
MAX_NAME_PART_BYTES = 255
"""Longest part of a file's name in UTF-8, as file systems have it."""
MAX_PLAN_BYTES = 1 << 20
MAX_FEEDER_STATE_BYTES = 64 << 10
MAX_ERROR_CHARS = 2_048
MAX_INTEGER = (1 << 53) - 1
"""Largest integer of a request whose field sets no other limit: a double holds it exactly."""
MAX_COUNTER = (1 << 48) - 1
"""Largest count of tokens or milliseconds from a worker or trainer; the store adds counts up in doubles."""
MAX_VERSION = (1 << 43) - 1
"""Largest weight version: 1,000 times it is still an exact integer in a double, which the store computes with."""
MAX_SEED = MAX_INTEGER
"""Largest sampling seed. Its sum with a sample's index still fits where numbers are doubles or signed."""

TASK_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
COLUMN_NAME = re.compile(r"[a-z0-9_]{1,64}")
FAILURE = re.compile(r"[a-z0-9_]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters, refused in names, ids, paths and addresses: these become keys, labels, headers and file names."""

ALIGNMENT = 8
"""Bytes of which each column of a payload begins at a multiple."""


def aligned(offset: int) -> int:
    """The next multiple of ALIGNMENT."""
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def is_file_name(name: str) -> bool:
    """True for a relative path that leads nowhere but below its directory."""
    return (
        1 <= len(name) <= 256
        and not CONTROL.search(name)
        and "\\" not in name
        and not any(
            part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > MAX_NAME_PART_BYTES
            for part in name.split("/")
        )
    )


def is_text(text: str) -> bool:
    """False with half a character (a lone surrogate): JSON can escape one, and Python reads bad UTF-8 as such."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def directory_among(names: Collection[str]) -> str:
    """Name of a file that another one lies below, which no directory can hold; empty where there is none."""
    found = set(names)
    below = (name[:at] for name in names for at, char in enumerate(name) if char == "/")
    return next((name for name in below if name in found), "")


def is_http_url(url: str) -> bool:
    """True for an address http(s)://HOST or http(s)://HOST:PORT to which paths can be appended, or one with a path."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
