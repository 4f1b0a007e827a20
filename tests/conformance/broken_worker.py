"""Our worker with a defect: `broken_worker DEFECT worker …` is `rollout-buffer worker …` that does one thing wrong."""

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from buffer_wire.codec import join_group
from buffer_wire.revisions import Revisions
from rollout_buffer.v1 import common_pb2, tasks_pb2_grpc
from rollout_workers.generation.samples import GroupProgress
from rollout_workers.service.pusher import Pusher
from rollout_workers.tasks.keeper import LeaseKeeper
from rollout_workers.weights.watcher import WeightWatcher


def replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


def new_request_ids() -> None:
    class Stub(tasks_pb2_grpc.TaskServiceStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            ask = self.LeaseTasks

            def anew(request: Any, timeout: float) -> Any:
                request.request_id = uuid.uuid4().hex
                return ask(request, timeout=timeout)

            self.LeaseTasks = anew  # type: ignore[assignment]

    tasks_pb2_grpc.TaskServiceStub = Stub  # type: ignore[assignment,misc]


def no_heartbeats() -> None:
    async def silent(*_: object) -> None:
        return

    replace(LeaseKeeper, "_beat", lambda _: silent)


def no_memory() -> None:
    replace(Revisions, "ref", lambda _: lambda _self, run_id: common_pb2.RunRef(run_id=run_id))


def wrong_logprobs() -> None:
    def spoiling(to_group: Any) -> Any:
        def spoilt(self: Any, *arguments: Any) -> Any:
            header, pieces = to_group(self, *arguments)
            payload = b"".join(pieces)
            at = (4 * sum(sample.tokens for sample in header.samples) + 7) // 8 * 8
            return header, payload[:at] + np.float32(-1).tobytes() + payload[at + 4 :]

        return spoilt

    replace(GroupProgress, "to_group", spoiling)


def other_bytes_again() -> None:
    count = itertools.count()

    def relabelling(next_bundle: Any) -> Any:
        def relabelled(self: Any) -> Any:
            parcels = next_bundle(self)
            for parcel in parcels:
                parcel.header.worker_id = f"w{next(count)}"
                parcel.pieces = join_group(parcel.header, *parcel.payload)
            return parcels

        return relabelled

    replace(Pusher, "_next_bundle", relabelling)


def deaf_to_publishes() -> None:
    def once(take: Any) -> Any:
        def taking(self: Any, reply: Any) -> None:
            if self.latest is None:
                take(self, reply)

        return taking

    replace(WeightWatcher, "_take", once)


def watches_once() -> None:
    def once(run: Any) -> Any:
        async def running(self: Any) -> None:
            watch = self._service.watch
            streams = 0

            def first() -> Any:
                nonlocal streams
                streams += 1
                return watch() if streams == 1 else Silent()

            self._service.watch = first
            await run(self)

        return running

    class Silent:
        async def __aiter__(self) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield None

        def cancel(self) -> None: ...

    replace(WeightWatcher, "run", once)


def exit_code_3() -> None:
    replace(sys, "exit", lambda _: lambda *_: os._exit(3))


def main() -> None:
    globals()[sys.argv.pop(1)]()
    from buffer_cli.main import app

    try:
        app()
    except SystemExit as ended:
        sys.exit(ended.code)


if __name__ == "__main__":
    main()
