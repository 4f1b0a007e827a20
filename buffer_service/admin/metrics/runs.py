"""State of the runs as Prometheus metrics, read from the store once per scrape; labels: run, and small fixed sets."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from buffer_service.domain.ops import EngineReport, RunView
from buffer_service.domain.policy import UNSET
from buffer_service.observability.diagnosis import SILENT_MS
from buffer_service.observability.filters import filtered, recent_acceptance, starved
from buffer_service.observability.ledgers import UNITS, groups_balanced, tasks_balanced
from buffer_service.observability.relaying import RELAYED
from buffer_service.rules.statistics import STATISTICS
from buffer_service.rules.totals import RELOAD_PHASES

_HELD = ("queued", "forming", "delivered")
"""Dispositions of groups that count towards a quota."""

_STATISTICS = {
    **{name: (each.metric, each.text) for name, each in STATISTICS.items() if each.metric},
    "staleness_sum": ("staleness_versions", "Train version minus head version, over assembled groups."),
    "pre_queue_staleness_sum": (
        "pre_queue_staleness_versions",
        "Tail version minus head version, over assembled groups.",
    ),
    "in_queue_staleness_sum": (
        "in_queue_staleness_versions",
        "Train version minus tail version, over assembled groups.",
    ),
    "assembled_groups": ("assembled_groups", "Groups of assembled steps."),
}

_PROGRESS = {
    "term": ("term", "Fencing number of the trainer."),
    "next_step": ("next_step", "Steps below this one are assembled."),
    "committed_steps": ("committed_steps", "Steps below this one are trained."),
    "checkpointed_steps": ("checkpointed_steps", "Steps below this one are freed."),
    "world_size": ("world_size_ranks", "Ranks of the trainer, 0 before its first pull."),
    "revision": ("revision", "Counts changes of the run."),
    "awaited": ("awaited_groups", "Groups in flight that the trainer's pull waits for although enough are queued."),
}


_WORK = {
    "starts": "Leases given of the environment's tasks, without evaluations.",
    "failed_attempts": "Leases of them that ended in an error, or expired: errors of infrastructure.",
    "failed_tasks": "Tasks that failed for good.",
    "failed_samples": "Samples of accepted groups with a named failure: errors of the policy.",
}

_STAGES = {
    "added": ("added", 1, "Groups that the stage has added columns to."),
    "failed": ("failed", 1, "Leases of groups in the stage that failed, or expired."),
    "passed_over": ("passed_over", 1, "Groups that left the stage without columns: the policy named it no more."),
    "added_bytes": ("added_bytes", 1, "Bytes of the columns that the stage has added."),
    "busy_seconds": ("busy_ms", 1_000, "Time from lease to columns, summed over groups."),
}

_SAMPLES = {
    "moved_samples": ("engine_moved_samples", "Samples that another engine of their worker took over."),
    "surplus_samples": ("engine_surplus_samples", "Samples beyond their group's size that were cut off."),
    "surplus_tokens": ("engine_surplus_tokens", "Tokens of samples beyond their group's size that were cut off."),
}


class RunCollector(Collector):
    """Metrics of views that were read before: collecting does no I/O."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = views

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metric families of runs."""
        yield from self._ledgers()
        yield from self._uses()
        yield from self._environments()
        yield from self._work()
        yield from self._stages()
        yield from self._queues()
        yield from self._filters()
        yield from self._progress()
        yield from self._statistics()
        yield from self._engines()
        yield from self._samples()
        yield from self._reloads()
        yield self._relaying()

    def _ledgers(self) -> Iterator[GaugeMetricFamily]:
        for unit in UNITS:
            family = GaugeMetricFamily(
                f"rollout_buffer_ledger_{unit}",
                f"Accepted groups by what became of them, in {unit}; accepted is the sum of the others.",
                labels=["run", "disposition"],
            )
            for view in self._views:
                for disposition, amount in view.groups.items():
                    family.add_metric([view.run_id, disposition], getattr(amount, unit))
            yield family
        tasks = GaugeMetricFamily(
            "rollout_buffer_tasks", "Tasks by state; submitted is the sum of the others.", labels=["run", "state"]
        )
        for view in self._views:
            for state, count in view.tasks.items():
                tasks.add_metric([view.run_id, state], count)
        yield tasks
        balance = GaugeMetricFamily(
            "rollout_buffer_ledger_balanced",
            "1 where a ledger adds up: what was accepted (submitted) is the sum of what became of it.",
            labels=["run", "ledger"],
        )
        for view in self._views:
            balance.add_metric([view.run_id, "groups"], groups_balanced(view))
            balance.add_metric([view.run_id, "tasks"], tasks_balanced(view))
            balance.add_metric([view.run_id, "uses"], view.reuse.balanced)
        yield balance

    def _uses(self) -> Iterator[GaugeMetricFamily]:
        uses = GaugeMetricFamily(
            "rollout_buffer_group_uses",
            "Uses of groups beyond their own steps (max_uses) by state; drawn is the sum of the others.",
            labels=["run", "state"],
        )
        reusable = GaugeMetricFamily(
            "rollout_buffer_reusable_groups", "Trained groups that later steps may use again.", labels=["run"]
        )
        for view in self._views:
            for state in ("drawn", "delivered", "trained", "given_back", "lost"):
                uses.add_metric([view.run_id, state], getattr(view.reuse, state))
            reusable.add_metric([view.run_id], view.reuse.reusable_groups)
        yield uses
        yield reusable

    def _environments(self) -> Iterator[GaugeMetricFamily]:
        for unit in UNITS:
            family = GaugeMetricFamily(
                f"rollout_buffer_environment_{unit}",
                f"Accepted groups of each environment by what became of them, in {unit}.",
                labels=["run", "environment", "disposition"],
            )
            for view in self._views:
                for environment, ledger in view.environments.items():
                    for disposition, amount in ledger.items():
                        family.add_metric([view.run_id, environment, disposition], getattr(amount, unit))
            yield family

    def _work(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, text in _WORK.items():
            family = CounterMetricFamily(f"rollout_buffer_environment_{name}", text, labels=["run", "environment"])
            for view in self._views:
                for work in view.environment_work:
                    family.add_metric([view.run_id, work.environment], getattr(work, name))
            yield family
        wait = GaugeMetricFamily(
            "rollout_buffer_environment_start_wait_seconds",
            "Time until the environment's starts_per_minute allow the next lease; 0 where they do.",
            labels=["run", "environment"],
        )
        for view in self._views:
            for work in view.environment_work:
                wait.add_metric([view.run_id, work.environment], work.limited_for_ms / 1_000)
        yield wait

    def _stages(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        groups = GaugeMetricFamily(
            "rollout_buffer_stage_groups",
            "Queued groups in a stage of the policy: waiting for a worker of it, or held by one.",
            labels=["run", "stage_name", "state"],
        )
        families = [
            CounterMetricFamily(f"rollout_buffer_stage_{name}", text, labels=["run", "stage_name"])
            for name, (_, _, text) in _STAGES.items()
        ]
        for view in self._views:
            for one in view.stages:
                groups.add_metric([view.run_id, one.name, "waiting"], one.waiting)
                groups.add_metric([view.run_id, one.name, "held"], one.leased)
                for family, (field, unit, _) in zip(families, _STAGES.values(), strict=True):
                    family.add_metric([view.run_id, one.name], getattr(one, field) / unit)
        yield groups
        yield from families

    def _queues(self) -> Iterator[GaugeMetricFamily]:
        limits = {
            "groups": "max_queued_groups",
            "tokens": "max_queued_tokens",
            "bytes": "max_queued_bytes",
        }
        for unit, limit in limits.items():
            depth = self._gauge(f"queue_{unit}", f"Queued {unit}.")
            cap = self._gauge(f"queue_limit_{unit}", f"Cap on queued {unit}; absent where there is none.")
            held = self._gauge(f"quota_used_{unit}", f"Queued, forming and delivered {unit}.")
            quota = self._gauge(f"quota_limit_{unit}", f"Quota of {unit}; absent where there is none.")
            for view in self._views:
                amounts = [view.groups[state] for state in _HELD]
                held.add_metric([view.run_id], sum(getattr(amount, unit) for amount in amounts))
                if getattr(view.policy, f"quota_{unit}"):
                    quota.add_metric([view.run_id], getattr(view.policy, f"quota_{unit}"))
                depth.add_metric([view.run_id], getattr(view.groups["queued"], unit))
                if getattr(view.policy, limit):
                    cap.add_metric([view.run_id], getattr(view.policy, limit))
            yield from (depth, cap, held, quota)
        batch = self._gauge("batch_groups", "Groups of a batch.")
        blobs = self._gauge("blob_bytes", "Bytes of the run's blobs, as images of prompts.")
        most = self._gauge("blob_limit_bytes", "Bytes that the blobs of a run may have together.")
        for view in self._views:
            batch.add_metric([view.run_id], view.policy.batch_groups)
            blobs.add_metric([view.run_id], view.blob_bytes)
            most.add_metric([view.run_id], view.max_blob_bytes)
        yield from (batch, blobs, most)

    def _filters(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        groups = CounterMetricFamily(
            "rollout_buffer_filtered_groups", "Groups filtered by the policy, by reason.", labels=["run", "reason"]
        )
        passing = self._gauge("recent_acceptance_ratio", "Share of the recent groups that pass the filter.")
        alarm = self._gauge("filter_starves", "1 where fewer of the recent groups pass than min_acceptance_milli.")
        for view in self._views:
            for reason, count in filtered(view).items():
                groups.add_metric([view.run_id, reason], count)
            passing.add_metric([view.run_id], recent_acceptance(view))
            alarm.add_metric([view.run_id], starved(view))
        yield from (groups, passing, alarm)

    def _progress(self) -> Iterator[GaugeMetricFamily]:
        for attribute, (name, text) in _PROGRESS.items():
            family = self._gauge(name, text)
            for view in self._views:
                family.add_metric([view.run_id], getattr(view, attribute))
            yield family
        published = self._gauge("published_version", "The published weight version.")
        paused = GaugeMetricFamily(
            "rollout_buffer_paused", "1 where the run is paused, by reason.", labels=["run", "reason"]
        )
        draining = self._gauge("draining", "1 where the run is being drained.")
        limit = self._gauge("staleness_limit_versions", "The gate's max_staleness; absent where there is none.")
        worst = self._gauge("staleness_max_versions", "Largest staleness of an assembled group so far.")
        for view in self._views:
            published.add_metric([view.run_id], view.published.version)
            if view.paused:
                paused.add_metric([view.run_id, view.paused], 1)
            draining.add_metric([view.run_id], view.draining)
            if view.policy.max_staleness != UNSET:
                limit.add_metric([view.run_id], view.policy.max_staleness)
            worst.add_metric([view.run_id], view.statistics["staleness_max"])
        yield from (published, paused, draining, limit, worst)

    def _statistics(self) -> Iterator[CounterMetricFamily]:
        for key, (name, text) in _STATISTICS.items():
            family = CounterMetricFamily(f"rollout_buffer_{name}", text, labels=["run"])
            for view in self._views:
                family.add_metric([view.run_id], view.statistics[key])
            yield family

    def _engines(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        states = GaugeMetricFamily(
            "rollout_buffer_engines",
            "Engines by state; silent: not heard of for a minute, whatever they said before, unless they stopped.",
            labels=["run", "state"],
        )
        lag = self._gauge("engine_lag_max_versions", "Published version minus the oldest loaded by a ready engine.")
        silent = self._gauge("engine_silent_max_seconds", "Longest silence of an engine that has not stopped.")
        longest = self._gauge("engine_last_reload_max_seconds", "Longest last reload of an engine, pause to continue.")
        mean = self._gauge("engine_last_reload_mean_seconds", "Mean last reload of the engines, pause to continue.")
        reloads = CounterMetricFamily("rollout_buffer_engine_reloads", "Successful reloads.", labels=["run"])
        errors = CounterMetricFamily("rollout_buffer_engine_errors", "Errors of engines.", labels=["run"])
        for view in self._views:
            for state, count in sorted(Counter(map(_state, view.engines)).items()):
                states.add_metric([view.run_id, state], count)
            heard = [engine for engine in view.engines if engine.silent_ms < SILENT_MS]
            ready = [engine.loaded.version for engine in heard if engine.state == "ready"]
            if ready:
                lag.add_metric([view.run_id], max(0, view.published.version - min(ready)))
            silences = [engine.silent_ms for engine in view.engines if engine.state != "stopped"]
            if silences:
                silent.add_metric([view.run_id], max(silences) / 1000)
            took = [engine.last_reload_ms / 1000 for engine in heard if engine.reloads]
            if took:
                longest.add_metric([view.run_id], max(took))
                mean.add_metric([view.run_id], sum(took) / len(took))
            reloads.add_metric([view.run_id], sum(engine.reloads for engine in view.engines))
            errors.add_metric([view.run_id], sum(engine.errors for engine in view.engines))
        yield from (states, lag, silent, longest, mean, reloads, errors)

    def _samples(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        running = self._gauge("engine_samples", "Samples that run on engines.")
        most = self._gauge("engine_samples_limit", "Samples that workers let run on their engines at once.")
        usage = self._gauge("engine_kv_usage_max_ratio", "Largest part of an engine's KV cache in use.")
        for view in self._views:
            heard = [engine for engine in view.engines if _state(engine) not in ("silent", "stopped")]
            running.add_metric([view.run_id], sum(engine.running_samples for engine in heard))
            most.add_metric([view.run_id], sum(engine.max_running_samples for engine in heard))
            if heard:
                usage.add_metric([view.run_id], max(engine.kv_usage_milli for engine in heard) / 1000)
        yield from (running, most, usage)
        for attribute, (name, text) in _SAMPLES.items():
            family = CounterMetricFamily(f"rollout_buffer_{name}", text, labels=["run"])
            for view in self._views:
                family.add_metric([view.run_id], sum(getattr(engine, attribute) for engine in view.engines))
            yield family

    def _reloads(self) -> Iterator[CounterMetricFamily]:
        labels = ["run", "phase"]
        ended = CounterMetricFamily(
            "rollout_buffer_reloads", "Phases of engines' reloads that ended, failed attempts included.", labels=labels
        )
        seconds = CounterMetricFamily(
            "rollout_buffer_reload_seconds", "Time that engines spent in phases of their reloads.", labels=labels
        )
        for view in self._views:
            for index, phase in enumerate(RELOAD_PHASES):
                count, time_ms = view.reload_counters[2 * index : 2 * index + 2]
                ended.add_metric([view.run_id, phase], count)
                seconds.add_metric([view.run_id, phase], time_ms / 1000)
        yield from (ended, seconds)

    def _relaying(self) -> GaugeMetricFamily:
        clients = GaugeMetricFamily(
            "rollout_buffer_relaying_clients",
            "Clients, at most 64 of a run, that asked for access to the store in an hour and have payloads relayed.",
            labels=["run", "of"],
        )
        for view in self._views:
            for writes, what in RELAYED.items():
                clients.add_metric([view.run_id, what], sum(client.writes is writes for client in view.relaying))
        return clients

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"rollout_buffer_{name}", text, labels=["run"])


def _state(engine: EngineReport) -> str:
    return "silent" if engine.silent_ms >= SILENT_MS and engine.state != "stopped" else engine.state
