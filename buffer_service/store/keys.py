"""Names of keys on the store.

Invariants: all index keys of a run share one hash tag and so one slot; payload keys have none and spread over the
slots. A payload key ends in the payload's size, so that replies can be portioned before they are asked for.
"""

import secrets

RUNS = "rb:runs"
"""SET of run ids; a superset of the runs that exist."""

SCHEMA = "rb:schema"
"""Version of this layout."""

SCHEMA_VERSION = 4

NOTIFY_PATTERN = "rb:{*}:notify"


def index_key(run_id: str, name: str) -> str:
    """Key of one of the run's indexes; the scripts make the same names from the key of `run`."""
    return f"rb:{{{run_id}}}:{name}"


def run_of_index_key(key: str) -> str:
    """The run id inside an index key."""
    return key[key.index("{") + 1 : key.rindex("}")]


def new_payload_key(run_id: str, size_bytes: int) -> str:
    """A key of its own for one payload: 128 random bits."""
    return f"rb:p:{run_id}:{secrets.token_hex(16)}:{size_bytes}"


def payload_size(key: str) -> int:
    """Size in bytes of the payload under a payload key."""
    return int(key.rpartition(":")[2])
