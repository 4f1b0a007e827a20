"""A run as tests drive it: short calls with defaults, a frozen clock, and what must hold at the end of every test."""

import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from buffer_service import commands
from buffer_service.commands.replies import text, unpack
from buffer_service.domain import ops
from buffer_service.domain.policy import RunPolicy
from buffer_service.rules.groups import RECORD
from buffer_service.store.keys import index_key
from buffer_service.store.payloads.node import Traffic
from buffer_service.store.payloads.shards import Errand, failure_of
from buffer_service.store.redis_store import RedisRunStore
from buffer_wire.limits import MAX_MESSAGE_BYTES
from buffer_wire.payloads import keys
from buffer_wire.payloads.keys import new_nonce, part_count, part_keys, payload_key
from buffer_wire.revision import Revision
from tests.oracle.rules.proofs import prove
from tests.support.store_cluster import StoreCluster
from tests.support.store_server import StoreServer

_OF_SERVERS = re.compile(r"rb:payloads|rb:audited:.*|rb:replicated:.*")

_STAGE = RECORD.index("stage")
"""Place in a group's record that only groups of a run with stages have; what was added is two places further."""

RUN = "a-run.1"
SECRET = "known to the tests alone"


def claim(seen: int) -> Revision:
    """A revision as one who has seen it sends it back."""
    return prove(SECRET, seen)


def weights(version: int, term: int = 1) -> ops.WeightVersion:
    return ops.WeightVersion(term, version)


def _stage(record: Any) -> str:
    """Beginning of the name of a group's subqueue: the stage that it is in, empty for none."""
    in_stage = record[_STAGE] if len(record) > _STAGE else False
    return f"{_text(in_stage)}|" if in_stage else ""


def _added(record: Any) -> Any:
    return record[_STAGE + 2] if len(record) > _STAGE else ()


def _text(part: Any) -> str:
    return text(bytes(part)) if isinstance(part, bytes | memoryview) else str(part)


async def emptied(server: StoreServer | None, cluster: StoreCluster | None, *, keep: bool = False) -> RedisRunStore:
    """A store on servers that are emptied first, or kept as they are for another replica.

    Without a server of its own the index lies on the cluster too.
    """
    if not keep:
        for servers in (server, cluster):
            if servers is not None:
                servers.flush()
    if server is None:
        assert cluster is not None
        return await RedisRunStore.connect(cluster.url, timeout_s=10)
    return await RedisRunStore.connect(server.url, timeout_s=10, payload_store=cluster.url if cluster else "")


async def beside(store: RedisRunStore) -> RedisRunStore:
    """Another replica of the same store."""
    payload_store = store._shards.address.shown if store._shards is not None and store._one is not None else ""
    return await RedisRunStore.connect(store._connection.address.shown, timeout_s=10, payload_store=payload_store)


async def sent(store: RedisRunStore, *parts: Any) -> Any:
    """The reply to a command, which goes to the servers of payloads if it is on payloads."""
    shards = store._shards
    if shards is None:
        return await store._connection.command(*parts)
    if len(parts) < 2 or not (_text(parts[1]).startswith("rb:p:") or (parts[0] == "KEYS" and store._one is None)):
        reply = await store._connection.command(*parts)
        # What the index says of its servers of payloads belongs to no run.
        return [key for key in reply if not _OF_SERVERS.fullmatch(text(key))] if parts[0] == "KEYS" else reply
    if parts[0] == "KEYS":
        replies = [(await node.request(Traffic.READS, [parts]))[0][0] for node in shards.nodes()]
        keys = [key for reply in replies for key in reply]
        return [key for key in keys if not _OF_SERVERS.fullmatch(text(key))]
    errands = [Errand(_text(key), [(parts[0], key)]) for key in parts[1:]] if parts[0] == "UNLINK" else []
    errands = errands or [Errand(_text(parts[1]), [parts])]
    await shards.run(Traffic.WRITES, errands)
    if failure := failure_of(errands):
        raise failure
    return errands[0].replies[0]


class Run:
    """One run of a store. Times are ms of the frozen clock, which begins at 1,000,000."""

    def __init__(self, store: RedisRunStore, run_id: str = RUN) -> None:
        self.store = store
        self.run_id = run_id
        self.term = 1
        self.now = 1_000_000
        self.portion = ops.PORTION
        """Groups that one call of a pull takes at most."""
        self._ids = itertools.count(1)
        self._announced = (0, 0)

    @property
    def names(self) -> tuple[str, str]:
        """Keys of no run: of the set of runs, and of the layout."""
        names = self.store._connection.names
        return names.runs, names.schema

    async def create(self, **policy: Any) -> ops.RunView:
        await self.at(self.now)
        view, _ = await self.store.create_run(self.run_id, RunPolicy(**({"batch_groups": 2} | policy)), secret=SECRET)
        return view

    async def at(self, now: int) -> None:
        self.now = now
        await self.command("SET", index_key(self.run_id, "test_now"), now)

    async def pass_ms(self, passed: int) -> None:
        await self.at(self.now + passed)

    async def command(self, *parts: Any) -> Any:
        """The reply to a command, at the index or where the payload lies that it is on."""
        return await sent(self.store, *parts)

    async def submit(
        self, *tasks: str | tuple[str, int], environment: str = "env", request_id: str = "", seen: int = 0
    ) -> ops.Submitted:
        """Task ids, or (task id, priority)."""
        pairs = [task if isinstance(task, tuple) else (task, 0) for task in tasks]
        new = [ops.NewTask(name, 4, priority, environment, f"spec-{name}".encode()) for name, priority in pairs]
        cursor = (await self.view()).cursor
        request = ops.Submit(
            self.term, request_id or f"submit-{next(self._ids)}", cursor, cursor + len(new), b"feeder", new
        )
        return await self.store.call(commands.submit(self.run_id, request, seen_revision=claim(seen)))

    async def lease(
        self,
        max_tasks: int = 1,
        *,
        worker: str = "w",
        instance: str = "i",
        request_id: str = "",
        engine: str = "e",
        loaded: ops.WeightVersion | None = None,
        message_bytes: int = MAX_MESSAGE_BYTES,
        seen: int = 0,
    ) -> ops.Leased:
        request = request_id or f"lease-{next(self._ids)}"
        ask = ops.LeaseAsk(worker, instance, request, engine, loaded or weights(0), max_tasks, message_bytes)
        return await self.store.lease(self.run_id, ask, seen_revision=claim(seen))

    async def one_lease(self, **kwargs: Any) -> ops.LeaseGrant:
        (grant,) = (await self.lease(1, **kwargs)).grants
        return grant

    async def give_back(
        self,
        *leases: ops.LeaseGrant,
        kind: ops.ReturnKind = ops.ReturnKind.INTERRUPTED,
        error: str = "",
        partial_rollout: bytes = b"",
        head: ops.WeightVersion | None = None,
        tokens: int = 0,
        worker: str = "w",
        instance: str = "i",
    ) -> list[str]:
        returns = [ops.LeaseReturn(g.lease_id, kind, error, partial_rollout, head, tokens) for g in leases]
        returned = await self.store.call(commands.give_back(self.run_id, worker, instance, returns))
        return [outcome.value for outcome in returned.outcomes]

    def group(
        self,
        source: ops.LeaseGrant | str,
        body: bytes = b"body",
        *,
        head: int | ops.WeightVersion = 0,
        tail: int | ops.WeightVersion | None = None,
        tokens: int = 10,
        incarnation: int | None = None,
        lease_id: str | None = None,
        samples: int = 4,
        size: int | None = None,
        environment: str = "env",
        mean: int | None = None,
        rewards: Sequence[float] = (0.0, 1.0),
        lengths: Sequence[int] = (2, 3),
        turns: int = 4,
        truncated: int = 0,
        version_tokens: Sequence[tuple[ops.WeightVersion, int]] = (),
        first_revision: int = 0,
    ) -> ops.NewGroup:
        """A group of a lease, or without one of a task id. `mean` is in milli-versions, by default that of head and
        tail; `rewards` and `lengths` (in tokens) are what the filter sees and what is summed.
        """
        head = head if isinstance(head, ops.WeightVersion) else weights(head, self.term)
        tail = (
            tail if isinstance(tail, ops.WeightVersion) else weights(head.version if tail is None else tail, head.term)
        )
        leaseless = isinstance(source, str)
        facts = ops.GroupFacts(
            task_id=source if isinstance(source, str) else source.task_id,
            incarnation=incarnation
            if incarnation is not None
            else 0
            if isinstance(source, str)
            else source.incarnation,
            lease_id=lease_id if lease_id is not None else "" if leaseless else source.lease_id,  # type: ignore[union-attr]
            environment=environment,
            samples=samples,
            tokens=tokens,
            loss_tokens=tokens // 2,
            size_bytes=len(body) if size is None else size,
            head=head,
            tail=tail,
            spans_versions=head != tail,
            mean_milli=500 * (head.version + tail.version) if mean is None else mean,
            equal_rewards=len(rewards) > 1 and len(set(rewards)) == 1,
            mean_reward_milli=int(1000 * sum(rewards) // len(rewards)),
            response_lengths=struct.pack(f"<{len(lengths)}I", *lengths),
            rewards=struct.pack(f"<{len(rewards)}f", *rewards),
            min_response_tokens=min(lengths),
            max_response_tokens=max(lengths),
            response_tokens=sum(lengths),
            reward_milli=sum(round(1000 * reward) for reward in rewards),
            turns=turns,
            truncated_samples=truncated,
            version_tokens=version_tokens,
            first_revision=first_revision,
        )
        return ops.NewGroup(facts, body, parts=part_count(facts.size_bytes))

    async def announce(self, *made_by: ops.WeightVersion) -> None:
        """Have a plan for what groups are said to be made by and nobody has published."""
        view = await self.view()
        newest = max((made.version for made in made_by if made.term == view.term), default=0)
        if newest > view.published.version and (view.term, newest) > self._announced:
            await self.store.call(
                commands.plan_collective(self.run_id, ops.PlanCollective(view.term, newest, b"plan-%d" % newest))
            )
            self._announced = view.term, newest

    async def write(self, group: ops.NewGroup, body: bytes | None = None) -> ops.NewGroup:
        """The group as its pusher pushes it that has written its body, or another one, to the store."""
        written = ops.NewGroup(replace(group.facts, stored=True), b"", group.checksum, new_nonce(), group.parts)
        await self.set_payload(written, group.body if body is None else body)
        return written

    async def set_payload(self, written: ops.NewGroup, body: ops.Buffer) -> None:
        """Write a body as a pusher does, who may repeat it. The last part is as short or long as it must be."""
        parts = part_keys(self.key_of(written))
        for index, part in enumerate(parts):
            start = index * keys.PART_BYTES
            stop = len(body) if part == parts[-1] else start + part.size
            await self.command("SET", part.key, body[start:stop], "NX", "PX", ops.UNPUSHED_MS)

    def key_of(self, written: ops.NewGroup) -> str:
        """The key of what a pusher has written."""
        return payload_key(self.run_id, written.nonce, written.checksum, written.facts.size_bytes, written.parts)

    def part_keys_of(self, written: ops.NewGroup) -> list[str]:
        """The keys of the store under which it lies."""
        return [part.key for part in part_keys(self.key_of(written))]

    async def push(self, *groups: ops.NewGroup, seen: int = 0) -> list[ops.Pushed]:
        if any(group.facts.tail.version for group in groups):
            await self.announce(*(group.facts.tail for group in groups))
        return list((await self.store.push(self.run_id, groups, seen_revision=claim(seen))).outcomes)

    async def push_kinds(self, *groups: ops.NewGroup) -> list[str]:
        return [outcome.kind.value for outcome in await self.push(*groups)]

    async def fill(self, *names: str, **kwargs: Any) -> None:
        """Queue groups without leases."""
        for name in names:
            assert await self.push_kinds(self.group(name, f"body-{name}".encode(), **kwargs)) == ["queued"]

    async def pull(
        self,
        step: int,
        micro_batch: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
        train_version: int | None = None,
        batch_groups: int | None = None,
        seen: int = 0,
    ) -> ops.Batch | ops.Short:
        request = ops.Pull(self.term, step, rank, world_size, train_version, micro_batch, batch_groups)
        return await self.store.call(
            commands.pull(self.run_id, request, seen_revision=claim(seen), portion=self.portion)
        )

    async def batch(self, step: int, micro_batch: int = 0, **kwargs: Any) -> ops.Batch:
        batch = await self.pull(step, micro_batch, **kwargs)
        assert isinstance(batch, ops.Batch), batch
        return batch

    async def short(self, step: int, micro_batch: int = 0, **kwargs: Any) -> ops.Short:
        short = await self.pull(step, micro_batch, **kwargs)
        assert isinstance(short, ops.Short), short
        return short

    async def shards(self, step: int, micro_batch: int = 0, *, world_size: int, **kwargs: Any) -> list[list[str]]:
        """Group ids that each rank gets."""
        ranks = range(world_size)
        batches = [await self.batch(step, micro_batch, rank=rank, world_size=world_size, **kwargs) for rank in ranks]
        return [[group.group_id for group in batch.shard] for batch in batches]

    async def bodies(self, batch: ops.Batch) -> list[bytes]:
        fetched = await self.store.fetch(self.run_id, [g.payload_key for g in batch.shard])
        return [b"(gone)" if body is None else bytes(body) for body in fetched]

    async def lose(self, step: int, *names: str) -> None:
        """The present trainer finds the payloads of these groups of a step gone."""
        keys: dict[str, str] = {}
        for field, packed in (await self.hash("chunks")).items():
            if field.startswith(f"{step}/"):
                keys |= {text(group[0]): text(group[3]) for group in unpack(packed)}
        await self.store.call(
            commands.report_lost(self.run_id, self.term, step, [keys.get(name, "") for name in names])
        )

    async def commit(self, through: int, seen: int = 0) -> tuple[int, int]:
        return await self.store.call(commands.commit(self.run_id, self.term, through, seen_revision=claim(seen)))

    async def checkpoint(self, through: int, seen: int = 0) -> tuple[int, int]:
        return await self.store.call(commands.checkpoint(self.run_id, self.term, through, seen_revision=claim(seen)))

    async def publish(
        self,
        version: int,
        commit_through: int | None = None,
        manifest: bytes | None = None,
        seen: int = 0,
        clock: tuple[int, int] | None = None,
    ) -> ops.Published:
        """`clock`: the trainer's busy and waiting ms."""
        manifest = f"manifest-{version}".encode() if manifest is None else manifest
        said = ops.TrainerClock(*clock) if clock else None
        request = ops.Publish(self.term, version, manifest, commit_through, said)
        return await self.store.call(commands.publish(self.run_id, request, seen_revision=claim(seen)))

    async def resume(
        self,
        next_step: int | None = None,
        mode: ops.ResumeMode = ops.ResumeMode.REPLAY,
        *,
        request_id: str = "",
        allow_regenerate: bool = False,
    ) -> ops.Resumed:
        request = ops.Resume(next_step, mode, request_id or f"resume-{next(self._ids)}", allow_regenerate)
        resumed = await self.store.call(commands.resume(self.run_id, request))
        self.term = resumed.term
        return resumed

    async def view(self) -> ops.RunView:
        return await self.store.call(commands.view(self.run_id))

    async def ledger(self) -> dict[str, int]:
        """Groups by state, without the states that are empty."""
        return {name: amount.groups for name, amount in (await self.view()).groups.items() if amount.groups}

    async def tasks(self) -> dict[str, int]:
        return {name: count for name, count in (await self.view()).tasks.items() if count}

    async def members(self, index: str) -> list[str]:
        """Members of a sorted set, in its order."""
        return [text(m) for m in await self.command("ZRANGE", index_key(self.run_id, index), 0, -1)]

    async def queue(self) -> list[str]:
        """Ids of the queued groups, in order of sequence."""
        members: list[str] = []
        for name in await self.command("HKEYS", index_key(self.run_id, "subqueues")):
            members += await self.members(f"q:{text(name)}")
        records = await self.queued_records()
        return [text(records[member][0]) for member in sorted(members)]

    async def queued_record(self, group_id: str) -> Any:
        """The unpacked record of a queued group."""
        return next(record for record in (await self.queued_records()).values() if text(record[0]) == group_id)

    async def queued_records(self) -> dict[str, Any]:
        """Unpacked records of the queued groups, by their members in the indexes."""
        records: dict[str, Any] = {}
        for block in await self.command("KEYS", index_key(self.run_id, "groups:*")):
            flat = await self.command("HGETALL", block)
            for member, packed in zip(map(text, flat[::2]), flat[1::2], strict=True):
                assert text(block) == index_key(self.run_id, f"groups:{member[:12]}")
                records[member] = unpack(packed)
        return records

    async def record(self, index: str, name: str) -> Any:
        """An unpacked record of a hash."""
        packed = await self.command("HGET", index_key(self.run_id, index), name)
        return None if packed is None else unpack(packed)

    async def hash(self, index: str) -> dict[str, bytes]:
        """Fields and values of a hash."""
        flat = await self.command("HGETALL", index_key(self.run_id, index))
        return {text(field): bytes(value) for field, value in zip(flat[::2], flat[1::2], strict=True)}

    async def payload_keys(self) -> set[str]:
        """Keys of payloads, and of parts of some, that stay."""
        found = {text(key) for key in await self.command("KEYS", "rb:p:*")}
        return {key for key in found if await self.command("PTTL", key) == -1}

    async def unpushed_keys(self) -> set[str]:
        """Payloads that expire."""
        return {text(key) for key in await self.command("KEYS", "rb:p:*")} - await self.payload_keys()

    async def living_keys(self) -> set[str]:
        """Payloads that something refers to: groups that are queued, gathered or assembled, partial rollouts, pushes
        that wait for room.
        """
        living = set(await self.members("waiting"))
        records = list((await self.queued_records()).values())
        for packed in await self.command("HVALS", index_key(self.run_id, "chunks")):
            records += unpack(packed)
        for field, packed in (await self.hash("gathered")).items():
            if field.isdigit():
                records += map(unpack, unpack(packed)[3])
        # What was trained and may be used again, or is.
        records += [unpack(kept)[b"group"] for kept in (await self.hash("kept")).values()]
        for record in records:
            living |= {text(record[3]), *(text(key) for _, key in _added(record))}
        for packed in await self.command("HVALS", index_key(self.run_id, "tasks")):
            living.add(text(unpack(packed)[b"payload"]))
        return living - {""}

    async def check(self) -> None:
        """Ledgers balance; after a sweep exactly the living payloads exist."""
        view = await self.view()
        for field in ("groups", "samples", "tokens", "bytes"):
            amounts = {name: getattr(amount, field) for name, amount in view.groups.items()}
            assert amounts.pop("accepted") == sum(amounts.values()), (field, view.groups)
            assert all(amount >= 0 for amount in amounts.values()), view.groups
        counts = dict(view.tasks)
        assert counts.pop("submitted") == sum(counts.values()), view.tasks
        assert view.reuse.balanced, view.reuse
        await self.store.sweep()
        assert await self.payload_keys() == set(keys.all_part_keys(await self.living_keys()))
        await self._check_indexes()
        await self._check_environments(view)

    async def _check_indexes(self) -> None:
        """Each queued group is in both indexes of its class, and only classes that hold something are named."""
        records = await self.queued_records()
        indexed: list[str] = []
        named = {text(name) for name in await self.command("HKEYS", index_key(self.run_id, "subqueues"))}
        for name in named:
            members = await self.members(f"q:{name}")
            assert members
            assert sorted(await self.members(f"a:{name}")) == members
            for member in members:
                assert int(member) == records[member][2]
                assert name == f"{_stage(records[member])}{records[member][13]}:{text(records[member][12])}"
            indexed += members
        held = {member for member, record in records.items() if _stage(record).endswith("*|")}
        assert set(await self.hash("stage_held")) == set(await self.members("stage_leases")) == held
        assert sorted(indexed) == sorted(records)
        for prefix, names in (
            ("q:", named),
            ("a:", named),
            ("pending:", set(map(text, await self.command("HKEYS", index_key(self.run_id, "pending_environments"))))),
        ):
            start = index_key(self.run_id, prefix)
            found = await self.command("KEYS", f"{start}*")
            assert {text(key).removeprefix(start) for key in found} == names

    async def _check_environments(self, view: ops.RunView) -> None:
        """The ledgers of the environments add up to the run's."""
        sums: dict[str, list[int]] = {}
        for packed in await self.command("HVALS", index_key(self.run_id, "env_ledger")):
            entries = unpack(packed)
            del entries[b"totals"]
            for state, amount in entries.items():
                held = sums.setdefault(text(state), [0, 0, 0, 0])
                sums[text(state)] = [a + b for a, b in zip(held, amount, strict=True)]
        for state, total in view.groups.items():
            assert ops.Amount(*sums.get(state, [0, 0, 0, 0])) == total, state
