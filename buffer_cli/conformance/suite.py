"""`rollout-buffer conformance`: run a suite of the conformance kit, print its verdicts."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from buffer_cli.exits import EXIT_OPTIONS, EXIT_REFUSED, exit_code
from buffer_conformance.child import DidNotStart
from buffer_conformance.record import Record
from buffer_conformance.report import as_json, as_text, has_failed
from buffer_conformance.rules.rule import judged
from buffer_conformance.stage import SuiteOptions
from buffer_conformance.suites import SUITES
from buffer_wire.errors import InvalidField, RolloutBufferError


def run(kind: str, given: dict[str, Any]) -> int:
    """Run the suite for a "worker" or a "trainer"; 0 when no rule was broken, 1 when one was, 2 when it cannot run."""
    return exit_code(lambda: _run(kind, given))


def _run(kind: str, given: dict[str, Any]) -> int:
    as_values, trace, only = given.pop("as_json"), given.pop("trace"), frozenset(given.pop("only") or ())
    suite = SUITES[kind]
    if strange := sorted(only - set(suite.scenarios)):
        raise InvalidField("--only", strange[0], "one of " + ", ".join(suite.scenarios))
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-conformance-") as folder:
        options = SuiteOptions(folder=Path(folder), only=only, **given)
        try:
            record = asyncio.run(suite.run(options))
        except (DidNotStart, RolloutBufferError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_OPTIONS
    if trace is not None:
        _write(record, trace)
    verdicts = judged(suite.rules, record)
    print(json.dumps(as_json(verdicts), indent=2) if as_values else as_text(verdicts))
    return EXIT_REFUSED if has_failed(verdicts) else 0


def _write(record: Record, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in record.lines())
