"""Run policies by the few words that staleness depends on, as `plan` and `simulate` take them."""

from buffer_service.domain.policy import OverflowAction, RunPolicy
from buffer_service.domain.presets import fields_of
from buffer_wire.errors import InvalidField

QUEUE_DROP = "queue_drop"
QUEUE_MAX = "queue_max"
STREAMING = "streaming"


def queue_policy(
    name: str,
    groups_per_batch: int,
    *,
    queue_factor: float | None = None,
    max_staleness: int | None = None,
    micro_batch: int | None = None,
    **fields: object,
) -> RunPolicy:
    """The policy of that name, or of a preset as it is written. Raises InvalidField, InvalidPolicy.

    queue_drop: a queue of q·N groups, q = 1 unless given. queue_max: max_staleness needed; the queue is q·N groups
    where q is given, else the preset's, which is never full. streaming: micro-batches of `micro_batch` groups, N/8
    unless given, over a queue of two of them, or of q·N groups where q is given. A preset takes its own numbers.
    """
    n = groups_per_batch
    if not 1 <= n <= 65_536:
        raise InvalidField("groups_per_batch", n, "1 to 65536")
    room = None if queue_factor is None else _queued_groups(queue_factor, n)
    if name == QUEUE_DROP:
        chosen: dict[str, object] = {"max_queued_groups": room or n, "overflow_action": OverflowAction.DROP_OLDEST}
        if max_staleness is not None:
            chosen["max_staleness"] = max_staleness
    elif name == QUEUE_MAX:
        if max_staleness is None:
            raise InvalidField("max_staleness", "unset", "set for queue_max")
        chosen = fields_of(f"{QUEUE_MAX}({max_staleness})", n)
    elif name == STREAMING:
        micro = micro_batch or max(1, n // 8)
        if micro > n:
            raise InvalidField("micro_batch", micro, f"at most the {n} groups of a batch")
        chosen = fields_of(f"{STREAMING}({micro})", n)
    else:
        chosen = fields_of(name, n)
    if room is not None:
        chosen["max_queued_groups"] = room
    return RunPolicy(**{"batch_groups": n, **chosen, **fields})  # type: ignore[arg-type]


def _queued_groups(queue_factor: float, groups_per_batch: int) -> int:
    if not queue_factor > 0:
        raise InvalidField("queue_factor", queue_factor, "above 0")
    return max(1, round(queue_factor * groups_per_batch))
