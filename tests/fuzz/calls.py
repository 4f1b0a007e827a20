"""Clients that call in random order with plausible, wrong and damaged messages, break off, and go away."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from buffer_wire.connection.channel import client_options
from rollout_buffer.v1 import batches_pb2, common_pb2, groups_pb2, runs_pb2
from tests.fuzz.messages import METHODS, Maker
from tests.fuzz.verdicts import NEVER, Failure, Verdicts
from tests.fuzz.wire import damaged, random_bytes, varint
from tests.fuzz.world import World
from tests.support.rpc import make_group
from tests.support.written import write

ANSWER_S = 30.0
"""A call that waits for nothing has its answer by then, or the service hangs."""
WAITS = frozenset({"LeaseGroups", "LeaseTasks", "PushGroup", "PullBatch", "ReadEvaluation"})
WAIT_S = 0.3
"""Longest time of streams and waits, which may have no end; and now and then"""
NO_TIME_S = 0.001
"""that every call breaks off by."""
BUNDLE_GROUPS = 256
UNPUSHED_MS = 5_000
"""Time for which written groups are there: what is not accepted has to be gone at the end."""
_RARE = {"DeleteRun": 0.02, "PauseRun": 0.05, "DrainRun": 0.05, "Resume": 0.3}
"""Share of what ends a run's life, as a part of the others': it must not be most of it."""
_FAILED_WRITE = "Internal error from Core"
"""grpcio's own word for a stream that ended while it was written to (grpc/grpc#36066)."""

ROOMY = runs_pb2.RunPolicy(
    batch_groups=8, max_queued_groups=16, overflow_action=runs_pb2.OVERFLOW_ACTION_DROP_OLDEST, retained_steps=2
)
"""Under which no push waits."""
WEIGHTS = [_RARE.get(method.name, 1.0) for method in METHODS.values()]


class Lane:
    """One client with a run of its own."""

    def __init__(self, address: str, store: Any, number: int, seed: int, verdicts: Verdicts) -> None:
        self._store = store
        self._rng = Random(f"{seed}/{number}")
        self._address = address
        self._verdicts = verdicts
        self._number = number
        self._world = World(f"fuzz-{number}")
        self._maker = Maker(self._rng, self._world)
        self._channel = self._connected()

    def _ref(self) -> common_pb2.RunRef:
        return common_pb2.RunRef(run_id=self._world.run_id)

    def _connected(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, options=client_options())

    async def close(self) -> None:
        await self._channel.close(None)

    # ── RPCs of one message, and streams of answers ──────────────────────────

    async def call_on(self) -> None:
        """Call until the share of the budget is used up."""
        paths = list(METHODS)
        await self._begin()
        while await self._verdicts.left("rpc"):
            draw = self._rng.random()
            if draw < 0.003:
                # Whatever is open on it breaks off.
                old, self._channel = self._channel, self._connected()
                await old.close(None)
            elif draw < 0.01:
                await self._begin()
            (path,) = self._rng.choices(paths, WEIGHTS)
            await self._one(path)

    async def _begin(self, policy: runs_pb2.RunPolicy | None = None) -> None:
        """A new run of the same name; the old one goes, so that the store stays small."""
        for path, request in (
            ("/rollout_buffer.v1.RunService/DeleteRun", runs_pb2.DeleteRunRequest(run=self._ref())),
            (
                "/rollout_buffer.v1.RunService/CreateRun",
                runs_pb2.CreateRunRequest(run_id=self._world.run_id, policy=policy or self._world.policy(self._rng)),
            ),
        ):
            await self._send(path, [request.SerializeToString()])
        self._world.__init__(self._world.run_id)  # type: ignore[misc]

    async def _one(self, path: str) -> None:
        rng = self._rng
        if rng.random() < 0.05:
            message = random_bytes(rng)
        else:
            message = self._maker.request(path).SerializeToString()
            if rng.random() < 0.3:
                message = damaged(rng, message)
        if rng.random() < 0.01:
            path = rng.choice(("/x.Y/Z", path + "x", "/", path.replace("v1", "v9"), "/rollout_buffer.v1.RunService/"))
        messages = [message]
        if path in METHODS and METHODS[path].client_streaming and rng.random() < 0.5:
            messages *= rng.randint(1, 4)
        await self._send(path, messages)

    async def _send(self, path: str, messages: Sequence[bytes]) -> None:
        self._verdicts.sent["rpc"] += len(messages)
        rng = self._rng
        method = METHODS.get(path)
        streams = method is not None and (method.client_streaming or method.server_streaming)
        answers = method is not None and not streams and method.name not in WAITS
        timeout = ANSWER_S if answers else WAIT_S
        if rng.random() < 0.03:
            answers, timeout = False, NO_TIME_S
        call = self._opened(path, messages, timeout)
        taken, stop_after = 0, rng.choice((0, 1, 2, 1_000, 1_000, 1_000))
        try:
            async for reply in call:
                taken += 1
                if method is not None:
                    self._learn(method.output_type, reply)
                if streams and taken > stop_after:
                    call.cancel()
                    break
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            code, details = grpc.StatusCode.CANCELLED, ""
        if answers and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._verdicts.fail(Failure(f"no answer within {ANSWER_S:g} s", f"{path} hangs", path, messages[0]))
        self._judge(path, messages, code.name, details or "")

    def _opened(self, path: str, messages: Sequence[bytes], timeout: float) -> Any:
        async def each() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        if len(messages) == 1 and self._rng.random() < 0.9:
            return self._channel.unary_stream(path, None, None)(messages[0], timeout=timeout, metadata=self._metadata())
        # Every kind of method can be called as a stream of messages each way.
        return self._channel.stream_stream(path, None, None)(each(), timeout=timeout, metadata=self._metadata())

    def _metadata(self) -> Sequence[tuple[str, str | bytes]]:
        rng = self._rng
        if rng.random() > 0.05:
            return ()
        name = "".join(rng.choice("abcxyz0123456789-_.") for _ in range(rng.choice((1, 8, 40)))).lstrip(".-_") or "x"
        return rng.choice(
            (
                ((f"{name}-bin", rng.randbytes(rng.choice((0, 1, 300)))),),
                ((name, "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.choice((1, 90))))),),
                (("authorization", rng.choice(("", "Bearer", "Bearer ", "Basic eA==", "Bearer " + "x" * 9_000))),),
                (("rollout-buffer-error-bin", rng.randbytes(9)),),
                tuple((f"{name}{i}", "y") for i in range(rng.choice((1, 100)))),
                ((name, "z" * 20_000),),
            )
        )

    def _learn(self, kind: Any, reply: bytes) -> None:
        try:
            message: Message = GetMessageClass(kind).FromString(reply)
        except DecodeError as error:
            self._verdicts.fail(Failure(f"a reply is no {kind.name}: {error}", f"reply {kind.name}", "(reply)", reply))
            return
        self._world.learn(message)

    def _judge(self, path: str, messages: Sequence[bytes], code: str, details: str) -> None:
        self._verdicts.codes[path.rpartition("/")[2] if path in METHODS else "(none)", code] += 1
        if code in NEVER and details != _FAILED_WRITE:
            kind = f"{path} {code} {details[:40]}"
            self._verdicts.fail(Failure(f"{code}: {details}", kind, path, b"".join(messages)))

    # ── bundles of groups, each of which is judged by itself ─────────────────

    async def push_on(self) -> None:
        """Push damaged and valid groups by the bundle until the share of the budget is used up."""
        await self._begin(ROOMY)
        while await self._verdicts.left("bundle"):
            push: Any = self._channel.stream_stream("/rollout_buffer.v1.GroupService/PushGroups", None, None)
            call = push(timeout=ANSWER_S)
            broken_off = self._rng.random() < 0.1
            try:
                for sequence in range(1, self._rng.choice((2, 8))):
                    groups = [self._group() for _ in range(BUNDLE_GROUPS)]
                    await call.write(_bundle(self._world.run_id, sequence, groups))
                    if broken_off:
                        break
                    self._acknowledged(await call.read(), groups)
                if broken_off:
                    call.cancel()
                else:
                    await call.done_writing()
                    await call.code()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                if not call.done():
                    raise
                code = await call.code()
                if code is not grpc.StatusCode.CANCELLED:
                    self._judge("/rollout_buffer.v1.GroupService/PushGroups", [], code.name, await call.details())
                await self._begin(ROOMY)
            await self._drain()

    def _group(self) -> bytes:
        rng = self._rng
        group = make_group(f"g{rng.randrange(1_000_000)}", lengths=(3, 4))
        if rng.random() < 0.2:
            group = write(self._store, self._world.run_id, group, UNPUSHED_MS)
        raw = group.SerializeToString()
        return raw if rng.random() < 0.02 else damaged(rng, raw)

    def _acknowledged(self, reply: Any, groups: list[bytes]) -> None:
        if reply is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise asyncio.InvalidStateError
        acks = groups_pb2.PushGroupsResponse.FromString(reply).acks
        self._verdicts.sent["bundle"] += len(acks)
        for ack, group in zip(acks, groups, strict=True):
            outcome = groups_pb2.PushOutcome.Name(ack.outcome)
            self._verdicts.codes["PushGroups, each group", outcome] += 1
            if ack.error.reason in ("internal", "store_fault"):
                self._verdicts.fail(Failure(ack.error.message, f"group {ack.error.reason}", "a group", group))

    async def _drain(self) -> None:
        """Take what was queued: the store is to stay small."""
        request = batches_pb2.PullBatchRequest(run=self._ref(), term=1, step=self._world.step, world_size=1)
        await self._send("/rollout_buffer.v1.BatchService/PullBatch", [request.SerializeToString()])
        if self._rng.random() < 0.05:
            await self._begin(ROOMY)


def _bundle(run_id: str, sequence: int, groups: Sequence[bytes]) -> bytes:
    run = common_pb2.RunRef(run_id=run_id).SerializeToString()
    parts = [b"\x0a", varint(len(run)), run, b"\x10", varint(sequence)]
    for group in groups:
        parts += [b"\x1a", varint(len(group)), group]
    return b"".join(parts)
