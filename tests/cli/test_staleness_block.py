"""Tests of what `rollout-buffer status` shows of a run's staleness."""

from io import StringIO

from rich.console import Console

from buffer_cli.status.staleness import MAX_ADVICE, print_estimate
from buffer_service.domain.ops import RunView
from buffer_service.domain.policy import RunPolicy
from buffer_service.observability.estimate import estimate
from tests.support.views import make_loop, make_view


def lines(view: RunView) -> list[str]:
    shown = StringIO()
    print_estimate(Console(file=shown, width=200), estimate(view))
    return [line.strip() for line in shown.getvalue().splitlines()]


def cells(shown: list[str], first: str) -> list[str]:
    row = next(line for line in shown if line.startswith(f"│ {first}"))
    return [cell.strip() for cell in row.strip("│").split("│")]


def test_predicted_stands_beside_measured() -> None:
    shown = lines(
        make_loop(rho=0.7, pre_queue=1.25, in_queue=0.5, statistics={"assembled_groups": 9, "staleness_max": 4})
    )
    assert shown[0] == "staleness, over the last 20 publishes, 3 min"
    assert cells(shown, "predicted") == ["predicted", "1.50", "0.70", "2.20", "", ""]
    assert cells(shown, "measured") == ["measured", "1.25", "0.50", "1.75", "1.12", "4"]


def test_the_loop_the_verdict_and_the_advice_follow() -> None:
    text = "\n".join(lines(make_loop(rho=0.7)))
    assert "closed form    queue-drop, whole batches" in text
    assert "engines decode 12,800 tokens/s, the trainer trains 18,286 while it works, ρ 0.70" in text
    assert "engines busy 100%, trainer idle 30%, 12,800 tokens/s trained, 10 s a batch" in text
    assert "C 128, C/B 1.00, q 1, M 1.50, 1,000 tokens a response, 15 s a group" in text
    assert "verdict        rollout-bound: engines make 70% of what the trainer can take" in text
    assert "advice         1. " in text
    assert "not known" not in text


def test_a_trainer_that_never_published_is_told_so_although_there_is_no_estimate() -> None:
    shown = lines(make_view(next_step=9, committed_steps=9, published_steps=0))
    assert shown[0].startswith("estimate       none yet: ")
    assert shown[1].startswith("verdict        no weights are published: 9 steps are committed so far")


def test_no_more_advice_than_people_read() -> None:
    view = make_loop(RunPolicy(batch_groups=16, max_queued_groups=64), concurrency=512, rho=1.6, tailness=3.0)
    assert len(estimate(view).advice) > MAX_ADVICE
    assert sum(f"{number}. " in "\n".join(lines(view)) for number in range(1, 9)) == MAX_ADVICE


def test_environments_are_shown_when_there_are_several() -> None:
    sums = {
        "assembled_groups": 10,
        "staleness_sum": 30,
        "pre_queue_staleness_sum": 20,
        "in_queue_staleness_sum": 10,
        "token_staleness_milli_sum": 1_500 * 400,
        "assembled_response_tokens": 400,
    }
    both = lines(make_loop(environment_statistics={"math": sums, "[code]": sums}))
    assert cells(both, "math, so far") == ["math, so far", "2.00", "1.00", "3.00", "1.50", ""]
    assert cells(both, "[code], so far")[3] == "3.00"
    assert "so far │" not in "\n".join(lines(make_loop(environment_statistics={"math": sums}))[3:])


def test_what_is_not_known_is_said_once_for_each_reason() -> None:
    shown = lines(make_loop(publishes=3, grown={"trainer_busy_ms": 0, "trainer_wait_ms": 0}))
    missing = [line for line in shown if line.startswith("not known")]
    assert missing == [
        "not known      train_tokens_per_s, trainer_idle_share, rho: the trainer does not report its times",
        "not known      predicted: fewer than 4 publishes since the first one of the window",
    ]
    (alone,) = lines(make_view())
    assert alone.startswith("estimate       none yet: fewer than 2 publishes since the start")
