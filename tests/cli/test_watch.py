"""`rollout-buffer status --watch`: in a terminal, in a pipe, over a restart of the service, and its end."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest

from buffer_cli.status.rates import Rates, Snapshot, number
from tests.support.commands import command
from tests.support.fake_runs import FakeRuns
from tests.support.views import make_view

DEADLINE_S = 60.0
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""The alternate screen."""
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
"""The cursor."""


@pytest.fixture
def runs() -> Iterator[FakeRuns]:
    # The servicer's other methods stay unimplemented.
    with FakeRuns(accepted_groups=4, accepted_response_tokens=400, decoded_tokens=500) as fake:  # type: ignore[abstract]
        yield fake


Watching: TypeAlias = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def watching(runs: FakeRuns) -> Iterator[Watching]:
    """Starts a watch of a run, or `top`, with these arguments.

    One that a failed test leaves is killed: it would wait for its service.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, of: Sequence[str] = ("status", "--watch")) -> subprocess.Popen[str]:
        around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "buffer_cli", *of, "--interval", "0.1", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**around, "RB_ADDRESS": runs.address},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def line_with(process: subprocess.Popen[str], part: str) -> str:
    """The next line that holds `part`."""
    assert process.stdout is not None
    deadline = time.monotonic() + DEADLINE_S
    while part not in (line := process.stdout.readline()):
        assert line, f"it ended before it said {part!r}: {process.stderr and process.stderr.read()}"
        assert time.monotonic() < deadline, f"it did not say {part!r}"
    return line


def ended(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")


# ── rates ────────────────────────────────────────────────────────────────────


def test_rates_are_growth_by_time() -> None:
    view = make_view(statistics={"accepted_groups": 10, "trainer_busy_ms": 100})
    later = replace(
        view,
        next_step=3,
        statistics={**view.statistics, "accepted_groups": 25, "trainer_busy_ms": 400, "trainer_wait_ms": 900},
    )
    rates = Rates.between(Snapshot.at(view, 5.0), Snapshot.at(later, 10.0))
    assert rates is not None
    assert rates.per_second("accepted groups") == 3.0
    assert rates.trainer_waiting == 0.75
    shown = dict(rates.shown())
    assert (shown["accepted groups"], shown["steps"], shown["trainer waiting"]) == ("3.0/s", "36/min", "75%")


def test_a_resume_that_sets_steps_back_makes_no_negative_rate() -> None:
    view = make_view(next_step=5)
    rates = Rates.between(Snapshot.at(view, 0.0), Snapshot.at(replace(view, next_step=2), 1.0))
    assert rates is not None
    assert rates.per_second("steps") == 0.0


def test_there_are_no_rates_over_two_runs_of_a_name() -> None:
    view = make_view()
    assert Rates.between(Snapshot.at(view, 0.0), Snapshot.at(replace(view, created_ms=9), 1.0)) is None


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.123, "0.12"), (3.44, "3.4"), (56.4, "56"), (7_890.4, "7,890")]
)
def test_figures_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


# ── the command ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_redrawn_in_place_and_given_back(runs: FakeRuns, sent: signal.Signals) -> None:
    primary, secondary = pty.openpty()
    # A terminal as low as they come still shows the rates, and which run it is.
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    before = termios.tcgetattr(secondary)
    around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "buffer_cli", "status", "--watch", "--interval", "0.1", "--address", runs.address],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**around, "TERM": "xterm-256color"},
    )
    shown, deadline, told = b"", time.monotonic() + DEADLINE_S, False
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, shown[-2000:]
            if select.select([primary], [], [], 0.1)[0]:
                shown += os.read(primary, 65_536)
            if not told and shown.count(b"accepted groups") >= 3:
                process.send_signal(sent)
                told = True
    finally:
        process.kill()
        process.wait()
    while select.select([primary], [], [], 0)[0]:
        shown += os.read(primary, 65_536)
    assert process.returncode == 0
    assert (shown.count(ENTER), shown.count(LEAVE)) == (1, 1), "one screen, redrawn"
    assert shown.rindex(LEAVE) > shown.index(ENTER)
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert b"Traceback" not in shown
    assert "math-1" in shown.decode(errors="replace")
    assert termios.tcgetattr(secondary) == before
    os.close(primary)
    os.close(secondary)


SIGNALLED = """
import os, signal, sys
from rich.console import Console

moment, set_alt_screen = sys.argv.pop(1), Console.set_alt_screen

def signalled(self, enable=True):
    if moment == "leaving" and not enable:
        os.kill(os.getpid(), signal.SIGTERM)
    done = set_alt_screen(self, enable)
    if moment == "entering" and enable:
        os.kill(os.getpid(), signal.SIGTERM)
    return done

Console.set_alt_screen = signalled
from buffer_cli.main import app
app()
"""
"""The command, to which a signal comes just after it entered the alternate screen, or just before it leaves it."""


@pytest.mark.parametrize("moment", ["entering", "leaving"])
def test_a_signal_in_the_moment_of_entering_or_leaving_does_not_keep_the_screen(runs: FakeRuns, moment: str) -> None:
    primary, secondary = pty.openpty()
    around = {name: value for name, value in os.environ.items() if not name.startswith("RB_")}
    options = ("--watch", "--interval", "0.1", "--run", "math-1", "--address", runs.address)
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, moment, "status", *options],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**around, "TERM": "xterm-256color"},
    )
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, shown[-2000:]
            if select.select([primary], [], [], 0.1)[0]:
                shown += os.read(primary, 65_536)
            if moment == "leaving" and b"accepted groups" in shown:
                runs.view = None  # Deleted, which ends the watch.
    finally:
        process.kill()
        process.wait()
    while select.select([primary], [], [], 0)[0]:
        shown += os.read(primary, 65_536)
    os.close(primary)
    os.close(secondary)
    assert (shown.count(ENTER), shown.count(LEAVE)) == (1, 1)
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert b"Traceback" not in shown
    assert process.returncode == (0 if moment == "entering" else 1)


def test_a_pipe_gets_a_line_for_each_look(watching: Watching) -> None:
    process = watching()
    first = line_with(process, "queued 3/32")
    assert "accepted" not in first, "there is nothing to compare the first look with"
    second = line_with(process, "accepted")
    assert "waits on" in second
    assert "\x1b" not in first + second
    ended(process, signal.SIGTERM)


def test_a_restart_of_the_service_is_waited_for_and_said(runs: FakeRuns, watching: Watching) -> None:
    process = watching("--timeout-s", "5")
    line_with(process, "queued 3/32")
    runs.stop()
    line_with(process, "does not answer")
    runs.start()
    line_with(process, "answers again")
    line_with(process, "queued 3/32")
    ended(process, signal.SIGINT)


def test_programs_get_an_object_a_line(runs: FakeRuns, watching: Watching) -> None:
    process = watching("--json")
    first, second = json.loads(line_with(process, "{")), json.loads(line_with(process, "{"))
    assert (first["per_second"], first["away"], first["run"]["run_id"]) == (None, False, "math-1")
    per_second = second["per_second"]
    assert per_second["accepted response tokens"] == pytest.approx(100 * per_second["accepted groups"])
    assert per_second["accepted groups"] > 0
    runs.stop()
    while not (away := json.loads(line_with(process, "{")))["away"]:
        pass
    assert away["per_second"] is None
    ended(process, signal.SIGTERM)


def test_all_runs_are_shown_again_and_again_and_the_service_is_waited_for(runs: FakeRuns, watching: Watching) -> None:
    process = watching("--json", of=("top",))
    first, second = json.loads(line_with(process, "{")), json.loads(line_with(process, "{"))
    assert first["runs"][0]["per_second"] is None
    assert second["runs"][0]["per_second"]["accepted groups"] > 0
    runs.stop()
    while not json.loads(line_with(process, "{"))["away"]:
        pass
    runs.start()
    while json.loads(line_with(process, "{"))["away"]:
        pass
    ended(process, signal.SIGTERM)


def test_a_run_that_is_deleted_ends_the_watch_with_an_error(runs: FakeRuns, watching: Watching) -> None:
    process = watching()
    line_with(process, "queued 3/32")
    runs.view = None
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.startswith("error: ")
    assert "math-1" in errors


def test_a_service_that_never_answered_is_not_waited_for() -> None:
    shown = command("status", "--watch", "--run", "r", "--address", "127.0.0.1:1", "--timeout-s", "2")
    assert shown.returncode == 1
    assert "does not answer" in shown.stderr


def test_an_interval_is_for_a_watch() -> None:
    alone = command("status", "--interval", "3")
    assert alone.returncode == 2
    assert "--watch" in alone.stderr
    short = command("status", "--watch", "--interval", "0")
    assert short.returncode == 2
