"""Times at which a client asks for access to the store, by a clock of the test's."""

import logging

import pytest

from buffer_wire.errors import RolloutBufferError, StoreUnavailable
from buffer_wire.payloads.access import StoreAccess
from buffer_wire.payloads.turns import FIRST_RETRY_S, LONGEST_RETRY_S, RECOVERED_AFTER_S, Turns
from buffer_wire.status import ServiceUnreachable
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


def test_where_the_service_relays_clients_ask_again_before_its_answer_is_old_and_not_all_at_once(clock: Clock) -> None:
    waits = []
    for _ in range(40):
        turns = Turns("a client", clock)
        turns.relayed(REFUSED, clock.now)
        assert not turns.is_good
        waits.append(clock.until_due(turns))
    assert 15 <= min(waits) < 20
    assert 25 < max(waits) <= 30.02


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


AWAY: list[RolloutBufferError | OSError] = [
    ServiceUnreachable("UNAVAILABLE: refused", status="UNAVAILABLE"),
    StoreUnavailable("store:1", "refused"),
    RolloutBufferError("CANCELLED: the server ends", status="CANCELLED"),
    TimeoutError(),
]


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
def test_a_service_that_is_away_is_asked_again_and_nobody_relays_for_that(
    error: RolloutBufferError | OSError, turns: Turns, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    waits = []
    for _ in range(12):
        turns.not_answered(error, lost=True)
        assert turns.is_failing
        waits.append(clock.until_due(turns))
    assert waits[0] <= FIRST_RETRY_S + 0.02
    assert LONGEST_RETRY_S / 2 <= waits[-1] <= LONGEST_RETRY_S + 0.02
    assert (turns.trouble, caplog.messages) == ("", [])


def test_what_was_wrong_before_the_service_was_away_is_still_told(turns: Turns) -> None:
    turns.failed("refused", lost=True)
    turns.not_answered(AWAY[0], lost=True)
    assert turns.trouble == "refused"


def test_the_service_is_soon_told_that_a_trouble_is_over(turns: Turns, clock: Clock) -> None:
    turns.failed("refused", lost=True)
    clock.until_due(turns)
    turns.taken(GIVEN, clock.now)
    assert clock.until_due(turns) == pytest.approx(RECOVERED_AFTER_S, abs=0.1)
    turns.taken(GIVEN, clock.now)
    assert clock.until_due(turns) == pytest.approx(60, abs=0.1)


def test_every_reason_is_logged_once_and_the_end_of_it_when_a_payload_has_passed(
    turns: Turns, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        turns.failed("refused", lost=True)
        # A connection alone does not show that payloads pass.
        turns.taken(GIVEN, clock.now)
    for _ in range(2):
        turns.relayed(REFUSED, clock.now)
    turns.not_answered(RolloutBufferError("no such method"), lost=True)
    turns.taken(GIVEN, clock.now)
    for _ in range(2):
        turns.passed()
    assert caplog.messages == [
        "a client has payloads relayed by the service: refused",
        "a client has payloads relayed by the service: out of reach",
        "a client has payloads relayed by the service: no access: no such method",
        "a client moves payloads directly again",
    ]


def test_a_cluster_in_use_is_asked_about_at_once_and_soon_after_as_about_any_fault(turns: Turns, clock: Clock) -> None:
    turns.taken(GIVEN, clock.now)
    turns.passed()
    turns.strayed("MOVED")
    assert (turns.is_due, turns.is_good, turns.is_failing, turns.trouble) == (True, False, False, "MOVED")
    turns.taken(GIVEN, clock.now)
    assert turns.is_good
    turns.strayed("MOVED")
    assert (turns.is_due, turns.is_failing) == (False, True)
    assert FIRST_RETRY_S / 2 <= clock.until_due(turns) <= FIRST_RETRY_S + 0.02
    clock.now += RECOVERED_AFTER_S
    turns.taken(GIVEN, clock.now)
    turns.strayed("MOVED")
    assert turns.is_due
