"""Names of keys on the store.

Invariant: all index keys of a run share one hash tag and so one slot; those of payloads (buffer_wire/payloads/keys.py)
have none and spread over the slots.
"""

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Keys that are of no run."""

    runs: str
    """SET of run ids; a superset of the runs that exist."""
    schema: str
    """Version of the store's layout. A service that does not know it does not start, and one that runs when it changes
    ends."""


ALONE = Names("rb:runs", "rb:schema")
IN_CLUSTER = Names("{rb}:runs", "{rb}:schema")
"""Names in one slot, as a script takes both."""

SCHEMA_VERSION = 8
"""Version of the layout that this service knows; each run's record has it too, followed by `p` once the run has what
services of 0.1.0 would damage (lua/lib/runs/run.lua).

A script ends at a run of another version. A service of the version before serves beside this one during an upgrade.
Raise the version with every change of what is stored that such a service would read wrongly, write back without, or
stumble over: an array that gets another element, a statistic, a state, another meaning.

Do not raise it for a field of the policy whose default is what was before: `claim` fills it in, and `update_policy` of
an older service keeps it. Do not raise it for a key or a field of a hash that may be absent, and that older services
neither read nor write.
"""

PLACE = "rb:payloads"
"""Place of the payloads of all runs, in words; absent: beside the index. It changes only while there is no run."""

NOTIFY_PATTERN = "rb:{*}:notify"


def index_key(run_id: str, name: str) -> str:
    """Key of one of the run's indexes; the scripts make the same names from the key of `run`."""
    return f"rb:{{{run_id}}}:{name}"


def audited_key(index_tenure: str, tenure: str) -> str:
    """Key that is there for a day after a server of payloads was looked through (payloads/audit.py). A term of the
    index's server, or of its own, as primary has another.
    """
    return f"rb:audited:{index_tenure}:{tenure}"


def run_of_index_key(key: str) -> str:
    """The run id inside an index key."""
    return key[key.index("{") + 1 : key.rindex("}")]


def new_secret() -> str:
    """A run's secret, 128 random bits: proofs of its revisions and passwords of its users are made of it."""
    return secrets.token_hex(16)
