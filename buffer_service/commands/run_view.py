"""Decoding of a run's view."""

from collections.abc import Iterator
from typing import Any

from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.command import Fields
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.steering.decisions import NO_DECISION, Decision, Outcome
from buffer_service.domain.steering.knobs import Knobs
from buffer_service.domain.window import Snapshot, Window, no_staleness
from buffer_service.rules.totals import (
    ENGINE_SAMPLES,
    LENGTH_BUCKETS,
    OF_ENVIRONMENT,
    RELOAD_PHASES,
    STALENESS_BOUNDS,
    STALENESS_COUNTED,
    TOTALS,
)
from buffer_service.rules.transitions import GroupState
from buffer_wire import limits

RELAYING_MS = 3_600_000
"""Time after which a client that relays is forgotten, unless it asks for access again."""


def _strings(mapping: Any) -> dict[str, Any]:  # noqa: ANN401 - Lua cannot tell an empty map from an empty array
    return {text(key): value for key, value in dict(mapping).items()}


def _amounts(packed: Any) -> dict[str, ops.Amount]:  # noqa: ANN401
    return {name: ops.Amount(*amount) for name, amount in _strings(packed).items()}


def as_policy(packed: Any) -> RunPolicy:  # noqa: ANN401
    """The policy of a reply."""
    values = _strings(packed)
    values["environments"] = [(text(name), *rule) for name, *rule in values.get("environments", ())]
    values["stages"] = list(map(text, values.get("stages", ())))
    return RunPolicy.from_store({k: text(v) if isinstance(v, bytes) else v for k, v in values.items()})


def as_decision(packed: bytes) -> Decision:
    """The controller's last decision; NO_DECISION for ''."""
    if not packed:
        return NO_DECISION
    version, moved_at, moves, pace_milli, target_milli, by_token, outcome, *rest = unpack(packed)
    measured_milli, reason, *lowered = rest
    micro_batch_groups, max_queued_groups, lookahead_milli, max_inflight_groups = lowered
    return Decision(
        version=version,
        moved_at=moved_at,
        moves=moves,
        pace_milli=pace_milli,
        target_milli=target_milli,
        by_token=bool(by_token),
        outcome=Outcome(text(outcome)),
        measured_milli=measured_milli,
        reason=text(reason),
        knobs=Knobs(
            micro_batch_groups=micro_batch_groups,
            max_queued_groups=max_queued_groups,
            lookahead_milli=lookahead_milli,
            max_inflight_groups=max_inflight_groups,
        ),
    )


def unpack_view(run_id: str, fields: Fields) -> ops.RunView:
    """The reply of `view`."""
    policy, packed_state, packed_ledger, queued, forming, delivered, *fields = fields
    pending, leased, environments, engines, heard, now, failures, *fields = fields
    totals, response_lengths, counters, *fields, decision, stages, work, reusable, blob_bytes = fields
    *window, staleness, reloads, waited, relaying, came_from, samples = fields
    heard_ms = {engine_id: int(ms) for engine_id, ms in _pairs(heard)}
    counted = {engine_id: unpack(packed) for engine_id, packed in _pairs(counters)}
    weights_from, engine_samples = dict(_pairs(came_from)), dict(_pairs(samples))
    awaited, awaited_task = _awaited(waited, _strings(packed_state)["next_step"], as_policy(policy), now)
    ledgers = {text(name): unpack(packed) for name, packed in _pairs(environments)}
    # Those that came with a task alone have no ledger, and an accepted group has counted.
    environment_totals = {name: entries.pop(b"totals") for name, entries in ledgers.items()}
    state, ledger = _strings(packed_state), _strings(packed_ledger)
    # A run of an earlier version lacks the later states.
    groups = dict.fromkeys(("accepted", *GroupState), ops.Amount()) | _amounts(ledger["groups"])
    tasks = _strings(ledger["tasks"])
    return ops.RunView(
        run_id=run_id,
        policy=as_policy(policy),
        revision=state["revision"],
        created_ms=state["created_ms"],
        term=state["term"],
        published=ops.WeightVersion(state["term"], state["version"]),
        next_step=state["next_step"],
        committed_steps=state["committed_steps"],
        published_steps=state["published_steps"],
        checkpointed_steps=state["checkpointed_steps"],
        world_size=state["world_size"],
        reuse=ops.ReuseLedger(reusable, **_strings(ledger.get("uses", ()))),
        missing_groups=state.get("missing", 0),
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
            _engine(
                report,
                now - heard_ms[report[0]],
                weights_from.get(report[0], b""),
                engine_samples.get(report[0]),
                *counted[report[0]],
            )
            for report in sorted(map(unpack, engines))  # By their ids, which come first.
        ],
        failures=[_failure(*unpack(failure)) for failure in failures],
        window=_window(*window),
        response_lengths=_histogram(response_lengths),
        staleness_counts=_staleness_counts(staleness),
        reload_counters=unpack(reloads) if reloads else (0,) * (2 * len(RELOAD_PHASES)),
        relaying=_relaying(relaying, now),
        awaited=awaited,
        awaited_task=awaited_task,
        decision=as_decision(decision),
        stages=[_stage(now, *stage) for stage in stages],
        environment_work=sorted(
            (ops.EnvironmentWork(text(name), *counts) for name, counts in _pairs(work)),
            key=lambda each: each.environment,
        ),
        environment_statistics={
            name: dict(zip(OF_ENVIRONMENT, values, strict=True)) for name, values in environment_totals.items()
        },
        blob_bytes=blob_bytes,
        max_blob_bytes=limits.MAX_BLOBS_BYTES,
    )


def _awaited(packed: bytes, next_step: int, policy: RunPolicy, now: int) -> tuple[int, str]:
    """Groups in flight that a pull of that step waits for, as it has said lately, and the first task of them."""
    if not packed:
        return 0, ""
    step, since, count, first, last = unpack(packed)
    waits = step == next_step and now - last <= ops.AWAITED_MS and last - since < policy.stale_wait_ms
    return (count, text(first)) if waits else (0, "")


def _relaying(flat: Any, now: int) -> list[ops.RelayingClient]:  # noqa: ANN401
    clients = []
    for client, packed in _pairs(flat):
        (heard_ms, why), (direction, _, client_id) = unpack(packed), text(client).partition(" ")
        if now - heard_ms <= RELAYING_MS:
            clients.append(ops.RelayingClient(client_id, direction == ops.Direction.WRITE, text(why), now - heard_ms))
    return sorted(clients, key=lambda client: (client.client_id, client.writes))


def _pairs(flat: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    return zip(flat[::2], flat[1::2], strict=True)


def _window(snapshots: int, first: bytes, last: bytes) -> Window | None:
    return Window(as_snapshot(first), as_snapshot(last), snapshots - 1) if snapshots > 1 else None


def as_snapshot(packed: bytes) -> Snapshot:
    """Totals at a publish."""
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


def _engine(
    fields: Fields, silent_ms: int, weights_from: bytes, samples: bytes | None, *decoded: int
) -> ops.EngineReport:
    """An engine's report with what is kept beside it."""
    engine_id, worker_id, state, term, version, reloads, last_reload_ms, last_error, errors, *fields = fields
    membership, prepared_term, prepared_version, weights_url = fields
    tokens, busy_ms, request_ms = decoded
    return ops.EngineReport(
        engine_id=text(engine_id),
        worker_id=text(worker_id),
        state=text(state),
        loaded=ops.WeightVersion(term, version),
        reloads=reloads,
        last_reload_ms=last_reload_ms,
        last_error=text(last_error),
        errors=errors,
        membership=membership,
        prepared=ops.WeightVersion(prepared_term, prepared_version) if prepared_term else None,
        weights_url=text(weights_url),
        weights_from=text(weights_from),
        decoded_tokens=tokens,
        decode_busy_ms=busy_ms,
        decode_request_ms=request_ms,
        silent_ms=silent_ms,
        **(dict(zip(ENGINE_SAMPLES, unpack(samples), strict=True)) if samples else {}),
    )


def _stage(now: int, name: bytes, waiting: int, leased: int, *noted: int) -> ops.StageState:
    added, failed, busy_ms, asked, passed_over, added_bytes = noted
    asked_ms = now - asked if asked >= 0 else None
    return ops.StageState(text(name), waiting, leased, added, failed, busy_ms, asked_ms, passed_over, added_bytes)


def _failure(task_id: bytes, attempts: int, error: bytes, time_ms: int) -> ops.TaskFailure:
    return ops.TaskFailure(text(task_id), attempts, text(error), time_ms)
