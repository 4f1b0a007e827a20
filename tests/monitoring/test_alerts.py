"""Every rule is valid, fires when it should and only then, and has a runbook; every runbook has a rule."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
ALERTS = sorted((ROOT / "deploy/helm/rollout-buffer/files/alerts").glob("*.yaml"))
UNIT_TESTS = sorted((Path(__file__).parent / "rules").glob("*.yaml"))
RUNBOOKS = ROOT / "docs/runbooks.md"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")


def loaded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def rules() -> list[dict[str, Any]]:
    return [rule for path in ALERTS for group in loaded(path)["groups"] for rule in group["rules"] if "alert" in rule]


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=110, check=False)


@needs_promtool
def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", "--lint-fatal", *ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_each_alert_fires_after_its_time_and_only_where_it_should(path: Path, tmp_path: Path) -> None:
    """Annotations: unit tests compare the summary alone: nothing is filled into the others."""
    for alerts in ALERTS:
        content = loaded(alerts)
        for group in content["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    rule["annotations"] = {"summary": rule["annotations"]["summary"]}
        (tmp_path / alerts.name).write_text(yaml.safe_dump(content))
    shutil.copy(path, tmp_path / "unit_tests.yaml")

    done = promtool("test", "rules", tmp_path / "unit_tests.yaml")

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_seen_not_to() -> None:
    cases = [case for path in UNIT_TESTS for one in loaded(path)["tests"] for case in one["alert_rule_test"]]
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}

    assert silent == firing == {rule["alert"] for rule in rules()}


def test_every_rule_says_what_an_operator_needs() -> None:
    for rule in rules():
        name, annotations = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in {"warning", "critical"}, name
        assert set(annotations) == {"summary", "description", "runbook_url"}, name
        assert re.search(r"\{\{ \$labels\.\w+ \}\}", annotations["summary"]), f"{name} does not say whom it is about"
        assert "{{" not in annotations["description"] + annotations["runbook_url"], name
        assert annotations["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_every_rule_has_a_runbook_and_every_runbook_a_rule() -> None:
    sections = re.split(r"^## (?=RolloutBuffer)", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    texts = dict(section.split("\n", 1) for section in sections)

    assert list(texts) == [rule["alert"] for rule in rules()]
    for name, text in texts.items():
        for heading in ("**Means**", "**See**", "**Do**"):
            assert text.count(heading) == 1, f"{name}: {heading}"
