"""Inputs that failed once, and inputs that reached far in long runs, at every boundary that is fuzzed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.fuzz.guided.targets import CORPUS, TARGETS, kept

MOST_BYTES = 16 << 10


def test_what_failed_once_at_a_boundary_does_so_no_more(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.guided.replay"],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2_000:]


def test_the_corpus_stays_small_and_is_all_of_known_targets() -> None:
    assert {path.name.partition(".")[0] for path in CORPUS.iterdir()} <= TARGETS.keys()
    for name in TARGETS:
        assert sum(map(len, kept(name).values())) <= MOST_BYTES, name
