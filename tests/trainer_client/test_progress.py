"""The line on the terminal: what it says, that it goes away, and that nothing is written where there is no terminal."""

import io
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from buffer_wire.errors import BatchNotReady, NotReady, RolloutBufferError
from tests.trainer_client.fake_service import FakeService
from tests.trainer_client.streamed_run import StreamedRun
from trainer_client import BufferClient, ClientOptions, SessionOptions, Waiting, waiting
from trainer_client.progress import ProgressBar
from trainer_client.waiting import WaitNotices

CLEAR = "\r\x1b[2K"
START_S = 60.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def short(queued: int, needed: int = 32, on: str = "generation: 14 tasks being generated") -> BatchNotReady:
    return BatchNotReady(
        step=12, queued_groups=queued, needed_groups=needed, leased=14, pending=0, waits_on=on
    )  # fmt: skip


def wait(waited_s: float, error: RolloutBufferError, doing: str = "pulling step 12") -> Waiting:
    return Waiting(doing, error.attributes.get("waits_on", "the service"), waited_s, error)


def shown(terminal: Terminal) -> str:
    """Return what stands on the line now."""
    return terminal.getvalue().rpartition(CLEAR)[2]


def test_it_says_what_for_how_far_how_long_and_on_whom(terminal: Terminal) -> None:
    bar = ProgressBar(stream=terminal)
    bar(wait(2, short(8)))
    assert shown(terminal) == (
        "pulling step 12 [####--------------] 8/32 groups, 0:02, on generation: 14 tasks being generated"
    )
    # 12 groups in 60 s: the other 12 take another minute.
    bar(wait(62, short(20)))
    assert shown(terminal).startswith(
        "pulling step 12 [###########-------] 20/32 groups, 1:02, about 1:00 left, on gen"
    )
    bar(wait(3725, short(40)))
    assert shown(terminal).startswith("pulling step 12 [##################] 40/32 groups, 1:02:05, about 0:00 left")


def test_the_rate_is_that_of_the_present_wait(terminal: Terminal) -> None:
    bar = ProgressBar(stream=terminal)
    bar(wait(2, short(0)))
    bar(wait(12, short(10)))
    assert "about 0:22 left" in shown(terminal)
    # Groups were dropped: nothing is known.
    bar(wait(22, short(0)))
    assert "left" not in shown(terminal)
    bar(wait(2, short(10), doing="pulling step 13"))
    assert "left" not in shown(terminal)
    bar(wait(4, short(12), doing="pulling step 13"))
    assert "about 0:20 left" in shown(terminal)
    # The same step again, after an error that the trainer survived.
    bar(wait(1, short(4), doing="pulling step 13"))
    assert "left" not in shown(terminal)


def test_other_waits_have_no_bar(terminal: Terminal) -> None:
    late = NotReady("1 of 2 engines", waits_on="the engines e1 (loading, version 2)")
    ProgressBar(stream=terminal)(wait(75.4, late, "publishing version 3: engines receive"))
    assert shown(terminal) == "publishing version 3: engines receive, 1:15, on the engines e1 (loading, version 2)"


def test_it_is_never_longer_than_the_terminal_is_wide(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ProgressBar(stream=terminal)(wait(2, short(8, on="x" * 500)))
    assert len(shown(terminal)) == 39


def test_it_goes_away_and_is_not_drawn_where_there_is_no_terminal(terminal: Terminal) -> None:
    heard: list[Waiting] = []
    with ProgressBar(heard.append, stream=terminal) as bar:
        bar(wait(2, short(8)))
        assert shown(terminal)
    assert not shown(terminal)
    written = terminal.getvalue()
    bar.clear()
    assert terminal.getvalue() == written
    file = io.StringIO()
    with ProgressBar(heard.append, stream=file) as bar:
        bar(wait(2, short(8)))
    assert file.getvalue() == ""
    assert len(heard) == 2


def test_a_log_line_is_not_appended_to_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST_LOG_S", 0.0)
    bar = ProgressBar(stream=terminal)
    bar(wait(2, short(8)))
    seen: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(shown(terminal))

    look = Heard()
    logger = logging.getLogger("trainer_client")
    logger.addHandler(look)
    try:
        with caplog.at_level(logging.INFO, "trainer_client"):
            WaitNotices("pulling step 12", "the service", bar).tell(short(9))
    finally:
        logger.removeHandler(look)
    assert seen == [""]
    assert "9/32" in shown(terminal)


@pytest.fixture
def fake() -> Iterator[FakeService]:
    with FakeService() as service:
        yield service


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_session_shows_it_while_it_waits_and_no_longer(
    fake: FakeService, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    run = StreamedRun(fake, batch_groups=4, micro=0, arrived=1)
    lines: list[str] = []

    def on_wait(told: Waiting) -> None:
        lines.append(shown(terminal))
        run.arrived = 4

    options = SessionOptions(pull_timeout_s=20, progress=True, on_wait=on_wait)
    with (
        BufferClient(fake.target, ClientOptions(timeout_s=10)) as client,
        client.session("r", prefetch=prefetch, options=options) as session,
    ):
        next(session)
        assert lines[0].startswith("pulling step 0 [####--------------] 1/4 groups, 0:")
        assert not shown(terminal)
        run.arrived = 4
        with pytest.raises(RuntimeError, match="enough"):
            _raise_from_wait(session, lines)
        assert not shown(terminal)


def _raise_from_wait(session: object, lines: list[str]) -> None:
    def enough(_: Waiting) -> None:
        raise RuntimeError("enough")

    session._bar._then = enough  # type: ignore[attr-defined]
    next(session)  # type: ignore[call-overload]


PROGRAM = """
import signal, sys
from trainer_client import BufferClient, SessionOptions
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background was told to ignore it
with BufferClient(sys.argv[1]) as client, client.session("r", options=SessionOptions(progress=True)) as session:
    next(session)
"""


def test_ctrl_c_leaves_a_clean_line(fake: FakeService) -> None:
    StreamedRun(fake, batch_groups=4, micro=0, arrived=1)
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, fake.target], stdout=subprocess.DEVNULL, stderr=follower, env=environment
    )
    os.close(follower)
    written, deadline = b"", time.monotonic() + START_S
    try:
        while b"pulling step 0" not in written:
            assert time.monotonic() < deadline, written
            written += os.read(leader, 4096)
        process.send_signal(signal.SIGINT)
        while chunk := _read(leader):
            written += chunk
        process.wait(START_S)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    line, clear, rest = written.partition(b"groups, 0:")[2].partition(CLEAR.encode())
    assert clear, written
    assert b"Traceback" not in line
    assert b"KeyboardInterrupt" in rest


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # the other end is closed
        return b""
