"""Images by reference on a real service: blobs, and the bounds of references in tasks and groups."""

from hashlib import sha256
from typing import Any

import pytest

from buffer_wire import limits
from buffer_wire.errors import BlobsFull, InvalidField, UnknownBlob
from rollout_buffer.v1 import groups_pb2, payloads_pb2, runs_pb2, tasks_pb2
from rollout_buffer.v1.groups_pb2 import ImageRef
from tests.support.rpc import TIMEOUT_S, Rpc, RunRpc, failure, make_group, make_task

DATA = b"an image" * 1_000
DIGEST = sha256(DATA).hexdigest()


def write(rpc: Rpc, run: RunRpc, data: bytes, digest: str = "") -> payloads_pb2.WriteBlobResponse:
    request = payloads_pb2.WriteBlobRequest(run=run.ref, sha256=digest or sha256(data).hexdigest(), data=data)
    return rpc.payloads.WriteBlob(request, timeout=TIMEOUT_S)


def read(rpc: Rpc, run: RunRpc, digest: str) -> bytes:
    return rpc.payloads.ReadBlob(payloads_pb2.ReadBlobRequest(run=run.ref, sha256=digest), timeout=TIMEOUT_S).data


def test_a_blob_is_kept_once_and_read_by_its_hash(rpc: Rpc) -> None:
    run = rpc.create()
    assert write(rpc, run, DATA).blob_bytes == len(DATA)
    assert write(rpc, run, DATA).blob_bytes == len(DATA)
    assert write(rpc, run, b"another").blob_bytes == len(DATA) + 7
    assert read(rpc, run, DIGEST) == DATA
    shown = rpc.runs.GetRun(runs_pb2.GetRunRequest(run=run.ref), timeout=TIMEOUT_S).run
    assert (shown.blob_bytes, shown.max_blob_bytes) == (len(DATA) + 7, limits.MAX_BLOBS_BYTES)


def test_a_blob_that_is_not_what_its_hash_says_or_too_large_is_refused(rpc: Rpc) -> None:
    run = rpc.create()
    wrong = failure(lambda: write(rpc, run, DATA, "0" * 64))
    assert isinstance(wrong, InvalidField)
    assert wrong.attributes["field"] == "sha256"
    large = failure(lambda: write(rpc, run, bytes(limits.MAX_BLOB_BYTES + 1)))
    assert isinstance(large, InvalidField)
    assert large.attributes["field"] == "data"
    assert isinstance(failure(lambda: read(rpc, run, DIGEST)), UnknownBlob)
    assert isinstance(failure(lambda: read(rpc, run, "../etc/passwd")), InvalidField)


def test_a_deleted_run_has_no_blobs(rpc: Rpc) -> None:
    run = rpc.create()
    write(rpc, run, DATA)
    rpc.runs.DeleteRun(runs_pb2.DeleteRunRequest(run=run.ref), timeout=TIMEOUT_S)
    rpc.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run.run_id), timeout=TIMEOUT_S)
    again = RunRpc(rpc, run.run_id)
    assert isinstance(failure(lambda: read(rpc, again, DIGEST)), UnknownBlob)
    assert write(rpc, again, b"x").blob_bytes == 1


def image(**fields: Any) -> ImageRef:
    return ImageRef(**{"sha256": DIGEST, "start": 1, "tokens": 2, **fields})


def task(*images: ImageRef) -> tasks_pb2.Task:
    return make_task("a", prompt_token_ids=[1, 7, 7, 2, 7, 7, 3], images=images)


def told(*parts: tasks_pb2.ContentPart, **fields: Any) -> tasks_pb2.Task:
    message = tasks_pb2.ChatMessage(role="user", parts=parts, **fields)
    return make_task("a", prompt_token_ids=[], messages=[message])


PART = tasks_pb2.ContentPart(image=ImageRef(sha256=DIGEST))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (task(image(sha256="")), "images[0].sha256"),
        (task(image(sha256=DIGEST.upper())), "images[0].sha256"),
        (task(image(location="a\nb")), "images[0].location"),
        (task(image(location="x" * 2_049)), "images[0].location"),
        (task(image(tokens=0)), "images[0]"),
        (task(image(tokens=7)), "images[0]"),
        (task(image(tokens=3)), "images[0]"),
        (task(image(), image(start=2)), "images[1]"),
        (task(*[image()] * 65), "images"),
        (told(PART, content="beside"), "messages[0].parts"),
        (told(tasks_pb2.ContentPart()), "messages[0].parts[0]"),
        (told(tasks_pb2.ContentPart(image=image())), "messages[0].parts[0].image.start"),
        (told(*[PART] * 65), "messages"),
    ],
)
def test_references_beyond_a_bound_are_refused_by_name(rpc: Rpc, wrong: tasks_pb2.Task, field: str) -> None:
    run = rpc.create()
    refused = failure(lambda: run.submit([wrong]))
    assert isinstance(refused, InvalidField)
    assert refused.attributes["field"] == f"tasks[0].{field}"


def test_a_group_carries_its_images_once_and_only_with_their_hashes(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.submit([task(image(), image(start=4, location="https://example.org/a.png"))])
    (lease,) = run.lease().leases
    assert list(lease.task.images) == [image(), image(start=4, location="https://example.org/a.png")]
    group = make_group("a", lease_id=lease.lease_id)
    group.header.images.append(image(start=0, tokens=1))
    assert run.push([group])[0].outcome == groups_pb2.PUSH_OUTCOME_QUEUED
    unknown = make_group("b")
    unknown.header.images.append(image(start=0, tokens=1, sha256="", location="a.png"))
    outside = make_group("c")
    outside.header.images.append(image(start=0, tokens=2))
    refused = [ack.error.attributes["field"] for ack in run.push([unknown, outside])]
    assert refused == ["images[0].sha256", "images[0]"]


def test_blobs_have_a_bound_together() -> None:
    assert BlobsFull(limits.MAX_BLOBS_BYTES + 1, limits.MAX_BLOBS_BYTES).attributes["limit"] == str(1 << 30)
