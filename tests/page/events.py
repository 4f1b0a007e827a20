"""Server-sent events of a service, read as they come."""

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Said:
    """One event."""

    event: str
    event_id: str
    data: Any


def messages(stream: Any) -> Iterator[Said]:
    """Events until the stream ends. Raises TimeoutError when nothing comes for TIMEOUT_S."""
    fields: dict[str, str] = {}
    for line in stream:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield Said(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}
    assert not fields, "the stream ends with a whole event"


@contextlib.contextmanager
def watching(base: str, run_id: str, **headers: str) -> Iterator[Iterator[Said]]:
    """The events of a run. Raises HTTPError."""
    url = f"{base}/api/events?{urllib.parse.urlencode({'run': run_id})}"
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        yield messages(stream)
