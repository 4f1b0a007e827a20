"""The queue that teams roll by hand: XADD and XREADGROUP of pickled groups with redis-py and hiredis.

One XADD a group, as a worker does when a group is done. A producer that holds groups back and sends a pipeline of them
is faster with small groups; it is measured too (`pipelined`).

The producer pickles a dict of arrays, the consumer unpickles it, acknowledges and deletes. No policy, no staleness,
no exactly-once: the comparison is with the least anybody could write.
"""

import pickle
from typing import Any

from bench import workload
from bench.roles import Handler

_STREAM, _GROUP = "bench:stream", "trainers"


def producer(unix_socket: str) -> dict[str, Handler]:
    """Commands `produce` and `produce_pipelined`: XADD every group of a size."""
    import redis

    client = redis.Redis(unix_socket_path=unix_socket)

    def produce(size: workload.Size, *, pipelined: bool) -> None:
        token_ids, logprobs, loss_mask = workload.arrays(size)
        bundle = size.bundle if pipelined else 1
        for first in range(0, size.groups, bundle):
            pipeline: Any = client.pipeline(transaction=False) if pipelined else client
            for i in range(first, min(first + bundle, size.groups)):
                group = {
                    "task_id": f"t{i}",
                    "version": 0,
                    "rewards": [1.0] * workload.SAMPLES,
                    "token_ids": token_ids,
                    "logprobs": logprobs,
                    "loss_mask": loss_mask,
                }
                pipeline.xadd(_STREAM, {"group": pickle.dumps(group, protocol=5)})
            if pipelined:
                pipeline.execute()

    return {
        "produce": lambda size: produce(size, pipelined=False),
        "produce_pipelined": lambda size: produce(size, pipelined=True),
    }


def consumer(unix_socket: str) -> dict[str, Handler]:
    """Command `consume`: read, unpickle, acknowledge and delete every group of a size; returns how many."""
    import redis

    client = redis.Redis(unix_socket_path=unix_socket)

    def prepare() -> None:
        client.delete(_STREAM)
        client.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)

    def consume(size: workload.Size) -> int:
        seen = 0
        while seen < size.groups:
            reply: Any = client.xreadgroup(_GROUP, "c", {_STREAM: ">"}, count=size.bundle, block=5_000)
            ids = []
            for _stream, entries in reply:
                for entry_id, fields in entries:
                    pickle.loads(fields[b"group"])
                    ids.append(entry_id)
            if ids:
                pipeline = client.pipeline(transaction=False)
                pipeline.xack(_STREAM, _GROUP, *ids)
                pipeline.xdel(_STREAM, *ids)
                pipeline.execute()
            seen += len(ids)
        return seen

    return {"prepare": prepare, "consume": consume}
