"""The queue that teams roll by hand: XADD and XREADGROUP of pickled groups with redis-py and hiredis.

The producer pickles a dict of arrays, the consumer unpickles it, acknowledges and deletes. No policy, no staleness,
no exactly-once: the comparison is with the least anybody could write.
"""

import pickle
from typing import Any

from bench import workload
from bench.roles import Handler

_STREAM, _GROUP = "bench:stream", "trainers"


def producer(unix_socket: str) -> dict[str, Handler]:
    """Command `produce`: XADD every group of a size, a bundle per pipeline."""
    import redis

    client = redis.Redis(unix_socket_path=unix_socket)

    def produce(size: workload.Size) -> None:
        token_ids, logprobs, loss_mask = workload.arrays(size)
        for first in range(0, size.groups, size.bundle):
            pipeline = client.pipeline(transaction=False)
            for i in range(first, min(first + size.bundle, size.groups)):
                group = {
                    "task_id": f"t{i}",
                    "version": 0,
                    "rewards": [1.0] * workload.SAMPLES,
                    "token_ids": token_ids,
                    "logprobs": logprobs,
                    "loss_mask": loss_mask,
                }
                pipeline.xadd(_STREAM, {"group": pickle.dumps(group, protocol=5)})
            pipeline.execute()

    return {"produce": produce}


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
