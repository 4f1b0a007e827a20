"""`rollout-buffer conformance`: run a suite of the conformance kit, print its verdicts."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from buffer_cli.conformance.commands import SuiteRun
from buffer_cli.exits import EXIT_OPTIONS, EXIT_REFUSED
from buffer_cli.output import print_json
from buffer_conformance.child import DidNotStart
from buffer_conformance.record import Record
from buffer_conformance.report import as_json, as_text, has_failed
from buffer_conformance.rules.rule import judged
from buffer_conformance.stage import SuiteOptions
from buffer_conformance.suites import SUITES
from buffer_wire.errors import InvalidField, RolloutBufferError


def worker(command: list[str], suite: SuiteRun, weights: Path | None) -> int:
    """Run the suite for a worker; 0 when no rule was broken, 1 when one was, 2 when it cannot run."""
    return _run("worker", suite, command=command, weights=weights)


def trainer(command: list[str], suite: SuiteRun) -> int:
    """Run the suite for a trainer; exit codes as for a worker."""
    return _run("trainer", suite, command=command)


def _run(kind: str, chosen: SuiteRun, **more: Any) -> int:  # noqa: ANN401 - options of the kit
    suite, only = SUITES[kind], frozenset(chosen.only or ())
    if strange := sorted(only - set(suite.scenarios)):
        raise InvalidField("--only", strange[0], "one of " + ", ".join(suite.scenarios))
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-conformance-") as folder:
        options = SuiteOptions(
            folder=Path(folder), only=only, service=chosen.service, patience_s=chosen.patience_s, **more
        )
        try:
            record = asyncio.run(suite.run(options))
        except (DidNotStart, RolloutBufferError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_OPTIONS
    if chosen.trace is not None:
        _write(record, chosen.trace)
    verdicts = judged(suite.rules, record)
    if chosen.as_json:
        print_json(as_json(verdicts))
    else:
        print(as_text(verdicts))
    return EXIT_REFUSED if has_failed(verdicts) else 0


def _write(record: Record, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in record.lines())
