"""Options of `simulate`, `lab` and `worth` as what is simulated: lengths, a workload, policies by name."""

from collections.abc import Sequence
from typing import Any

from buffer_cli.policies import applied
from buffer_cli.staleness.commands import WorkloadOptions
from buffer_cli.staleness.lengths_file import read_lengths
from buffer_service.domain.policy import RunPolicy
from buffer_service.simulator import Workload
from buffer_service.simulator.lengths import Fixed, Lengths, Lognormal
from rollout_lab.queue_policies import queue_policy


def workload_of(options: WorkloadOptions) -> Workload:
    """The workload of the options. Raises InvalidField."""
    return Workload(
        concurrency=options.concurrency,
        group_size=options.group_size,
        rho=options.rho,
        lengths=_lengths(options),
        turn_tokens=options.turn_tokens,
        turn_latency=options.turn_latency,
        reload_pause=options.reload_pause,
        publish_lag=options.publish_lag,
        groups_in_flight=options.groups_in_flight,
        surplus=options.surplus,
    )


def policy_of(name: str, groups_per_batch: int, assignments: Sequence[str] | None = None, **words: Any) -> RunPolicy:  # noqa: ANN401 - of queue_policy
    """`queue_policy` with fields of the policy set on top, each as field=value. Raises InvalidField, InvalidPolicy."""
    policy = queue_policy(name, groups_per_batch, **words)
    return applied(policy, "", assignments) if assignments else policy


def _lengths(options: WorkloadOptions) -> Lengths:
    if options.lengths:
        return read_lengths(options.lengths)
    if options.length_sigma == 0:
        return Fixed(round(options.length_mean))
    return Lognormal.with_mean(options.length_mean, options.length_sigma, options.length_cap)
