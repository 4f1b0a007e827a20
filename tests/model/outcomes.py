"""Every kind of outcome that the machine must meet, so that an agreement means something."""

from collections import Counter

from buffer_service.domain.ops import LeaseWait, PushKind, ResumeMode, ReturnOutcome
from buffer_service.domain.transitions import GroupState, TaskState

_NOT_YET = {GroupState.FORMING, GroupState.FILTERED, TaskState.CANCELLED}
"""States that no operation leads to in this version."""

EXPECTED = frozenset(
    {
        *(f"push:{kind}" for kind in PushKind),
        "retry_push:queued",
        "retry_push:blocked",
        *(f"lease:{wait}" for wait in LeaseWait),
        "lease:granted",
        "lease:repeated",
        "lease:continued",
        "extend:live",
        "extend:lost",
        *(f"give_back:{outcome}" for outcome in ReturnOutcome),
        "submit:repeated",
        "pull:assembled",
        "pull:replayed",
        "pull:resharded",
        "pull:short",
        "publish:new",
        "publish:repeated",
        "steps:freed",
        *(f"resume:{mode}" for mode in ResumeMode),
        "resume:repeated",
        "resume:regenerated",
        "resume:behind",
        "paused:store_rolled_back",
        "paused:failure_budget_exceeded",
        "paused:released",
        *(f"group:{state}" for state in GroupState if state not in _NOT_YET),
        *(f"task:{state}" for state in TaskState if state not in _NOT_YET),
        "statistic:leases_expired",
        "statistic:continuation_tokens_discarded",
        "statistic:assembled_groups_spanning_versions",
        "error:run_exists",
        "error:invalid_field",
        "error:stale_epoch",
        "error:cursor_conflict",
        "error:pending_full",
        "error:run_paused",
        "error:store_rolled_back",
        "error:failure_budget_exceeded",
        "error:step_ahead",
        "error:replay_gap",
        "error:world_size_mismatch",
        "error:version_conflict",
        "error:not_committed",
    }
)


def missing(seen: Counter[str]) -> list[str]:
    """Outcomes that no history met."""
    return sorted(name for name in EXPECTED if seen[name] == 0)
