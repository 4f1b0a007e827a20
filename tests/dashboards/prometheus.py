"""A real Prometheus that scrapes one service every second, with the chart's rules at a pace for tests.

`hasty` is what makes the rules quick: nothing but durations is changed.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.mortal import mortal

START_TIMEOUT_S = 60.0
POLL_S = 0.25
WINDOW = "15s"
"""Window in place of every duration of an expression."""
HOLD = "4s"
"""Time in place of every `for`."""
NAMESPACE = "rl"
"""A label of the target, as a Kubernetes discovery sets it."""


def hasty(text: str) -> str:
    """Rules whose windows, offsets and patience are a few seconds; recorded names stay."""
    text = re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", text)
    text = re.sub(r"\boffset \d+[mh]\b", f"offset {WINDOW}", text)
    return re.sub(r"^(\s+for:) \d+m$", rf"\1 {HOLD}", text, flags=re.MULTILINE)


class Prometheus:
    """Its HTTP API. Times are seconds since the epoch."""

    def __init__(self, port: int, log: Path) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._log = log
        self.started_at = time.time()

    def get(self, path: str, **parameters: object) -> Any:
        """`data` of an answer. Raises AssertionError with what Prometheus says is wrong."""
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def values(self, expression: str) -> list[float]:
        """Every value of the expression since the start, second by second; what is not a number is left out."""
        found = self.get("query_range", query=expression, start=self.started_at, end=time.time(), step=1)["result"]
        return [float(v) for series in found for _, v in series["values"] if v not in {"NaN", "+Inf", "-Inf"}]

    def labels(self, query: str) -> set[str]:
        """Return what Grafana's label_values(selector, label) finds."""
        matched = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert matched, query
        selector, label = matched.groups()
        return set(self.get(f"label/{label}/values", **{"match[]": selector}))

    def rules(self) -> list[dict[str, Any]]:
        """All rules as they stand."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def firing(self, run: str = "") -> set[str]:
        """Alerts that have fired at any time since the start; `run`: about this run alone."""
        selector = f'ALERTS{{alertstate="firing",run=~"{run or ".*"}"}}'
        found = self.get("query_range", query=selector, start=self.started_at, end=time.time(), step=1)
        return {series["metric"]["alertname"] for series in found["result"]}

    def ready(self) -> bool:
        """True when it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@contextlib.contextmanager
def prometheus(
    folder: Path, target: str, token: str, rules: Sequence[Path], others: Sequence[str]
) -> Iterator[Prometheus]:
    """One that scrapes `target` (host:port) with a bearer token, its data in `folder`. From the main thread alone.

    `others`: targets that ask for no token, as workers and SGLang's servers.
    """
    binary = shutil.which("prometheus")
    assert binary, "make dashboards needs prometheus: apt-get install prometheus"
    folder.mkdir()
    for path in rules:
        (folder / path.name).write_text(hasty(path.read_text()))
    (folder / "token").write_text(token)
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [path.name for path in rules],
        "scrape_configs": [
            {
                "job_name": "rollout-buffer",
                "authorization": {"credentials_file": "token"},
                "static_configs": [{"targets": [target], "labels": {"namespace": NAMESPACE}}],
            },
            {
                "job_name": "pods",
                "static_configs": [{"targets": [*others], "labels": {"namespace": NAMESPACE}}],
            },
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    port = free_port()
    log = folder / "prometheus.log"
    command = [
        binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(mortal(command), stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        made = Prometheus(port, log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not made.ready():
            assert process.poll() is None, f"Prometheus ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"Prometheus does not start:\n{log.read_text()}"
            time.sleep(POLL_S)
        yield made
    finally:
        process.terminate()
        process.wait(30)
