"""`rollout-buffer worth`: the same loop by turns and at once, as a table or as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from buffer_cli.output import print_json
from buffer_cli.staleness.commands import StepOptions, WorkloadOptions
from buffer_cli.staleness.inputs import workload_of
from buffer_cli.staleness.lab import candidate
from buffer_cli.staleness.output import naming_options, progress, result_values
from buffer_wire.errors import InvalidField
from rollout_lab.worth import Contender, Outcome, Question, Split, in_words, outcomes

SHARED = "sync, shared GPUs"
SYNC = "sync, split GPUs"


@naming_options
def run(
    workload: WorkloadOptions,
    simulation: StepOptions,
    *,
    rollout_gpus: int | None,
    train_gpus: int | None,
    switch_pause: float,
    slot_tps: float | None,
    policies: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Answer as the options say."""
    split = _split(switch_pause, rollout_gpus=rollout_gpus, train_gpus=train_gpus)
    if slot_tps is not None and not slot_tps > 0:
        raise InvalidField("slot_tps", slot_tps, "above 0")
    n = workload.groups_per_batch
    written = policies or ["one_step_off", "queue_drop", f"streaming({max(1, n // 8)})"]
    sync = candidate("sync", n).policy
    contenders = [
        *([Contender(name=SHARED, policy=sync, is_sync=True, shares_gpus=True)] if split else []),
        Contender(name=SYNC, policy=sync, is_sync=True),
        *(Contender(name=one, policy=candidate(one, n).policy) for one in written),
    ]
    question = Question(
        contenders=contenders,
        workload=workload_of(workload),
        split=split,
        switch_pause=switch_pause,
        **asdict(simulation),
    )
    with progress(len(contenders), "policies") as done:
        found = outcomes(question, done=done)
    if as_json:
        values = {
            "rho": workload.rho,
            "kappa": split.kappa(workload.rho) if split else None,
            "answer": in_words(found),
            "policies": [_values(one, slot_tps) for one in found],
        }
        print_json(values)
    else:
        _print(found, question, slot_tps)


def _split(switch_pause: float, **gpus: int | None) -> Split | None:
    named = {name: number for name, number in gpus.items() if number is not None}
    if not named:
        if switch_pause:
            raise InvalidField("switch_pause", switch_pause, "0 without --rollout-gpus and --train-gpus")
        return None
    for name in gpus.keys() - named.keys():
        raise InvalidField(name, "unset", f"set together with {next(iter(named))}")
    return Split(**named)


def _values(one: Outcome, slot_tps: float | None) -> dict[str, Any]:
    return {
        "policy": one.contender.name,
        "is_sync": one.contender.is_sync,
        "shares_gpus": one.contender.shares_gpus,
        "period": one.period,
        "period_s": one.period / slot_tps if slot_tps else None,
        "speed": one.speed,
        "useful_gpu_share": one.useful_gpu_share,
        **result_values(one.result),
        # The result's is of the time in which slots decode.
        "slot_idle_share": one.slot_idle_share,
    }


def _print(found: Sequence[Outcome], question: Question, slot_tps: float | None) -> None:
    workload, split = question.workload, question.split
    console = Console(highlight=False)
    title = f"ρ {workload.rho:g}, C {workload.concurrency}, mean response {workload.lengths.mean:.0f} tokens"
    if split:
        title += (
            f"; {split.rollout_gpus} rollout and {split.train_gpus} train GPUs, κ = {split.kappa(workload.rho):.3g}"
        )
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("period", "speed", "idle", *(["used"] if split else []), "stale", "max", "wasted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        result = one.result
        table.add_row(
            one.contender.name,
            f"{one.period / slot_tps:,.1f} s" if slot_tps else f"{one.period:,.0f}",
            f"{one.speed:.2f}",
            f"{result.trainer_idle_share:.0%} {one.slot_idle_share:.0%}",
            *([f"{one.useful_gpu_share:.0%}"] if one.useful_gpu_share is not None else []),
            f"{result.staleness:.2f}",
            str(result.staleness_max),
            f"{result.wasted_token_share:.0%}",
        )
    console.print(table)
    console.print(f"→ {in_words(found)}")
    unit = "in seconds" if slot_tps else "in token times, what a slot needs for a token"
    if split:
        more = (
            "shared GPUs: all generate, then all train. used: GPU time that generating and training a batch takes, "
            "over all that passes."
        )
    else:
        more = "Where GPUs can change roles, ask with --rollout-gpus and --train-gpus: by turns, sync uses all of them."
    console.print(
        f"period: of a train step, {unit}. speed: times as fast as the fastest synchronous one. idle: share of the "
        "time that the trainer is, and slots are. stale, max: staleness of groups, in versions. wasted: tokens of "
        f"groups that were dropped. {more} {question.steps} train steps; {question.warmup} before were not counted."
    )
