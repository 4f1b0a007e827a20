"""Times that recoveries took: rows in the file that RB_RECOVERY_RESULTS names; of repeated kills the slowest one."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a kill -9 in the middle of an update."""

    killed: str
    next_group_s: float
    """Time until the service had accepted another group."""
    newest_s: float
    """Time until every engine was ready with the version published last before the kill, or a newer one."""


def note(recovery: Recovery) -> None:
    """Keep a row."""
    print(f"\n{recovery}")
    if not (name := os.environ.get("RB_RECOVERY_RESULTS")):
        return
    file = Path(name)
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [*rows, {key: each if isinstance(each, str) else round(each, 2) for key, each in asdict(recovery).items()}]
    file.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")
