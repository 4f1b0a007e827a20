"""Tests of what `rollout-buffer status` shows of a run's engines, and of the ways of its payloads."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from buffer_cli.output import count
from buffer_cli.status.summary import print_run
from buffer_service.domain.ops import Amount, EngineReport, RelayingClient, StageState, WeightVersion
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import Decision, Outcome
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.observability.estimate import estimate
from buffer_service.rules.transitions import GroupState
from tests.support.views import make_loop, make_view


def test_engines_are_shown_with_their_process_group_and_silence() -> None:
    loaded = WeightVersion(1, 3)
    shown = StringIO()
    engines = [
        EngineReport(
            "alone",
            "w",
            "ready",
            loaded,
            7,
            120,
            "",
            0,
            silent_ms=12_900,
            running_samples=5,
            max_running_samples=64,
            kv_usage_milli=712,
        ),
        EngineReport("member", "w", "ready", loaded, 0, 0, "", 0, membership=2),
        EngineReport("prepared", "w", "loading", loaded, 0, 0, "", 0, membership=2, prepared=WeightVersion(1, 4)),
    ]
    view = make_view(engines=engines)
    print_run(Console(file=shown, width=200), view, estimate(view))
    rows = {
        cells[0]: cells
        for line in shown.getvalue().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]) == 8
    }
    assert rows["engine"][3:] == ["samples", "group", "reloads", "last reload", "silent"]
    assert rows["alone"][3:] == ["5 of 64, KV 71%", "-", "7", "120 ms", "12 s"]
    assert rows["member"][3:5] == ["0", "2"]
    assert rows["prepared"][4] == "2, ready for 4"


def test_where_weights_came_from_is_said_once_a_worker() -> None:
    said = "http://relay:8090 16.0 MB at 12.0 MB/s (http://relay:8090 12.0 MB/s a connection, 2 ms)"
    engines = [
        EngineReport(name, "w", "ready", WeightVersion(1, 3), 7, 120, "", 0, weights_from=said if name != "c" else "")
        for name in "abc"
    ]
    view = make_view(engines=engines)
    print_run(Console(file=(shown := StringIO()), width=200, highlight=False), view, estimate(view))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert f"weights of a and 1 more {said}" in lines
    assert shown.getvalue().count(said) == 1


def test_clients_that_relay_are_counted_by_direction_with_their_reasons() -> None:
    def client(name: str, why: str, *, writes: bool = True) -> RelayingClient:
        return RelayingClient(name, writes, why, silent_ms=0)

    slow, refused = "the store at s:6379: no answer in time", "[red]refused[/red]"
    clients = [client("w1", refused), client("w2", slow), client("w3", slow), client("w4", "a"), client("w5", "b")]
    view = make_view(relaying=[*clients, client("trainer rank 0", refused, writes=False)])
    shown = StringIO()
    print_run(Console(file=shown, width=200, highlight=False), view, estimate(view))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert f"relayed pushes 5 clients: {slow} (2); {refused} (1); 2 other reasons" in lines
    assert f"relayed pulls 1 client: {refused} (1)" in lines
    print_run(Console(file=(without := StringIO())), make_view(), estimate(view))
    assert "relayed" not in without.getvalue()


def test_what_pushers_wrote_themselves_is_shown_beside_what_was_accepted() -> None:
    amounts = {"queued": Amount(groups=1_500, bytes=9_000_000), "filtered": Amount(groups=2, bytes=1_000)}
    view = make_view(groups=amounts, statistics={"written_groups": 1_200, "written_bytes": 8_000_000})
    print_run(Console(file=(shown := StringIO()), width=200, highlight=False), view, estimate(view))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    written = "pushed directly 1,200 of 1,502 accepted groups, 8,000,000 of 9,001,000 bytes"
    assert written in lines
    print_run(Console(file=shown, width=200, highlight=False), replace(view, payload_shards=3), estimate(view))
    assert f"{written}, to a cluster of 3 shards" in " ".join(shown.getvalue().split())


def test_a_target_is_shown_with_the_last_decision_and_what_is_in_effect() -> None:
    policy = RunPolicy(batch_groups=8, max_lookahead=4, target_staleness_milli=1_500)
    reason = "mean staleness 1.49 over 8 publishes, target 1.50"
    decision = Decision(version=7, outcome=Outcome.HOLDING, reason=reason, knobs=Knobs(lookahead_milli=1_250))
    view = make_view(policy, decision=decision, world_size=1)
    print_run(Console(file=(shown := StringIO()), width=200, highlight=False), view, estimate(view))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert f"target 1.50 by head, holding: {reason}" in lines
    assert "in effect max_lookahead 1.25 of 4" in lines


def test_stages_are_shown_with_who_is_behind() -> None:
    stages = [
        StageState("reference", 3, 1, 20, 2, 5_000, 4_200),
        StageState("values", 0, 0, 0, 0, 0, None),
        StageState("rewards", 0, 0, 5, 0, 50, 9_000, 7, 4_000_000),
    ]
    view = make_view(stages=stages, blob_bytes=5_000_000, max_blob_bytes=1 << 30)
    print_run(Console(file=(shown := StringIO()), width=200, highlight=False), view, estimate(view))
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in shown.getvalue().splitlines()]
    assert ["reference", "3", "1", "20", "2", "250", "4 s ago"] in rows
    assert ["values", "0", "0", "0", "0", "", "never"] in rows
    facts = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert {"bytes of columns 4,000,000 of rewards", "blobs 5,000,000 of 1,073,741,824 bytes"} <= set(facts)
    assert "7 groups left the stage rewards without its columns" in shown.getvalue()
    assert "no filter by rewards has judged them" in shown.getvalue()


def test_a_run_of_long_names_and_large_figures_fits_80_columns_and_loses_none() -> None:
    name = "an-engine-whose-host-has-a-name-of-sixty-characters-0123456.e0"
    report = EngineReport(name, "w", "quarantined", WeightVersion(1, 123_456), 70_000, 123_456, "refused " * 20, 9)
    much = dict.fromkeys(map(str, GroupState), Amount(1_234_567_890, 2_234_567_890, 10**12, 10**14))
    view = make_view(
        groups=much,
        environments={name: much, "": {}},
        engines=[replace(report, membership=2, prepared=WeightVersion(1, 123_457), running_samples=512)],
        stages=[StageState(name, 123_456, 10_000, 2_000_000, 20_000, 50_000_000, 4_200_000, 0, 10**12)],
        tasks={"pending": 1_234_567_890, "completed": 123_456_789},
        run_id="r" * 64,
    )
    print_run(Console(file=(shown := StringIO()), width=80, highlight=False), view, estimate(make_loop()))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.getvalue(), "what is cut off cannot be told"
    for words in ("quarantined", "123456", "1.235 G", "70,000", "dropped_stale"):
        assert words in shown.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (999_999_999, "999,999,999"), (1_234_567_890, "1.235 G"), (10**14, "100 T")]
)
def test_counts_take_eleven_characters_at_most(value: int, shown: str) -> None:
    assert count(value) == shown
