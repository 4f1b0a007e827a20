"""Options of `simulate`, `lab` and `worth` as what is simulated: lengths, a workload, policies by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from buffer_cli.policies import applied
from buffer_cli.staleness.lengths_file import read_lengths
from buffer_service.domain.policy import RunPolicy
from rollout_lab.lengths import Fixed, Lengths, Lognormal
from rollout_lab.queue_policies import queue_policy
from rollout_lab.simulator import Workload


def workload_of(given: Mapping[str, Any]) -> Workload:
    """The workload of the options. Raises InvalidField."""
    return Workload(
        concurrency=given["concurrency"],
        group_size=given["group_size"],
        rho=given["rho"],
        lengths=_lengths(given),
        turn_tokens=given["turn_tokens"],
        turn_latency=given["turn_latency"],
        reload_pause=given["reload_pause"],
        publish_lag=given["publish_lag"],
        groups_in_flight=given["groups_in_flight"],
    )


def policy_of(name: str, groups_per_batch: int, assignments: Sequence[str] | None = None, **words: Any) -> RunPolicy:  # noqa: ANN401 - of queue_policy
    """`queue_policy` with fields of the policy set on top, each as field=value. Raises InvalidField, InvalidPolicy."""
    policy = queue_policy(name, groups_per_batch, **words)
    return applied(policy, "", assignments) if assignments else policy


def _lengths(given: Mapping[str, Any]) -> Lengths:
    if given["lengths"]:
        return read_lengths(given["lengths"])
    if given["length_sigma"] == 0:
        return Fixed(round(given["length_mean"]))
    return Lognormal.with_mean(given["length_mean"], given["length_sigma"], given["length_cap"])
