"""Splits the groups of a micro-batch over the trainer's ranks, balanced by tokens.

Longest first: groups by (tokens descending, sequence ascending), each to the rank with the fewest tokens so far (ties:
fewest groups, then lowest rank). The fullest rank then has at most 4/3 of the least possible maximum (R. L. Graham,
"Bounds on multiprocessing timing anomalies", 1969). With equal numbers of groups a rank that has its part takes no
more. Within a rank groups keep the order of their sequences.
Invariant: the result depends on the (sequence, tokens) pairs, the world size and `equal` only.
"""

import heapq
from collections.abc import Iterable


def shard(groups: Iterable[tuple[int, int]], world_size: int, *, equal: bool = False) -> list[list[int]]:
    """Sequences of each rank's groups; `groups` are (sequence, tokens) pairs with distinct sequences.

    equal: no rank gets more than ceil(number of groups / world_size).
    """
    longest = sorted(groups, key=lambda group: (-group[1], group[0]))
    part = -(-len(longest) // world_size) if equal else len(longest)
    ranks = [(0, 0, rank) for rank in range(world_size)]
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
