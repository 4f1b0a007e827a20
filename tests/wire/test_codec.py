"""The hand-written codec speaks exactly the wire format that protobuf does."""

import contextlib
from random import Random
from typing import TypeAlias

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from buffer_wire import codec
from buffer_wire.revision import Revision
from rollout_buffer.v1 import batches_pb2, common_pb2, groups_pb2
from tests.fuzz.wire import damaged

pytestmark = pytest.mark.matrix

Run: TypeAlias = common_pb2.RunRef
Header: TypeAlias = groups_pb2.GroupHeader
Items: TypeAlias = list[tuple[groups_pb2.GroupHeader, bytes]]

headers = st.builds(
    groups_pb2.GroupHeader,
    task_id=st.text(max_size=20),
    incarnation=st.integers(0, 2**32 - 1),
    metadata_json=st.text(max_size=200),
)
payloads = st.binary(max_size=400)
groups = st.lists(st.tuples(headers, payloads), max_size=5)
runs = st.builds(
    common_pb2.RunRef,
    run_id=st.text(max_size=9),
    seen_revision=st.integers(0, 2**64 - 1),
    seen_proof=st.text(max_size=9),
)


@given(runs, st.integers(0, 2**64 - 1), groups)
def test_a_joined_push_parses_as_the_protobuf_message(run: Run, sequence: int, items: Items) -> None:
    message = codec.join_push(run, sequence, [codec.join_group(h, p) for h, p in items])
    parsed = groups_pb2.PushGroupsRequest.FromString(message)
    assert parsed.run == run
    assert parsed.sequence == sequence
    assert [(g.header, g.payload) for g in parsed.groups] == items


@given(runs, st.integers(0, 2**64 - 1), groups)
def test_a_protobuf_push_splits_into_the_same_groups(run: Run, sequence: int, items: Items) -> None:
    message = groups_pb2.PushGroupsRequest(
        run=run, sequence=sequence, groups=[groups_pb2.Group(header=h, payload=p) for h, p in items]
    ).SerializeToString()
    bundle = codec.split_push(message)
    assert (bundle.run, bundle.sequence) == (run, sequence)
    split = [codec.split_group(body) for body in bundle.groups]
    assert [(groups_pb2.GroupHeader.FromString(bytes(h)), bytes(p)) for h, p in split] == items


@given(runs, headers, payloads)
def test_a_unary_push_splits_into_its_group(run: Run, header: Header, payload: bytes) -> None:
    group = groups_pb2.Group(header=header, payload=payload)
    bundle = codec.split_push_one(groups_pb2.PushGroupRequest(run=run, group=group).SerializeToString())
    assert bundle.run == run
    assert groups_pb2.Group.FromString(bytes(bundle.groups[0])) == group


@given(
    st.builds(Revision, st.integers(0, 2**63), st.text(max_size=16)),
    groups,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)
def test_a_joined_pull_reads_the_same_by_protobuf_and_by_the_codec(
    revision: Revision, items: Items, sequence: int, head: int, tail: int
) -> None:
    bodies = [b"".join(codec.join_group(h, p)) for h, p in items]
    # One more, which lies in the store: in their middle.
    sent = [codec.Delivered(b, sequence, head, tail) for b in bodies]
    sent.insert(len(sent) // 2, codec.Delivered(b"", sequence, head, tail, "rb:p:é:0:0:9"))
    message = codec.join_pull(revision, sent)
    parsed = batches_pb2.PullBatchResponse.FromString(message)
    assert (parsed.revision, parsed.revision_proof) == (revision, revision.proof)
    assert [(g.group.header, g.group.payload) for g in parsed.groups if g.HasField("group")] == items
    assert [g.payload_key for g in parsed.groups] == [one.payload_key for one in sent]
    assert all((g.sequence, g.head_version, g.tail_version) == (sequence, head, tail) for g in parsed.groups)
    seen, batch, delivered = codec.split_pull(message)
    assert (seen, seen.proof, batch) == (revision, revision.proof, None)
    assert [bytes(d.body) for d in delivered] == [one.body for one in sent]
    assert [d.payload_key for d in delivered] == [one.payload_key for one in sent]


def test_the_first_message_of_a_pull_carries_the_batch() -> None:
    info = batches_pb2.BatchInfo(step=3, total_groups=2)
    message = batches_pb2.PullBatchResponse(revision=1, batch=info).SerializeToString()
    assert codec.split_pull(message) == (1, info, [])


def test_unknown_fields_of_a_newer_client_are_skipped() -> None:
    known = codec.join_push(common_pb2.RunRef(run_id="r"), 1, [])
    newer = known + codec.varint(15 << 3 | 2) + b"\x03abc" + codec.varint(14 << 3 | 5) + bytes(4)
    assert codec.split_push(newer).run.run_id == "r"


@given(st.binary(max_size=80))
@example(b"\n\x01\x00")
def test_garbage_is_refused_or_read_but_never_crashes(garbage: bytes) -> None:
    with contextlib.suppress(codec.MalformedMessage):
        codec.split_push(garbage)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_cut_off_message_is_malformed(cut: int) -> None:
    group = codec.join_group(groups_pb2.GroupHeader(task_id="t"), bytes(64))
    message = codec.join_push(common_pb2.RunRef(run_id="run"), 1, [group])
    with pytest.raises(codec.MalformedMessage):
        codec.split_push(message[:-cut])


def test_split_groups_share_the_messages_memory() -> None:
    payload = np.zeros(1 << 16, np.uint8)
    message = codec.join_push(
        common_pb2.RunRef(run_id="r"), 1, [codec.join_group(groups_pb2.GroupHeader(), payload.data)]
    )
    _, view = codec.split_group(codec.split_push(message).groups[0])
    assert view.obj is message


_GROUP = groups_pb2.Group(header=groups_pb2.GroupHeader(task_id="a"), payload=b"pay").SerializeToString()


def _same_to_protobuf(body: bytes) -> bool:
    """False where the codec refuses it."""
    try:
        head, payload = codec.split_group(memoryview(body))
        header = groups_pb2.GroupHeader.FromString(bytes(head))
    except (codec.MalformedMessage, DecodeError):
        return False
    whole = groups_pb2.Group.FromString(body)
    assert (whole.header, whole.payload) == (header, bytes(payload))
    return True


@given(headers, payloads, st.integers(0, 2**32))
def test_a_group_that_is_taken_is_the_same_one_to_any_protobuf(header: Header, payload: bytes, seed: int) -> None:
    group = groups_pb2.Group(header=header, payload=payload)
    _same_to_protobuf(damaged(Random(seed), group.SerializeToString()))


@pytest.mark.parametrize(
    "body",
    [
        _GROUP + b"\x00\x01",
        _GROUP + b"\x8a\x80\x80\x80\x80\x80\x01\x00",
        _GROUP[:1] + b"\x83\x80\x80\x80\x80\x80\x00" + _GROUP[2:],
        _GROUP + _GROUP,
    ],
    ids=["a field 0", "a tag beyond 32 bits", "a length of seven bytes", "a header and a payload twice"],
)
def test_a_group_that_another_protobuf_reads_otherwise_is_refused(body: bytes) -> None:
    assert not _same_to_protobuf(body)
    assert _same_to_protobuf(_GROUP)
