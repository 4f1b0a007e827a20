"""Times at which a client asks for access to the store, by a clock of the test's."""

import logging

import pytest

from buffer_wire.payloads.access import StoreAccess
from buffer_wire.payloads.turns import FIRST_RETRY_S, LONGEST_RETRY_S, RECOVERED_AFTER_S, Turns
from rollout_buffer.v1 import payloads_pb2

GIVEN = StoreAccess.checked(
    payloads_pb2.PayloadAccess(
        addresses=[payloads_pb2.StoreAddress(host="store", port=1)],
        username="w",
        password="pw",
        unpushed_ms=60_000,
        valid_ms=90_000,
    )
)
REFUSED = StoreAccess.checked(payloads_pb2.PayloadAccess(relayed_because="out of reach", valid_ms=30_000))


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def until_due(self, turns: Turns) -> float:
        """Go on until access is to be asked for; returns the time that it took."""
        began = self.now
        while not turns.is_due:
            self.now += 0.01
        return self.now - began


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns:
    return Turns("a client", clock)


def test_access_is_asked_for_at_the_start_and_again_before_it_ends(turns: Turns, clock: Clock) -> None:
    assert (turns.is_due, turns.is_good) == (True, False)
    turns.taken(GIVEN, clock.now)
    assert clock.until_due(turns) == pytest.approx(60, abs=0.1)
    assert turns.is_good
    clock.now += 30
    assert not turns.is_good


def test_where_the_service_relays_it_is_asked_again_when_its_answer_is_old(turns: Turns, clock: Clock) -> None:
    turns.relayed(REFUSED, clock.now)
    assert not turns.is_good
    assert clock.until_due(turns) == pytest.approx(30, abs=0.1)


def test_faults_in_a_row_are_further_and_further_apart_until_a_payload_passes(turns: Turns, clock: Clock) -> None:
    waits = []
    for _ in range(12):
        turns.failed("refused", lost=True)
        waits.append(clock.until_due(turns))
        # A connection alone does not show that payloads pass.
        turns.taken(GIVEN, clock.now)
    assert FIRST_RETRY_S / 2 <= waits[0] <= FIRST_RETRY_S + 0.02
    assert LONGEST_RETRY_S / 2 <= waits[-1] <= LONGEST_RETRY_S + 0.02
    turns.passed()
    turns.failed("refused", lost=True)
    assert clock.until_due(turns) <= FIRST_RETRY_S + 0.02


def test_a_caller_waits_for_few_tries_that_take_long(turns: Turns, clock: Clock) -> None:
    began, tried_s = clock.now, 0.0
    while clock.now < began + 600:
        clock.until_due(turns)
        clock.now += 2
        tried_s += 2
        turns.failed("no answer in time", lost=True, tried_s=2)
    assert tried_s / (clock.now - began) < 0.08


def test_a_fault_of_a_renewal_leaves_what_is_in_use(turns: Turns, clock: Clock) -> None:
    turns.taken(GIVEN, clock.now)
    turns.failed("no answer", lost=False)
    assert turns.is_good
    assert turns.trouble == "no answer"


def test_the_service_is_soon_told_that_a_trouble_is_over(turns: Turns, clock: Clock) -> None:
    turns.failed("refused", lost=True)
    clock.until_due(turns)
    turns.taken(GIVEN, clock.now)
    assert clock.until_due(turns) == pytest.approx(RECOVERED_AFTER_S, abs=0.1)
    turns.taken(GIVEN, clock.now)
    assert clock.until_due(turns) == pytest.approx(60, abs=0.1)


def test_a_change_of_the_way_is_logged_once(turns: Turns, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for why in ("refused", "still refused"):
        turns.failed(why, lost=True)
    for _ in range(2):
        turns.taken(GIVEN, clock.now)
    assert [record.getMessage() for record in caplog.records] == [
        "a client has payloads relayed by the service: refused",
        "a client moves payloads directly again",
    ]
