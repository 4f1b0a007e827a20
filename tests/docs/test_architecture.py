"""The page on architecture names files that exist, so that who walks by it does not get lost."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"


def test_every_file_that_the_page_names_exists() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = set(re.findall(r"`([\w./]+\.(?:py|lua|proto))`", PAGE.read_text()))
    assert len(named) > 50
    lost = [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in tracked)]
    assert not lost, lost
