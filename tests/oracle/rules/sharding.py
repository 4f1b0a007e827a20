"""Splits the groups of a micro-batch over the trainer's ranks, balanced by tokens.

Longest first: groups by (tokens descending, sequence ascending), each to the rank with the fewest tokens so far (ties:
fewest groups, then lowest rank). The fullest rank then has at most 4/3 of the least possible maximum (R. L. Graham,
"Bounds on multiprocessing timing anomalies", 1969). With equal numbers of groups a rank that has its part takes no
more. Within a rank groups keep the order of their sequences.
Invariant: the result depends on the (sequence, tokens) pairs, the world size, `equal` and `loads` only.
"""

import heapq
from collections.abc import Iterable, Sequence


def shard(
    groups: Iterable[tuple[int, int]],
    world_size: int,
    *,
    equal: bool = False,
    loads: Sequence[tuple[int, int]] | None = None,
) -> list[list[int]]:
    """Sequences of each rank's groups; `groups` are (sequence, tokens) pairs with distinct sequences.

    loads: (tokens, groups) that each rank has before, which count. equal: no rank then has more than
    ceil(number of all groups / world_size).
    """
    longest = sorted(groups, key=lambda group: (-group[1], group[0]))
    before = loads or [(0, 0)] * world_size
    all_groups = len(longest) + sum(held for _, held in before)
    part = -(-all_groups // world_size) if equal else all_groups + 1
    ranks = sorted((tokens, held, rank) for rank, (tokens, held) in enumerate(before) if held < part)
    shards: list[list[int]] = [[] for _ in range(world_size)]
    for sequence, tokens in longest:
        rank_tokens, rank_groups, rank = ranks[0]
        shards[rank].append(sequence)
        if rank_groups + 1 < part:
            heapq.heapreplace(ranks, (rank_tokens + tokens, rank_groups + 1, rank))
        else:
            heapq.heappop(ranks)
    for sequences in shards:
        sequences.sort()
    return shards
