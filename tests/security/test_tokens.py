"""Tokens and the file that knows them: what is read, what is refused, what stays in force."""

import json
import os
import stat
import threading
import time
import timeit
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from buffer_service.security.gate import BURST, PER_S, Gate
from buffer_service.security.rate import RateLimit
from buffer_service.security.roles import RULES, Role
from buffer_service.security.token_file import TokenFile, changing
from buffer_service.security.tokens import TokenEntry, TokenSet, TokensRefused, digest, new_token
from buffer_wire.errors import PermissionDenied, Unauthenticated
from tests.security.guarded import add_token

GET_RUN = "/rollout_buffer.v1.RunService/GetRun"
LATER = datetime(2035, 1, 31, 12, tzinfo=UTC)


class Clock:
    """Moves when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


def test_an_entry_is_read_as_it_was_written() -> None:
    entry = TokenEntry("a-1", Role.TRAINER, ("math-*", "code"), digest(new_token("a-1")), LATER)
    assert TokenEntry.from_line(entry.to_line()) == entry
    assert json.loads(entry.to_line())["expires"] == "2035-01-31T12:00:00Z"


def test_the_file_holds_no_secret_and_is_its_owners_alone(path: Path) -> None:
    token = add_token(path, "a", Role.ADMIN)
    assert token.rpartition(".")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_are_long_and_all_different() -> None:
    made = {new_token("a") for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) >= len("rb.a.") + 43


@pytest.mark.parametrize(
    ("runs", "covered", "not_covered"),
    [
        (("*",), ["a", "math-1", ""], []),
        (("math-*",), ["math-", "math-1"], ["math", "Math-1", "a-math-1", ""]),
        (("exact",), ["exact"], ["exactly", "exac", ""]),
        (("a", "b*"), ["a", "b", "bc"], ["ab", "c"]),
    ],
)
def test_runs_are_names_and_beginnings(runs: tuple[str, ...], covered: list[str], not_covered: list[str]) -> None:
    entry = TokenEntry("a", Role.READER, runs, "0" * 64)
    assert [run for run in (*covered, *not_covered) if entry.covers(run)] == covered


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "root"}, "role"),
        ({"runs": []}, "runs"),
        ({"runs": "math"}, "runs"),
        ({"runs": ["ma*th"]}, "ma\\*th"),
        ({"sha256": "secret"}, "sha256"),
        ({"id": "a b"}, "id"),
        ({"expires": "tomorrow"}, "tomorrow"),
        ({"expires": "2030-01-01T00:00:00"}, "time zone"),
        ({"scope": "all"}, "object of"),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(path: Path, changes: dict[str, object], named: str) -> None:
    good = {"id": "a", "role": "reader", "runs": ["math"], "sha256": "0" * 64}
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(good | {'id': 'b'} | changes)}\n")
    with pytest.raises(TokensRefused, match=f"line 3: .*{named}"):
        TokenFile(path)


def test_an_id_has_one_token(path: Path) -> None:
    add_token(path, "a", Role.READER)
    with pytest.raises(TokensRefused, match="twice"):
        add_token(path, "a", Role.ADMIN)
    assert TokenFile(path).tokens.entries[0].role is Role.READER


def test_a_changed_file_is_taken_over_and_a_broken_one_is_not(path: Path) -> None:
    clock = Clock()
    first = add_token(path, "first", Role.READER)
    file = TokenFile(path, clock)
    second = add_token(path, "second", Role.READER)
    assert file.look().find(second) is None, "not looked at yet"
    clock.now = 1.0
    assert file.look().find(first) is not None, "both are good: rotation"
    assert file.look().find(second) is not None

    kept = path.read_text()
    path.write_text(kept + "{")
    clock.now = 2.0
    assert file.look().find(second) is not None
    assert file.broken
    path.unlink()
    clock.now = 3.0
    assert file.look().find(second) is not None
    assert file.broken

    path.write_text(kept.splitlines()[1] + "\n")
    clock.now = 4.0
    assert file.look().find(first) is None
    assert not file.broken


def test_tokens_read_earlier_do_not_follow_those_read_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reads, a token is revoked, another reads: the revoked one stays out whoever ends last."""
    add_token(path, "kept", Role.READER)
    revoked = add_token(path, "revoked", Role.READER)
    file = TokenFile(path)
    add_token(path, "new", Role.READER)
    parse = TokenSet.parse
    has_read, may_go_on = threading.Event(), threading.Event()

    def slow_in_the_thread(text: str) -> TokenSet:
        if threading.current_thread() is earlier:
            has_read.set()
            assert may_go_on.wait(10)
        return parse(text)

    earlier = threading.Thread(target=lambda: file.look(at_once=True))
    later = threading.Thread(target=lambda: file.look(at_once=True))
    monkeypatch.setattr(TokenSet, "parse", slow_in_the_thread)
    earlier.start()
    assert has_read.wait(10)
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"revoked"' not in line))
    later.start()
    # Where it does not wait for the other, it is done within this.
    later.join(0.2)
    may_go_on.set()
    earlier.join(10)
    later.join(10)
    assert file.look(at_once=True).find(revoked) is None


def test_a_file_that_is_changed_keeps_its_owner_and_mode(path: Path) -> None:
    add_token(path, "first", Role.READER)
    path.chmod(0o640)
    # Root alone may give files away.
    owner = (65_534, 65_534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(path, *owner)
    add_token(path, "second", Role.READER)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*owner, 0o640)


def test_a_token_that_was_made_just_now_is_good_at_once(path: Path) -> None:
    add_token(path, "old", Role.READER)
    gate = Gate(TokenFile(path, Clock()))
    fresh = add_token(path, "fresh", Role.READER)
    gate.enter(f"Bearer {fresh}", GET_RUN, RULES[GET_RUN]).check_run("math-1")


def test_a_caller_whose_token_ends_meanwhile_is_stopped(path: Path) -> None:
    clock, wall = Clock(), Clock()
    wall.now = LATER.timestamp() - 1
    token = add_token(path, "a", Role.READER, expires=LATER)
    gate = Gate(TokenFile(path, clock), wall)
    caller = gate.enter(f"bearer {token}", GET_RUN, RULES[GET_RUN])
    caller.check_run("math-1")
    wall.now += 1
    with pytest.raises(Unauthenticated, match="expired"):
        caller.check_live()
    wall.now -= 1
    with changing(path) as held:
        held[0] = TokenSet(())
    clock.now = 1.0
    with pytest.raises(Unauthenticated, match="revoked"):
        caller.check_live()


def test_a_caller_sees_its_runs_alone(path: Path) -> None:
    token = add_token(path, "a", Role.READER)
    caller = Gate(TokenFile(path)).enter(f"Bearer {token}", GET_RUN, RULES[GET_RUN])
    assert caller.visible(["math-1", "other", "exact"]) == ["math-1", "exact"]


def test_what_the_table_does_not_know_nobody_may(path: Path) -> None:
    token = add_token(path, "a", Role.ADMIN, "*")
    with pytest.raises(PermissionDenied):
        Gate(TokenFile(path)).enter(f"Bearer {token}", "/rollout_buffer.v1.RunService/New", None)


def test_expiry_is_a_moment(path: Path) -> None:
    entry = TokenEntry("a", Role.READER, ("*",), "0" * 64, LATER)
    assert not entry.expired((LATER - timedelta(milliseconds=1)).timestamp())
    assert entry.expired(LATER.timestamp())


def test_changes_at_the_same_time_are_all_kept_and_no_reader_sees_half(path: Path) -> None:
    add_token(path, "seed", Role.READER)
    done = threading.Event()
    broken: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                TokenFile(path)
            except TokensRefused as refused:
                broken.append(refused)

    def write(number: int) -> None:
        for i in range(5):
            add_token(path, f"w{number}-{i}", Role.READER)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    reader.join(60)
    assert not broken
    assert len(TokenFile(path).tokens.entries) == 21
    assert not list(path.parent.glob(".*.tmp"))


def test_a_peer_that_keeps_failing_is_told_less_and_another_is_not_held_for_it() -> None:
    clock = Clock()
    limit = RateLimit(PER_S, BURST, clock)
    assert [limit.allows("a") for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert limit.allows("b")
    clock.now += 1.0
    assert [limit.allows("a"), limit.allows("a")] == [True, False]


def test_peers_are_not_remembered_without_bound() -> None:
    limit = RateLimit(PER_S, BURST, Clock())
    for number in range(5_000):
        limit.allows(f"peer {number}")
    assert len(limit._buckets) <= 1_024


def test_a_call_is_let_in_within_microseconds(path: Path) -> None:
    tokens = [add_token(path, f"t{i}", Role.READER) for i in range(20)]
    gate = Gate(TokenFile(path))
    authorization, calls = f"Bearer {tokens[10]}", 500

    def let_in() -> None:
        gate.enter(authorization, GET_RUN, RULES[GET_RUN]).check_run("math-1")

    # Processor time, the best of some: 9 µs on a quiet core.
    spent_s = min(timeit.repeat(let_in, timer=time.process_time, number=calls, repeat=9))
    assert spent_s / calls < 100e-6
