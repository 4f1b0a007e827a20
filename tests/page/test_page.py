"""The page in a real Chromium, on a real service: what is seen of a run, and how it follows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer.v1 import payloads_pb2, runs_pb2, weights_pb2
from tests.page.browser import Chromium, Screen
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, make_group, make_task
from tests.support.service import ServiceProcess

pytestmark = pytest.mark.browser

Named = Callable[..., RunRpc]
HOSTILE = "<img src=x onerror=document.title='owned'>\"'&amp;{{7*7}}\u202e</script>"


def whole_run(named: Named, name: str = "math", publishes: int = 4) -> RunRpc:
    """A run with everything that an estimate needs: engines, trained steps, times."""
    run = named(name, batch_groups=2, max_queued_groups=4, max_staleness=8)
    for step in range(publishes + 1):
        seconds = step + 1
        run.report(
            "engine-0", decoded_tokens=300 * seconds, decode_busy_ms=1_000 * seconds, decode_request_ms=4_000 * seconds
        )
        run.fill(2, prefix=f"s{step}-")
        run.pull(step)
        spent = 40 * (step + 1)
        run.publish(step + 1, commit_through_step=step, trainer_busy_ms=spent, trainer_wait_ms=spent)
    return run


def test_numbers_follow_the_run_without_a_reload(screen: Screen, named: Named) -> None:
    run = named("math", batch_groups=4, max_queued_groups=16)
    screen.visit(run.run_id)
    screen.until("#loop", "queue: 0 of 16 groups")
    screen.until("#connection-state", re.compile("^live$"))
    screen.at("#board").evaluate("node => { node.dataset.mine = 'same'; }")
    run.fill(3)
    screen.until("#loop", "queue: 3 of 16 groups")
    screen.until("#groups-rows", "accepted3")
    run.fill(2, prefix="y")
    run.pull(0)
    screen.until("#loop", "queue: 1 of 16 groups")
    screen.until("#waits-on", "the feeder: no task is pending")
    screen.until("#rates", "rates over the last")
    screen.until("#board[data-mine=same] .tile:nth-child(4)", "of 16; a batch is 4")
    assert screen.errors == []


def test_a_target_is_shown_with_the_reason_of_the_last_decision_and_what_is_in_effect(
    screen: Screen, named: Named
) -> None:
    run = named("math", batch_groups=2, max_queued_groups=4, max_lookahead=3, target_staleness_milli=1_500)
    screen.visit(run.run_id)
    screen.until("#staleness-target", "Target 1.50 by head: decided with the next publish")
    run.publish(1)
    screen.until("#staleness-target", run.get().control.reason)
    screen.until("#staleness-target", "In effect: max_lookahead 1.5 of 3.")
    assert screen.errors == []


def test_verdict_advice_and_staleness_use_the_words_of_the_terminal(screen: Screen, named: Named) -> None:
    run = whole_run(named)
    found = run.get().estimate
    screen.visit(run.run_id)
    screen.until("#headline", found.verdict.sentences[0])
    for one in found.advice[:4]:
        screen.until("#advice", one.text)
    screen.until("#staleness-window", "means over the last 4 publishes")
    measured = screen.row("#staleness-rows", "measured")
    assert f"{found.measured.staleness:.2f}" in measured.text_content()
    assert f"{found.predicted.staleness:.2f}" in screen.row("#staleness-rows", "predicted").text_content()
    screen.until("#quantities", "ρ, engines over trainer0.75")
    screen.until("#groups-balance", "balanced")
    assert "rollout-bound" in screen.page.title()


def test_drops_are_named_with_their_reasons(screen: Screen, named: Named) -> None:
    run = named("drops", batch_groups=2, max_queued_groups=2, filter_equal_rewards=True)
    run.push([make_group(f"o{i}", rewards=(0.0, 1.0)) for i in range(5)])
    run.push([make_group(f"f{i}") for i in range(2)])
    screen.visit(run.run_id)
    screen.until("#drops", "dropped_overflow3")
    screen.until("#drops", "the queue was full")
    screen.until("#drops", "2 for equal_rewards")


def test_clients_that_relay_are_shown_with_their_reason(screen: Screen, named: Named, rpc: Rpc) -> None:
    run = named("relayed")
    asked = payloads_pb2.PayloadAccessRequest(run=run.ref, client_id="w", trouble=HOSTILE)
    rpc.payloads.GetWriteAccess(asked, timeout=TIMEOUT_S)
    screen.visit(run.run_id)
    screen.until("#sentences", f"Payloads of pushes are relayed for 1 client: {HOSTILE} (1)")
    asked.trouble = ""
    rpc.payloads.GetWriteAccess(asked, timeout=TIMEOUT_S)
    screen.until("#sentences", re.compile("^$"))
    assert screen.errors == []


def test_an_engine_that_is_not_well_stands_out_and_comes_first(screen: Screen, named: Named) -> None:
    run = named("fleet", batch_groups=2)
    run.report("a-well")
    run.report("z-ill", weights_pb2.ENGINE_STATE_QUARANTINED, errors=3, last_error="cannot load version 3: refused")
    screen.visit(run.run_id)
    screen.until("#fleet-summary", "2 engines: 1 quarantined, 1 ready")
    row = screen.at("#engines-rows tr").first
    # By a mark and a word, and not by colour alone.
    assert row.locator("td").first.text_content() == "✕ quarantined"
    assert "cannot load version 3: refused" in row.text_content()
    assert row.get_attribute("data-kind") == "bad"


FALLEN_SILENT = """async (name) => {
  const { showFleet } = await import("/page/fleet.js");
  const loaded = { term: 1, version: 3 };
  const engine = { worker_id: "w", state: "ready", loaded, membership: 0, prepared: null, reloads: 0,
    running_samples: 5, max_running_samples: 64, kv_usage_milli: 712 };
  const well = { ...engine, last_reload_ms: 0, errors: 0, last_error: "", engine_id: "a", silent_ms: 0 };
  showFleet({ run_id: "r", published: loaded, engines: [well, { ...well, engine_id: name, silent_ms: 45000 }] }, 20000);
}"""


def test_an_engine_that_falls_silent_is_counted_on_by_the_page(screen: Screen) -> None:
    """Without a service, so that nothing else is drawn; with a name that this service would not take."""
    screen.page.route("**/api**", lambda route: route.abort())
    screen.visit()
    screen.page.evaluate(FALLEN_SILENT, HOSTILE)
    assert screen.at("#fleet-summary").text_content() == "2 engines: 1 not heard of for 60 s, 1 ready"
    first = screen.at("#engines-rows tr").first
    assert first.locator("th").text_content() == HOSTILE
    assert first.locator("td").first.text_content() == "? not heard of (was ready)"
    assert "65 s" in first.text_content()
    assert first.locator("td").nth(2).text_content() == "5 of 64"
    assert first.locator("td").nth(2).get_attribute("title") == "KV cache 71 % in use"


def test_errors_from_outside_are_text_and_nothing_else(screen: Screen, named: Named) -> None:
    run = named("hostile", batch_groups=2)
    run.report("engine-0", weights_pb2.ENGINE_STATE_QUARANTINED, last_error=HOSTILE, errors=1)
    screen.visit(run.run_id)
    screen.until("#engines-rows", HOSTILE)
    assert screen.page.title() != "owned"
    assert screen.at("#board img").count() == 0
    assert screen.fits()
    screen.visit(HOSTILE)
    screen.until("#empty-title", f"There is no run {HOSTILE}")
    assert [error for error in screen.errors if "404" not in error] == []


ENVIRONMENTS = """async (name) => {
  const { showEnvironments } = await import("/page/ledger.js");
  const states = ["accepted", "queued", "delivered", "trained", "dropped_overflow", "dropped_stale", "recycled"];
  const all = [...states, "filtered", "rejected", "discarded", "lost"];
  const ledger = Object.fromEntries(all.map((state, index) => [state, { groups: index }]));
  const work = { environment: name, starts: 11, failed_attempts: 12, failed_samples: 13, limited_for_ms: 1500 };
  showEnvironments({ environments: { [name]: ledger }, environment_work: [work], evaluations: [], stages: [] });
}"""


def test_names_of_environments_are_text_too(screen: Screen) -> None:
    """Without a service: this one would not take the name."""
    screen.page.route("**/api**", lambda route: route.abort())
    screen.visit()
    screen.page.evaluate(ENVIRONMENTS, HOSTILE)
    cells = screen.at("#environments-rows tr").first
    assert cells.locator("th").text_content() == HOSTILE
    assert cells.locator("td").all_text_contents() == [
        *("0", "1", "2", "3", str(4 + 5 + 6 + 7 + 8 + 9 + 10)),
        *("11", "12", "13", "in 1.5 s"),
    ]
    assert screen.at("#board img").count() == 0


def test_nothing_yet_says_what_to_do_next(screen: Screen, rpc: Rpc, named: Named) -> None:
    run = named("young", batch_groups=2)
    screen.visit(run.run_id)
    screen.until("#headline", "no verdict yet: fewer than 2 publishes")
    screen.until("#next", "start the trainer with its tasks")
    screen.until("#worker-command", f"rollout-buffer worker --run {run.run_id}")
    run.submit([make_task()])
    screen.until("#next", "start a worker")
    run.fill(2)
    screen.until("#next", "Nothing is trained yet")
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)
    screen.until("#empty-title", f"There is no run {run.run_id}")
    screen.until("#empty-next", "It was deleted")


def test_states_of_a_run_are_said(screen: Screen, rpc: Rpc, named: Named) -> None:
    run = named("held", batch_groups=2)
    screen.visit(run.run_id)
    rpc.runs.PauseRun(runs_pb2.PauseRunRequest(run=run.ref), timeout=TIMEOUT_S)
    screen.until("#states", "paused: operator")
    screen.until("#waits-on", "an operator: the run is held until it is continued")


def contrast(one: str, other: str) -> float:
    """Contrast of two computed colours (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


PAIRS = [
    ("h1", "#verdict"),
    ("#rates", ".card"),
    ("#engines-rows td[data-kind=bad]", "#engines-rows tr[data-kind=bad] td"),
    ("#groups-balance", "#groups-balance"),
    ("#policy-rest", ".card"),
    ("#sentences, footer", "body"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(
    chromium: Chromium, service: ServiceProcess, named: Named, scheme: str, shots: Path
) -> None:
    run = whole_run(named)
    run.report("ill", weights_pb2.ENGINE_STATE_QUARANTINED, errors=3, last_error="connection refused")
    with Screen.opened(chromium, service.admin, color_scheme=scheme, reduced_motion="reduce") as screen:
        screen.visit(run.run_id)
        screen.until("#engines-rows", "ill")
        grounds = [int(part) for part in re.findall(r"\d+", screen.style("body", "backgroundColor"))[:3]]
        assert (sum(grounds) > 3 * 200) == (scheme == "light")
        for text, ground in PAIRS:
            colours = [
                screen.page.locator(text).first.evaluate("node => getComputedStyle(node).color"),
                screen.page.locator(ground).first.evaluate("node => getComputedStyle(node).backgroundColor"),
            ]
            assert contrast(*colours) >= 4.5, (text, colours)
        assert (
            screen.page.locator(".loop .weights").first.evaluate("node => getComputedStyle(node).animationName")
            == "none"
        )
        screen.page.screenshot(path=shots / f"{scheme}.png", full_page=True)
        # The choice wins over the system's, and lasts.
        for _ in range(2 if scheme == "light" else 1):
            screen.at("#theme").click()
        other = "dark" if scheme == "light" else "light"
        screen.until("#theme", f"Theme: {other}")
        chosen = screen.style("body", "backgroundColor")
        screen.page.reload()
        screen.until("#theme", f"Theme: {other}")
        assert screen.style("body", "backgroundColor") == chosen


def test_a_phone_needs_no_sideways_scrolling(
    chromium: Chromium, service: ServiceProcess, named: Named, shots: Path
) -> None:
    run = whole_run(named, "a-run-whose-name-is-longer-than-a-phone-is-wide-0123456")
    run.push([make_group("e", environment="environment_" * 5)])
    run.report("engine-" * 9, weights_pb2.ENGINE_STATE_QUARANTINED, errors=3, last_error="x" * 300)
    with Screen.opened(chromium, service.admin, 390, 844, has_touch=True, is_mobile=True) as screen:
        screen.visit(run.run_id)
        screen.until("#engines-rows", "engine-engine-")
        screen.until("#environments-rows", "environment_")
        assert screen.fits()
        # The picture stands upright, and a row of the fleet is a card.
        assert screen.page.evaluate(
            "(({width, height}) => height > width)(document.querySelector('.loop').getBoundingClientRect())"
        )
        assert screen.style("#engines-rows tr >> nth=0", "display") == "block"
        for small in ("#run", "#theme"):
            assert screen.at(small).bounding_box()["height"] >= 36
        screen.page.screenshot(path=shots / "phone.png", full_page=True)


def test_stages_say_what_waits_in_them_and_for_whom(screen: Screen, named: Named) -> None:
    run = named("staged", batch_groups=2, stages=["reference", "values"])
    run.fill(2)
    screen.visit(run.run_id)
    screen.until("#stages-rows", "reference2000–by nobody yet")
    screen.until("#stages-rows", "values0000–by nobody yet")
    plain = named("plain", batch_groups=2)
    screen.visit(plain.run_id)
    screen.until("#policy-changed", "batch_groups2")
    screen.until_shown("#stages-card", shown=False)


def test_everything_is_reached_by_keyboard_and_runs_are_switched_by_it(screen: Screen, named: Named) -> None:
    first, second = sorted(
        [named("keys-a", batch_groups=2), named("keys-b", batch_groups=3)], key=lambda run: run.run_id
    )
    screen.visit(first.run_id)
    screen.until("#policy-changed", "batch_groups2")
    reached = []
    for _ in range(12):
        screen.page.keyboard.press("Tab")
        reached.append(screen.focused())
        if reached[-1] == "policy-rest":
            break
    assert reached[:3] == ["skip", "run", "theme"]
    # What scrolls can be scrolled, and what is folded unfolded.
    assert "scroll" in reached
    screen.at("summary").focus()
    screen.page.keyboard.press("Enter")
    screen.until_shown("#policy")
    outline = screen.style("summary", "outlineStyle")
    assert outline == "solid"
    screen.at("#run").focus()
    screen.page.keyboard.press("ArrowDown")
    screen.until("#policy-changed", "batch_groups3")
    assert second.run_id in screen.page.url
    screen.page.go_back()
    screen.until("#policy-changed", "batch_groups2")
    assert screen.at("#run").input_value() == first.run_id


def test_a_run_that_comes_later_is_offered(screen: Screen, named: Named) -> None:
    first = named("early", batch_groups=2)
    screen.visit(first.run_id)
    screen.until("#policy-changed", "batch_groups2")
    later = named("later", batch_groups=2)
    screen.at(f"#run option[value={later.run_id}]").wait_for(state="attached")
    assert screen.at("#run").input_value() == first.run_id


def rates(screen: Screen, steps: list[Any]) -> Any:
    """Compute what `steps` on a History come to."""
    screen.visit()
    return screen.page.evaluate(
        "async (steps) => { const { History } = await import('/page/history.js'); const history = new History();"
        " return steps.map(([act, ms, total]) => act === 'add' ? history.add(ms, { total })"
        " : act === 'rate' ? history.rate('total', ms) : history.interrupt()); }",
        steps,
    )


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        # Over what was watched, while that is less than the window of 30 s.
        ([["add", 0, 100], ["add", 5_000, 150], ["rate", 10_000]], 5),
        ([["add", 0, 100], ["rate", 2_000]], None),
        # Over the window afterwards; what came before it is not counted.
        ([["add", 0, 0], ["add", 40_000, 1_000], ["add", 50_000, 1_060], ["rate", 75_000]], 2),
        ([["add", 0, 0], ["add", 10_000, 500], ["rate", 60_000]], 0),
        # What happened while nothing was heard is in no window.
        ([["add", 0, 0], ["gap", 0], ["add", 20_000, 900], ["add", 25_000, 910], ["rate", 30_000]], 1),
        # A total that fell is another history.
        ([["add", 0, 900], ["add", 10_000, 0], ["add", 15_000, 40], ["rate", 20_000]], 4),
    ],
)
def test_a_rate_is_growth_over_its_window(screen: Screen, steps: list[Any], rate: float | None) -> None:
    assert rates(screen, steps)[-1] == rate


def test_events_are_parsed_wherever_their_texts_are_cut(screen: Screen) -> None:
    text = 'retry: 20\n\n: c\n\nid: a-1\nevent: run\ndata: {"x":"é:\\n"}\n\nevent: end\ndata: 1\ndata: 2\n\n'
    screen.visit()
    found = screen.page.evaluate(
        "async (text) => { const { EventParser } = await import('/page/stream.js');"
        " return [...text].map((_, cut) => { const parser = new EventParser();"
        " return JSON.stringify([...parser.push(text.slice(0, cut)), ...parser.push(text.slice(cut))]); }); }",
        text,
    )
    assert set(found) == {
        '[{"event":"run","data":"{\\"x\\":\\"é:\\\\n\\"}","id":"a-1"},{"event":"end","data":"1\\n2","id":"a-1"}]'
    }
