"""Ways of payloads, in words: what pushers wrote to the store themselves, and who has it relayed although it asked."""

from collections import Counter

from buffer_service.domain.ops import RunView

MAX_REASONS = 2
"""Reasons that are named; the most frequent first."""

RELAYED = {True: "pushes", False: "pulls"}
"""Calls whose payloads are relayed, by whether the client writes payloads."""


def written(view: RunView) -> str:
    """Text of how much of what was accepted so far its pushers wrote to the store themselves."""
    accepted, statistics, shards = view.groups["accepted"], view.statistics, view.payload_shards
    to = f", to a cluster of {shards} shard{'s' if shards > 1 else ''}" if shards else ""
    return (
        f"{statistics['written_groups']:,} of {accepted.groups:,} accepted groups, "
        f"{statistics['written_bytes']:,} of {accepted.bytes:,} bytes{to}"
    )


def relaying(view: RunView) -> dict[str, str]:
    """Text for each of RELAYED that some client has relayed."""
    said = {}
    for writes, what in RELAYED.items():
        reasons = Counter(client.why for client in view.relaying if client.writes is writes)
        if reasons:
            named = [f"{why} ({count})" for why, count in reasons.most_common(MAX_REASONS)]
            others = [f"{len(reasons) - MAX_REASONS} other reasons"] if len(reasons) > MAX_REASONS else []
            clients = reasons.total()
            said[what] = f"{clients} client{'s' if clients > 1 else ''}: {'; '.join(named + others)}"
    return said
