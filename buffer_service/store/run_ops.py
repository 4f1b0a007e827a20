"""Operations on runs as a whole: create, view, policy, engines."""

from collections.abc import Iterator
from typing import Any, cast

from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.window import Snapshot, Window, no_staleness
from buffer_service.rules.totals import (
    LENGTH_BUCKETS,
    OF_ENVIRONMENT,
    RELOAD_PHASES,
    STALENESS_BOUNDS,
    STALENESS_COUNTED,
    TOTALS,
)
from buffer_service.store.group_ops import GroupOps
from buffer_service.store.keys import RUNS, new_secret
from buffer_service.store.replies import Fields, pack, text, unpack
from buffer_service.store.suitability import check_layout
from buffer_wire.errors import RunExists
from buffer_wire.revision import NO_REVISION, Revision


class RunOps(GroupOps):
    """Create, view, update, engines."""

    async def create_run(
        self, run_id: str, policy: RunPolicy, *, revision: int = 1, secret: str = ""
    ) -> tuple[ops.RunView, bool]:
        """See domain.ports.RunStore.create_run."""
        # The script sees the layout of the run alone, which is ours.
        await check_layout(self._connection)
        await self._connection.command("SADD", RUNS, run_id)
        tag, fields = await self._call("create_run", run_id, pack(policy.to_store(), revision, secret or new_secret()))
        # A sweep may have taken a run of that name off the list before this one was there.
        await self._connection.command("SADD", RUNS, run_id)
        self._known.add(run_id)
        if tag == "exists":
            existing = as_policy(fields[0]).to_store()
            differs = sorted(name for name, value in policy.to_store().items() if existing[name] != value)
            if differs:
                raise RunExists(run_id, ",".join(differs))
        return await self.view(run_id), tag == "created"

    async def view(self, run_id: str) -> ops.RunView:
        """See domain.ports.RunStore.view."""
        _, fields = await self._call("view", run_id, pack())
        return _view(run_id, fields)

    async def update_policy(
        self,
        run_id: str,
        policy: RunPolicy,
        expected: RunPolicy | None = None,
        *,
        seen_revision: Revision = NO_REVISION,
    ) -> Revision:
        """See domain.ports.RunStore.update_policy."""
        packed = pack(seen_revision, policy.to_store(), expected and expected.to_store())
        _, (revision,) = await self._call("update_policy", run_id, packed)
        return cast("Revision", revision)

    async def report_engine(
        self, run_id: str, report: ops.EngineReport, *, seen_revision: Revision = NO_REVISION
    ) -> ops.EngineReported:
        """See domain.ports.RunStore.report_engine."""
        prepared = report.prepared or ops.WeightVersion()
        packed = pack(
            report.engine_id,
            report.worker_id,
            report.state,
            report.loaded.epoch,
            report.loaded.version,
            report.reloads,
            report.last_reload_ms,
            report.last_error,
            report.errors,
            report.membership,
            prepared.epoch,
            prepared.version,
            report.weights_url,
        )
        reloads = list(report.reload_counters)
        counters = (report.decoded_tokens, report.decode_busy_ms, report.decode_request_ms)
        arguments = pack(
            seen_revision, report.engine_id, packed, report.state, int(report.wants_load), *counters, reloads
        )
        _, (revision, epoch, version, may_load) = await self._call("report_engine", run_id, arguments)
        return ops.EngineReported(revision, ops.WeightVersion(epoch, version), bool(may_load))


def _strings(mapping: Any) -> dict[str, Any]:  # noqa: ANN401 - Lua cannot tell an empty map from an empty array
    return {text(key): value for key, value in dict(mapping).items()}


def _amounts(packed: Any) -> dict[str, ops.Amount]:  # noqa: ANN401
    return {name: ops.Amount(*amount) for name, amount in _strings(packed).items()}


def as_policy(packed: Any) -> RunPolicy:  # noqa: ANN401
    """The policy of a reply."""
    values = _strings(packed)
    values["environments"] = [(text(name), share, priority) for name, share, priority in values.get("environments", ())]
    return RunPolicy.from_store({k: text(v) if isinstance(v, bytes) else v for k, v in values.items()})


def _view(run_id: str, fields: Fields) -> ops.RunView:
    policy, packed_state, packed_ledger, queued, forming, delivered, *fields = fields
    pending, leased, environments, engines, heard, now, failures, *fields = fields
    totals, response_lengths, counters, *window, staleness, reloads = fields
    heard_ms = {engine_id: int(ms) for engine_id, ms in _pairs(heard)}
    counted = {engine_id: unpack(packed) for engine_id, packed in _pairs(counters)}
    ledgers = {text(name): unpack(packed) for name, packed in _pairs(environments)}
    # Those that came with a task alone have no ledger, and an accepted group has counted.
    environment_totals = {name: entries.pop(b"totals") for name, entries in ledgers.items()}
    state, ledger = _strings(packed_state), _strings(packed_ledger)
    groups = _amounts(ledger["groups"])
    tasks = _strings(ledger["tasks"])
    return ops.RunView(
        run_id=run_id,
        policy=as_policy(policy),
        revision=state["revision"],
        created_ms=state["created_ms"],
        epoch=state["epoch"],
        published=ops.WeightVersion(state["epoch"], state["version"]),
        next_step=state["next_step"],
        committed_steps=state["committed_steps"],
        published_steps=state["published_steps"],
        checkpointed_steps=state["checkpointed_steps"],
        world_size=state["world_size"],
        cursor=state["cursor"],
        paused=text(state["paused"]),
        draining=state["draining"],
        # Counted from what exists, in place of the counters.
        groups=groups
        | {
            "queued": ops.Amount(*queued),
            "forming": ops.Amount(*forming),
            "delivered": ops.Amount(*delivered),
        },
        environments={
            name: dict.fromkeys(groups, ops.Amount()) | _amounts(entries) for name, entries in ledgers.items()
        },
        tasks=tasks | {"pending": pending, "leased": leased},
        statistics=_strings(ledger["statistics"]) | dict(zip(TOTALS, totals, strict=True)),
        engines=[
            _engine(report, now - heard_ms[report[0]], *counted[report[0]])
            for report in sorted(map(unpack, engines))  # By their ids, which come first.
        ],
        failures=[_failure(*unpack(failure)) for failure in failures],
        window=_window(*window),
        response_lengths=_histogram(response_lengths),
        staleness_counts=_staleness_counts(staleness),
        reload_counters=unpack(reloads) if reloads else (0,) * (2 * len(RELOAD_PHASES)),
        environment_statistics={
            name: dict(zip(OF_ENVIRONMENT, values, strict=True)) for name, values in environment_totals.items()
        },
    )


def _pairs(flat: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    return zip(flat[::2], flat[1::2], strict=True)


def _window(snapshots: int, first: bytes, last: bytes) -> Window | None:
    return Window(_snapshot(first), _snapshot(last), snapshots - 1) if snapshots > 1 else None


def _snapshot(packed: bytes) -> Snapshot:
    time_ms, version, *totals = unpack(packed)
    return Snapshot(time_ms, version, dict(zip(TOTALS, totals, strict=True)))


def _histogram(counts: Any) -> list[int]:  # noqa: ANN401
    histogram = [0] * LENGTH_BUCKETS
    for bucket, samples in _pairs(counts):
        histogram[int(bucket)] = int(samples)
    return histogram


def _staleness_counts(packed: bytes) -> dict[str, list[int]]:
    if not packed:
        return no_staleness()
    counts, buckets = unpack(packed), len(STALENESS_BOUNDS) + 1
    return {name: counts[i * buckets : (i + 1) * buckets] for i, name in enumerate(STALENESS_COUNTED)}


def _engine(fields: Fields, silent_ms: int, tokens: int, busy_ms: int, request_ms: int) -> ops.EngineReport:
    """An engine's report with what is kept beside it."""
    engine_id, worker_id, state, epoch, version, reloads, last_reload_ms, last_error, errors, *fields = fields
    membership, prepared_epoch, prepared_version, weights_url = fields
    return ops.EngineReport(
        engine_id=text(engine_id),
        worker_id=text(worker_id),
        state=text(state),
        loaded=ops.WeightVersion(epoch, version),
        reloads=reloads,
        last_reload_ms=last_reload_ms,
        last_error=text(last_error),
        errors=errors,
        membership=membership,
        prepared=ops.WeightVersion(prepared_epoch, prepared_version) if prepared_epoch else None,
        weights_url=text(weights_url),
        decoded_tokens=tokens,
        decode_busy_ms=busy_ms,
        decode_request_ms=request_ms,
        silent_ms=silent_ms,
    )


def _failure(task_id: bytes, attempts: int, error: bytes, time_ms: int) -> ops.TaskFailure:
    return ops.TaskFailure(text(task_id), attempts, text(error), time_ms)
