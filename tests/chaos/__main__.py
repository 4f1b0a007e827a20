"""Chaos: fleets of real processes under kills and other faults, bout after bout; their histories are checked.

usage: python -m tests.chaos [--minutes M] [--seed N] [--stores external,sentinel] [--bout N] [--out FILE] [--keep DIR]

The seed is printed first; it fixes each bout's scenario and its schedule of faults. Exits with 1 when a history breaks
a promise. The files of such a bout stay, and of one in which a fault was above its bound.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.bout import Bout, lived
from tests.chaos.clocks import can_be_set
from tests.chaos.report import counts, late, report, table
from tests.chaos.scenario import STORES, drawn
from tests.support.service import release_is_there

BOUT_S = 50.0
SETUP_S = 15.0
"""Time that a bout takes beside its faults."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--bout", type=int, help="this bout alone")
    parser.add_argument("--real-every", type=int, default=6, help="every so many-th bout has real engines; 0: none")
    parser.add_argument("--until-violation", action="store_true", help="end with the first bout that finds one")
    parser.add_argument("--out", type=Path, help="file for the report, as JSON")
    parser.add_argument("--keep", type=Path, help="folder for the files of all bouts; without, of failed ones")
    return parser.parse_args()


def _commit() -> str:
    """The commit that is checked out; empty where it is no checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return told.stdout.strip()


def _bouts(options: argparse.Namespace, folder: Path) -> list[Bout]:
    stores = tuple(options.stores.split(","))
    end = time.monotonic() + options.minutes * 60
    seconds = min(BOUT_S, max(10.0, options.minutes * 60 / len(stores) - SETUP_S))
    bouts: list[Bout] = []
    number = options.bout or 0
    while not bouts or (options.bout is None and time.monotonic() + seconds + SETUP_S <= end + SETUP_S):
        scenario = drawn(options.seed, number, stores, real_every=options.real_every, upgrades=release_is_there())
        began = time.monotonic()
        place = folder / f"bout-{number}"
        done = lived(scenario, options.seed, seconds, place)
        bouts.append(done)
        took, found = time.monotonic() - began, counts([done])
        print(
            f"chaos: bout {number}: {scenario.store}{' over TLS' if scenario.tls else ''}"
            f"{' with real engines' if scenario.real else ''}{' from the last release' if scenario.upgraded else ''},"
            f" {scenario.policy['overflow_action']}, {scenario.policy['stale_action']}: {found['kills']} kills,"
            f" {found['other_faults']} other faults, {found['groups_acknowledged']} groups acknowledged,"
            f" {found['publishes']} publishes, {took:.0f} s: {len(done.problems) or 'no'} violations",
            flush=True,
        )
        for problem in done.problems:
            print(f"chaos:   {problem}", flush=True)
        for one in late(done):
            print(f"chaos:   above its bound: {one}", flush=True)
        if not done.problems and not late(done) and options.keep is None:
            shutil.rmtree(place)
        elif done.problems and options.until_violation:
            break
        number += 1
    return bouts


def main() -> int:
    """Run; 1 for violations."""
    options = _options()
    # As Ctrl-C: what the bout has started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"chaos: seed {options.seed}, files in {folder}", flush=True)
    if not can_be_set():
        print("chaos: clocks do not jump: libfaketime is missing", flush=True)
    if not release_is_there():
        print("chaos: nothing is upgraded: scripts/released.sh has built no last release", flush=True)
    began = datetime.now(UTC)
    try:
        bouts = _bouts(options, folder)
    except KeyboardInterrupt:
        print("chaos: interrupted; what the bout has started is ended, its files stay", flush=True)
        return 130
    when = {"began": began.isoformat(timespec="seconds"), "minutes": options.minutes, "commit": _commit()}
    made = {**when, **report(options.seed, bouts)}
    print(table(made))
    print(json.dumps(made["counts"]))
    if options.out is not None:
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    return 1 if made["counts"]["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
