"""Cost of tracing: `python -m bench.traces [--turns N] [--quick]`.

Two loads, each with the same parts four times over: untraced, untraced once more (what differs there is noise), with
one group in a hundred traced, with all of them. In every turn each side runs once, in another order. Reported are the
CPU time of a group, and its ratio to the untraced side of the same turn: medians, and the quartiles of the ratio.

    queue   groups of 20 KB are pushed without leases, pulled, committed and freed, as `make bench` does
    loop    a worker leases, generates on simulated engines without waiting, scores and pushes; a trainer's session
            trains and publishes
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ours, workload
from bench.measure import descendants, measured, median
from bench.roles import Role
from bench.traces import loop, parts
from bench.worker import worker

RESULTS = Path(__file__).parents[1] / "results" / "tracing.json"
SIDES: dict[str, str] = {"off": "", "again": "", "sampled": "0.01", "all": "1"}
"""Parts of the groups that are traced, by side."""
PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"
MARKERS = ("<!-- cost -->\n", "<!-- end of cost -->")
LOADS = {
    "queue": "groups of 20 KB without leases, as fast as they go",
    "loop": "leases, engines that take no time, rewards, pushes, a session that trains nothing",
}
NAMES = {"off": "none", "again": "none, once more", "sampled": "one group in a hundred", "all": "all groups"}
STEPS = 20
"""Steps of the load `loop` in a turn."""
WARM_UP = 1
"""Turns that do not count."""


@contextmanager
def told(collector: str, part: str) -> Iterator[None]:
    """The environment of processes that are started in the block."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")
    before = {name: os.environ.pop(name, None) for name in names}
    if part:
        os.environ.update(dict(zip(names, (collector, "parentbased_traceidratio", part), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(slots=True)
class Side:
    """Processes of one side: a service, a producer and a consumer, a worker and a trainer."""

    service: ours.Service
    producer: Role
    consumer: Role
    worker_pid: int
    trainer: Role

    @classmethod
    def start(cls, stack: ExitStack, directory: Path, collector: str, part: str) -> "Side":
        """Start them with the environment of the side."""
        directory.mkdir()
        with told(collector, part):
            service = stack.enter_context(ours.service(directory, "memory"))
            producer, consumer = (
                stack.enter_context(Role(end, service.address, "relayed")) for end in (ours.producer, ours.consumer)
            )
            trainer = stack.enter_context(Role(loop.trainer, service.address))
            pid = stack.enter_context(worker(service.address, loop.RUN, directory / "worker.log", *loop.ENGINES))
        return cls(service, producer, consumer, pid, trainer)

    def queue(self, number: int, size: workload.Size) -> tuple[int, dict[str, Sequence[int]], Any]:
        """The load `queue`."""
        run_id = f"queue-{number}"
        self.consumer.call("prepare", run_id, size)

        def run() -> None:
            self.consumer.start("consume", run_id, size)
            self.producer.call("produce", run_id, size)
            self.consumer.wait()

        return size.groups, {"clients": [self.producer.pid, self.consumer.pid]}, run

    def loop(self, steps: int) -> tuple[int, dict[str, Sequence[int]], Any]:
        """The load `loop`."""
        pids: dict[str, Sequence[int]] = {"worker": descendants(self.worker_pid), "trainer": [self.trainer.pid]}
        return steps * loop.BATCH_GROUPS, pids, lambda: self.trainer.call("train", steps)

    def measured(self, groups: int, pids: dict[str, Sequence[int]], run: Any) -> dict[str, float]:  # noqa: ANN401
        """CPU of a group in microseconds, by part and of all, and groups a second."""
        start = time.perf_counter()
        with measured({"service": self.service.pids, **pids}) as cost:
            run()
        cpu = {name: 1e6 * value / groups for name, value in cost.cpu.items()}
        return {**cpu, "all": sum(cpu.values()), "groups_per_s": groups / (time.perf_counter() - start)}


def measure(sides: dict[str, Side], turns: int) -> dict[str, Any]:
    """Both loads, side by side in every turn."""
    size = workload.sizes(quick=True)[0]
    seen: dict[str, dict[str, list[dict[str, float]]]] = {
        load: {name: [] for name in sides} for load in ("queue", "loop")
    }
    for number in range(turns + WARM_UP):
        print(f"turn {number}/{turns}" if number >= WARM_UP else "warm-up", flush=True)
        # Whoever comes first finds another machine than who comes last.
        order = list(sides)
        random.shuffle(order)
        for name in order:
            side = sides[name]
            for load, made in (("queue", side.queue(number, size)), ("loop", side.loop(STEPS))):
                figures = side.measured(*made)
                if number >= WARM_UP:
                    seen[load][name].append(figures)
    return {load: {name: over(its["off"], its[name]) for name in sides} for load, its in seen.items()}


def over(off: list[dict[str, float]], side: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of a side's figures, and of their ratios to those of the untraced one in the same turn."""
    figures = {name: median([each[name] for each in side]) for name in side[0]}
    cpu = [each["all"] / none["all"] for each, none in zip(side, off, strict=True)]
    rate = [each["groups_per_s"] / none["groups_per_s"] for each, none in zip(side, off, strict=True)]
    first, _, third = (float(f"{value:.4g}") for value in statistics.quantiles(cpu))
    return {**figures, "cpu_over_off": median(cpu), "cpu_quartiles": [first, third], "rate_over_off": median(rate)}


def write(figures: dict[str, Any], made_of: dict[str, float], turns: int) -> None:
    """Put the table between the page's markers."""
    lines = [
        "`make bench-tracing`: four sides of the same parts, each once in every turn; CPU of all their processes.",
        "",
        "| load | traced | CPU of a group, µs | over untraced | its quartiles |",
        "|---|---|---:|---:|---:|",
    ]
    for load, sides in figures.items():
        for name, each in sides.items():
            first, third = each["cpu_quartiles"]
            ratios = "| | |" if name == "off" else f"| {each['cpu_over_off']:.3f} × | {first:.3f} to {third:.3f} |"
            lines.append(f"| {LOADS[load]} | {NAMES[name]} | {each['all']:,.0f} {ratios}")
    lines += ["", f"{time.strftime('%Y-%m-%d')}: medians of {turns} turns on {os.cpu_count()} cores."]
    lines += ["", sentence(figures, made_of)]
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    PAGE.write_text(before + MARKERS[0] + "\n".join(lines) + "\n" + MARKERS[1] + rest.partition(MARKERS[1])[2])


def sentence(figures: dict[str, Any], made_of: dict[str, float]) -> str:
    """Say what the parts come to, for the load's untraced group."""
    shares = {
        (load, name): parts.of_group(made_of, load, float(SIDES[name])) / its["off"]["all"]
        for load, its in figures.items()
        for name in ("sampled", "all")
    }
    return (
        f"Alone, at its least, a span takes {made_of['span']:g} µs from its recording to its bytes. To ask whether a\n"
        f"group is traced takes {made_of['decide']:g} µs in each process. By these one group in a hundred is "
        f"{shares['queue', 'sampled']:.1%} of\nthe first load and {shares['loop', 'sampled']:.1%} of the second; all "
        f"groups are {shares['queue', 'all']:.0%} and {shares['loop', 'all']:.0%}. Off, a group asks for "
        f"{made_of['off']:g} µs."
    )


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="three turns; writes nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        collector = stack.enter_context(Role(loop.collector))
        address = collector.call("address")
        sides = {name: Side.start(stack, Path(directory) / name, address, part) for name, part in SIDES.items()}
        figures = measure(sides, 3 if options.quick else options.turns)
        made_of = parts.measured()
        print(f"the collector got {collector.call('requests')} requests")
    for load, its in figures.items():
        for name, each in its.items():
            cpu = f"{each['all']:>8.0f} µs CPU a group, {each['cpu_over_off']:.3f} × off {each['cpu_quartiles']}"
            rate = f"{each['groups_per_s']:>6.0f} groups/s, {each['rate_over_off']:.3f} × off"
            print(f"{load:<6} {name:<8} {cpu}; {rate}")
    print(sentence(figures, made_of))
    if not options.quick:
        write(figures, made_of, options.turns)
        kept = {"turns": options.turns, "cores": os.cpu_count(), "parts": made_of, **figures}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
