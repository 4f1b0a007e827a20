"""Metrics that guides tell a reader to look at are metrics that a service has."""

import re
import urllib.request
from pathlib import Path

from tests.docs.pages import ROOT
from tests.support.service import running_service
from trainer_client import BufferClient, Policy

GUIDES = [ROOT / "docs/tuning.md", ROOT / "docs/workers.md", *sorted((ROOT / "docs/coming_from").glob("*.md"))]


def named(pattern: str) -> set[str]:
    return {name for page in GUIDES for name in re.findall(pattern, page.read_text())}


def test_metrics_of_the_service_are_in_a_scrape_of_one_with_a_run(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        with BufferClient(service.address) as client:
            client.create_run("r", Policy())
        with urllib.request.urlopen(f"{service.admin}/metrics", timeout=10) as answer:
            scraped = answer.read().decode()
    names = named(r"\brollout_buffer_[a-z_]+")
    assert len(names) > 10
    # A family that has nothing to show yet still says what it is.
    known = set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    assert sorted(names - known) == []


def test_metrics_of_the_trainer_are_in_its_table() -> None:
    names = named(r"\brollout_buffer/([a-z_]+)")
    table = (ROOT / "docs/trainer.md").read_text()
    assert names
    assert sorted(name for name in names if f"`{name}`" not in table) == []
