"""Many simulations at once, on processes of their own; results come in the order of what was asked."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


def in_processes(
    work: Callable[[_Asked], _Found],
    asked: Sequence[_Asked],
    *,
    processes: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[_Found]:
    """`work` of each. `processes` None: one per core; 1: in this process. `done` is told how many are, as they end.

    Raises what `work` raises.
    """
    count = min(processes or os.cpu_count() or 1, len(asked))
    if count <= 1:
        results = []
        for one in asked:
            results.append(work(one))
            if done is not None:
                done(len(results))
        return results
    # Spawned, not forked: whoever shows progress meanwhile has threads.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, one) for one in asked]
        for finished, future in enumerate(as_completed(futures), start=1):
            future.result()
            if done is not None:
                done(finished)
        return [future.result() for future in futures]
