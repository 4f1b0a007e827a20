"""Beliefs of one client about its run, learned from replies: so that calls in random order are often valid ones."""

from random import Random
from typing import Any

from google.protobuf.message import Message

from rollout_buffer.v1 import runs_pb2

TASKS = 200
_TEXTS = {
    "worker_id": ("w0", "w1"),
    "engine_id": ("engine-0", "engine-1"),
    "instance_id": ("i0", "i1"),
    "environment": ("", "sums"),
    "eval_id": ("e0", "e1", "e2"),
    "role": ("user",),
    "base_url": ("/weights",),
    "weights_url": ("", "http://h/w"),
    "mirrors": ("http://relay:8090",),
    "after": ("", "0-1"),
    "service": ("", "rollout_buffer.v1.TaskService", "none"),
    "name": ("model.safetensors",),
}


class World:
    """One run as its fuzzing client knows it."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.term = 1
        self.revision = 0
        self.cursor = 0
        self.step = 0
        self.version = 0
        self.leases: list[tuple[str, str, int]] = []
        """(task, lease, incarnation)."""
        self.page_token = ""

    def policy(self, rng: Random) -> runs_pb2.RunPolicy:
        """One under which things move, in all ways there are."""
        order = rng.choice((0, 1, 2, 3, 4, 5))
        # A window needs room for what is admitted.
        window = rng.choice((0, 1, 3)) if order == runs_pb2.ORDER_SUBMISSION else 0
        uses = rng.choice((1, 1, 2, 3))
        return runs_pb2.RunPolicy(
            batch_groups=rng.choice((1, 2, 4)),
            max_queued_groups=rng.choice((8, 16)),
            max_pending_tasks=rng.choice((16, 64)),
            overflow_action=rng.choice((0, 1, 2, 3)),  # type: ignore[arg-type]
            stale_action=rng.choice((0, 1, 2, 3)),  # type: ignore[arg-type]
            order=order,  # type: ignore[arg-type]
            max_lookahead=1 if window else None,
            order_window_groups=window,
            longest_first=rng.choice((False, True)),
            target_staleness_milli=rng.choice((0, 0, 500, 2_000)),
            target_measure=rng.choice((0, 1, 2)),  # type: ignore[arg-type]
            lease_ttl_ms=rng.choice((1_000, 5_000)),
            retained_steps=2,
            max_uses=uses,
            # Without uses they are refused.
            reuse_share_milli=rng.choice((500, 1_000)) if uses > 1 else None,
            reuse_max_staleness=rng.choice((0, 2, 8)) if uses > 1 else None,
        )

    def task_id(self, rng: Random) -> str:
        return rng.choice(("", f"t{rng.randrange(TASKS)}"))

    def leased(self, rng: Random) -> tuple[str, str, int]:
        """A task to push for: of a lease, which is kept now and then for a repeat, or without one."""
        if self.leases and rng.random() < 0.7:
            return self.leases[-1] if rng.random() < 0.2 else self.leases.pop()
        return f"x{rng.randrange(100_000)}", "", 0

    def value(self, rng: Random, field: str) -> str | int | None:
        """Return what a field of that name has, None where anything does."""
        near = rng.choice((0, 0, 0, 0, 1, -1))
        numbers = {
            "term": self.term,
            "step": max(0, self.step + near),
            "through_step": max(0, self.step + near),
            "commit_through_step": max(0, self.step + near),
            "next_step": max(0, self.step + near),
            "version": self.version + 1,
            "train_version": self.version,
            "expected_cursor": self.cursor,
            "cursor": self.cursor + 1,
            "rank": 0,
            "world_size": 1,
            "micro_batch": 0,
            "wait_ms": rng.choice((0, 0, 0, 20)),
            "sequence": 1,
        }
        if field in numbers:
            return numbers[field]
        if field in _TEXTS:
            return rng.choice(_TEXTS[field])
        lease = self.leases[-1] if self.leases else ("t0", "t0/0/0", 0)
        texts = {
            "run_id": self.run_id,
            "request_id": f"{rng.getrandbits(64):x}",
            "task_id": lease[0],
            "lease_id": lease[1],
            "lease_ids": lease[1],
            "group_id": f"{lease[0]}/0",
            "page_token": self.page_token if rng.random() < 0.5 else "",
        }
        return texts.get(field)

    def learn(self, reply: Any) -> None:
        """Take from a reply what the next requests are to say."""
        name = type(reply).DESCRIPTOR.name if isinstance(reply, Message) else ""
        self.revision = max(self.revision, getattr(reply, "revision", 0))
        self.page_token = getattr(reply, "next_page_token", "") or self.page_token
        if name == "LeaseTasksResponse":
            self.leases += [(lease.task.task_id, lease.lease_id, lease.incarnation) for lease in reply.leases]
            del self.leases[:-32]
        elif name == "LeaseGroupsResponse":
            ids = [(lease.lease_id, *lease.group_id.split("/")) for lease in reply.leases]
            self.leases += [(task_id, lease_id, int(incarnation)) for lease_id, task_id, incarnation in ids]
            del self.leases[:-32]
        elif name == "SubmitTasksResponse":
            self.cursor = reply.cursor
        elif name == "ResumeResponse":
            self.term, self.step, self.cursor, self.version = (
                reply.term,
                reply.next_step,
                reply.cursor,
                reply.version,
            )
        elif name == "PublishResponse":
            self.version = reply.published.version
        elif name == "GetRunResponse":
            self.term, self.cursor, self.step = reply.run.term, reply.run.cursor, reply.run.next_step
            self.version = reply.run.published.version
        elif name == "PullBatchResponse" and reply.HasField("batch") and reply.batch.final:
            self.step = reply.batch.step + 1
