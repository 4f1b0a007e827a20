"""An engine's end of a process group, built with torch.distributed as SGLang builds it.

As a program it is such an engine in a process of its own: reads one JSON command a line, answers with one JSON line.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

LIMIT = timedelta(seconds=120)
"""Longer than any test's own deadlines: an engine does not give up by itself."""


class Receiver:
    """Joins, receives and leaves; one group at a time."""

    def __init__(self) -> None:
        self._group: Any = None

    def join(self, *, host: str, port: int, name: str, rank: int, world_size: int) -> None:
        store, rank, world_size = next(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=LIMIT))
        store.set_timeout(LIMIT)
        self._group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend("gloo"),
            PrefixStore(name, store),
            group_name=GroupName(name),
            backend_options=None,
            timeout=LIMIT,
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def receive(self, tensors: list[tuple[str, str, list[int]]], buckets: list[int]) -> dict[str, torch.Tensor]:
        received, handles = {}, []
        if buckets:
            coming = iter(tensors)
            return {name: tensor for count in buckets for name, tensor in self._bucket(list(islice(coming, count)))}
        for name, dtype, shape in tensors:
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            handles.append(dist.broadcast(received[name], src=0, group=self._group, async_op=True))
        for handle in handles:
            handle.wait()
        return received

    def _bucket(self, specs: list[tuple[str, str, list[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in specs]
        bucket = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(bucket, src=0, group=self._group)
        for (name, dtype, shape), part in zip(specs, torch.split(bucket, sizes), strict=True):
            # As SGLang does: a part at a place that is no multiple of its item size fails.
            yield name, part.view(getattr(torch, dtype)).reshape(shape)

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # As an engine has one for its own ranks.
        dist.init_process_group("gloo", init_method=f"file://{folder}/own", rank=0, world_size=1)
    receiver = Receiver()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            result = getattr(receiver, name)(**arguments)
            sums = {key: float(tensor.double().sum()) for key, tensor in (result or {}).items()}
            print(json.dumps({"ok": sums}), flush=True)
        except Exception as error:  # noqa: BLE001 - the test reads it
            print(json.dumps({"error": str(error).partition("\n")[0]}), flush=True)


if __name__ == "__main__":
    main()
