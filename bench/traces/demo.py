"""`make demo-trace`: the demo, traced to a real collector, and the trace of one of its groups as a tree.

The collector is rotel, an OpenTelemetry collector that PyPI has as a wheel. Behind it stands the receiver of this
folder, as a store of traces would. Exits with 1 where a hop is missing. `--write PAGE` puts the trees into the page,
between its markers.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.traces.receiver import PATH, ReceivedSpan, receiver
from bench.traces.tree import trace_of, tree
from tests.support.sentinels import free_port

HOPS = ("lease", "generate", "reward", "push", "queue", "train")
"""Spans of a group's trace."""
HOPS_OF_VERSION = ("pull", "train", "publish", "load")
MARKERS = ("<!-- trace -->\n", "<!-- end of trace -->")
START_S, SETTLE_S = 20.0, 15.0


@contextmanager
def collector(python: Path, behind: str, log: Path) -> Iterator[str]:
    """A rotel of the environment of `python`, which hands on to `behind`; its base URL for exporters over HTTP."""
    found = "import rotel, pathlib; print(pathlib.Path(rotel.__file__).parent / 'rotel-agent')"
    agent = subprocess.run([str(python), "-c", found], capture_output=True, text=True, check=True).stdout.strip()
    http, grpc = free_port(), free_port()
    command = [
        *(agent, "start", "--pid-file", str(log.with_suffix(".pid")), "--log-file", str(log)),
        *("--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
        *("--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", behind),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            yield f"http://127.0.0.1:{http}"
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


def demo(collector_url: str, steps: int, out: Path) -> None:
    """Run the demo with every group traced. Raises CalledProcessError where it fails."""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector_url,
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    command = [sys.executable, "-m", "examples.demo", "--steps", str(steps), "--out", str(out)]
    subprocess.run(command, env=environment, check=True)


def chosen(spans: Sequence[ReceivedSpan], step: int) -> tuple[list[ReceivedSpan], list[ReceivedSpan]]:
    """The trace of the first group of a step, and that of the version which it made. Raises LookupError."""
    trained = [span for span in spans if span.name == "train" and span.facts.get("step") == step and span.parent_id]
    for span in sorted(trained, key=lambda one: str(one.facts.get("group", ""))):
        if "group" in span.facts:
            return trace_of(spans, span.trace_id), trace_of(spans, span.links[0][0])
    raise LookupError(f"no group of step {step} was traced")


def text_of(group: Sequence[ReceivedSpan], version: Sequence[ReceivedSpan]) -> str:
    """Both trees, as the page shows them."""
    name = next(span.facts["group"] for span in group if span.name == "rollout")
    (made,) = [span.facts["version"] for span in version if span.name == "update"]
    return (
        f"Group {name}, trace {group[0].trace_id}:\n\n```\n{tree(group)}\n```\n\n"
        f"Version {made}, trace {version[0].trace_id}, with {len(_links(version))} groups:\n\n"
        f"```\n{tree(version)}\n```\n"
    )


def _links(version: Sequence[ReceivedSpan]) -> list[tuple[str, str]]:
    return [link for span in version if span.name == "train" for link in span.links]


def write(page: Path, text: str) -> None:
    """Put the text between the page's markers, with what it is of."""
    before, _, rest = page.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    day, version = time.strftime("%Y-%m-%d"), importlib.metadata.version("opentelemetry-sdk")
    note = f"\n{day}: `make demo-trace`, all groups traced; opentelemetry-sdk {version}, rotel as collector.\n"
    page.write_text(before + MARKERS[0] + text + note + MARKERS[1] + after)


def main() -> int:
    """Run the demo, print the trees; 1 where a hop is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--python", type=Path, default=Path(".venv-otel/bin/python"), help="of an environment with rotel"
    )
    parser.add_argument("--write", type=Path, help="a page with markers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, receiver() as received:
        with collector(options.python, received.address, Path(directory) / "rotel.log") as url:
            demo(url, options.steps, Path(directory) / "demo")
            step = options.steps // 2
            ended = received.wait(lambda spans: any(span.name == "load" for span in spans), SETTLE_S)
        spans = list(received.spans)
        print(f"{len(spans)} spans came through the collector to {received.address}{PATH}")
        if not ended:
            print("no engine's load came through", file=sys.stderr)
    group, version = chosen(spans, step)
    text = text_of(group, version)
    print(text)
    missing = [name for name in HOPS if name not in {span.name for span in group}]
    missing += [name for name in HOPS_OF_VERSION if name not in {span.name for span in version}]
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
        return 1
    if options.write:
        write(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
