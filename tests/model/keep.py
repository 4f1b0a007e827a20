"""Stores the history in a failure's output: python -m tests.model.keep OUTPUT NAME ABOUT.

OUTPUT: what pytest printed. The first history in it becomes histories/NAME.jsonl.
"""

import itertools
import json
import sys
from pathlib import Path

from tests.model.notation import entry, line

HISTORIES = Path(__file__).parent / "histories"
_BEGIN = '{"op": "'


def keep(output: str, name: str, about: str) -> Path:
    """The path of the new file."""
    printed = (text.strip().removeprefix("E").strip() for text in output.splitlines())
    found = itertools.takewhile(
        lambda text: text.startswith(_BEGIN), itertools.dropwhile(lambda text: not text.startswith(_BEGIN), printed)
    )
    history = [line(entry(text)) for text in found]
    if not history:
        raise SystemExit("there is no history in it")
    path = HISTORIES / f"{name}.jsonl"
    path.write_text("\n".join([json.dumps({"about": about}), *history, ""]))
    return path


if __name__ == "__main__":
    print(keep(Path(sys.argv[1]).read_text(), sys.argv[2], sys.argv[3]))
