"""Every RPC's ordinary course, with a plain protobuf client against a real service."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollout_buffer.v1 import batches_pb2, groups_pb2, runs_pb2, tasks_pb2, weights_pb2
from tests.support.rpc import TIMEOUT_S, VERSION_0, Rpc, make_group, make_task, manifest, streamed

QUEUED = groups_pb2.PUSH_OUTCOME_QUEUED

# ── runs ─────────────────────────────────────────────────────────────────────


def test_a_run_starts_with_every_field_of_its_policy_filled_in(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4, max_staleness=2).get()
    assert run.policy.batch_groups == 4
    assert run.policy.max_queued_groups == 4
    assert run.policy.max_staleness == 2
    assert run.policy.overflow_action == runs_pb2.OVERFLOW_ACTION_DROP_OLDEST
    assert not run.policy.HasField("max_lookahead")
    assert run.policy.lease_ttl_ms == 60_000
    assert (run.term, run.published, run.next_step) == (1, VERSION_0, 0)
    assert run.groups.balanced
    assert run.tasks.balanced


def test_creating_a_run_again_with_the_same_policy_finds_it(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4)
    again = rpc.runs.CreateRun(
        runs_pb2.CreateRunRequest(run_id=run.run_id, policy=runs_pb2.RunPolicy(batch_groups=4)), timeout=TIMEOUT_S
    )
    assert not again.created
    assert again.run == run.get()


def test_runs_are_listed_in_order(rpc: Rpc) -> None:
    created = {rpc.create().run_id for _ in range(3)}
    listed = list(rpc.runs.ListRuns(runs_pb2.ListRunsRequest(), timeout=TIMEOUT_S).run_ids)
    assert created <= set(listed)
    assert listed == sorted(listed)


def test_a_policy_is_replaced_as_a_whole(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=4, max_staleness=2)
    request = runs_pb2.UpdatePolicyRequest(run=run.ref, policy=runs_pb2.RunPolicy(batch_groups=8))
    reply = rpc.runs.UpdatePolicy(request, timeout=TIMEOUT_S)
    assert reply.policy == run.get().policy
    assert reply.policy.batch_groups == 8
    assert not reply.policy.HasField("max_staleness")


# ── tasks ────────────────────────────────────────────────────────────────────


def test_tasks_are_leased_as_they_were_submitted(rpc: Rpc) -> None:
    run = rpc.create()
    task = make_task(
        "sum-1",
        environment="sums",
        priority=3,
        metadata_json='{"answer": 7}',
        sampling=tasks_pb2.SamplingParams(max_new_tokens=5, temperature=0.5, stop=["\n"], stop_token_ids=[2]),
    )
    reply = run.submit([task, make_task()])
    assert reply.task_ids[0] == "sum-1"
    assert reply.task_ids[1]
    assert (reply.cursor, reply.pending_tasks) == (2, 2)
    leased = run.lease(max_tasks=8)
    assert [lease.task.task_id for lease in leased.leases] == list(reply.task_ids)
    assert leased.leases[0].task == task
    assert (leased.leases[0].incarnation, leased.leases[0].attempt) == (0, 1)
    assert leased.leases[0].ttl_ms == 60_000
    assert leased.wait == tasks_pb2.LEASE_WAIT_NO_TASKS
    assert leased.published == VERSION_0


def test_a_repeated_submit_returns_the_first_ones_reply(rpc: Rpc) -> None:
    run = rpc.create()
    request = run.submit_request([make_task(), make_task()])
    first = rpc.tasks.SubmitTasks(request, timeout=TIMEOUT_S)
    assert rpc.tasks.SubmitTasks(request, timeout=TIMEOUT_S).task_ids == first.task_ids
    assert run.get().tasks.submitted == 2


def test_chat_tasks_keep_their_messages(rpc: Rpc) -> None:
    run = rpc.create()
    messages = [tasks_pb2.ChatMessage(role="user", content="2 + 2 = ?")]
    run.submit([make_task("chat", prompt_token_ids=[], messages=messages)])
    assert list(run.lease().leases[0].task.messages) == messages


def test_leases_are_extended_and_lost_ones_are_named(rpc: Rpc) -> None:
    run = rpc.create()
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    request = tasks_pb2.ExtendLeasesRequest(
        run=run.ref, worker_id=run.worker_id, instance_id=run.instance_id, lease_ids=[lease.lease_id, "a/0/7"]
    )
    reply = rpc.tasks.ExtendLeases(request, timeout=TIMEOUT_S)
    assert list(reply.states) == [tasks_pb2.LEASE_STATE_LIVE, tasks_pb2.LEASE_STATE_LOST]
    assert reply.ttl_ms == 60_000


def test_a_returned_task_comes_back_with_its_partial_rollout(rpc: Rpc) -> None:
    run = rpc.create()
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    partial_rollout = make_group("a", lease_id=lease.lease_id)
    partial_rollout.header.samples[1].finish_reason = groups_pb2.FINISH_REASON_ABORTED
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref,
        worker_id=run.worker_id,
        instance_id=run.instance_id,
        returns=[
            tasks_pb2.LeaseReturn(
                lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=partial_rollout
            )
        ],
    )
    assert list(rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S).outcomes) == [tasks_pb2.RETURN_OUTCOME_PENDING]
    again = run.lease().leases[0]
    assert again.attempt == 2
    assert again.partial_rollout == partial_rollout


def test_a_partial_rollout_without_a_token_leaves_the_earlier_one(rpc: Rpc) -> None:
    run = rpc.create()
    run.submit([make_task("a")])
    kept = make_group("a")
    empty = make_group("a", lengths=(3,))
    empty.header.samples[0].prompt_len = 3
    empty.header.samples[0].loss_tokens = 0
    empty.header.samples[0].finish_reason = groups_pb2.FINISH_REASON_ABORTED
    del empty.header.samples[0].spans[:]
    for partial_rollout in (kept, empty):
        lease = run.lease().leases[0]
        request = tasks_pb2.ReturnLeasesRequest(
            run=run.ref,
            worker_id=run.worker_id,
            instance_id=run.instance_id,
            returns=[
                tasks_pb2.LeaseReturn(
                    lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_INTERRUPTED, partial_rollout=partial_rollout
                )
            ],
        )
        rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S)
    assert run.lease().leases[0].partial_rollout == kept


def test_a_failed_return_counts_and_the_last_one_fails_the_task(rpc: Rpc) -> None:
    run = rpc.create(max_attempts=1)
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    request = tasks_pb2.ReturnLeasesRequest(
        run=run.ref,
        worker_id=run.worker_id,
        instance_id=run.instance_id,
        returns=[tasks_pb2.LeaseReturn(lease_id=lease.lease_id, kind=tasks_pb2.RETURN_KIND_FAILED, error="no reward")],
    )
    assert list(rpc.tasks.ReturnLeases(request, timeout=TIMEOUT_S).outcomes) == [tasks_pb2.RETURN_OUTCOME_FAILED]
    state = run.get()
    assert state.tasks.failed == 1
    assert (state.failures[0].task_id, state.failures[0].error) == ("a", "no reward")


# ── groups and batches ───────────────────────────────────────────────────────


def test_a_plain_protobuf_client_gets_back_the_bytes_it_pushed(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=3)
    groups = [make_group(f"x{i}", lengths=(3 + i, 9), seed=i) for i in range(3)]
    acks = run.push(groups[:2])
    acks.append(run.push_one(groups[2]))
    assert [ack.outcome for ack in acks] == [QUEUED] * 3
    assert [ack.group_id for ack in acks] == ["x0/0", "x1/0", "x2/0"]
    batch, delivered = run.pull(0)
    assert [item.group.SerializeToString() for item in delivered] == [group.SerializeToString() for group in groups]
    assert (batch.step, batch.total_groups, batch.total_samples) == (0, 3, 6)
    assert batch.total_tokens == sum(s.tokens for group in groups for s in group.header.samples)
    assert batch.total_loss_tokens == batch.total_tokens - 6
    assert (batch.shard_groups, batch.shard_tokens) == (3, batch.total_tokens)
    assert not batch.replayed
    assert [item.sequence for item in delivered] == sorted(item.sequence for item in delivered)


def test_a_batch_larger_than_a_message_arrives_in_order(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=6)
    lengths = [(50_000,), (10,), (200_000,), (20,), (30_000,), (120_000,)]
    groups = [make_group(f"x{i}", lengths=n, seed=i) for i, n in enumerate(lengths)]
    for group in groups:
        run.push([group])
    messages = list(rpc.batches.PullBatch(run.pull_request(0), timeout=TIMEOUT_S))
    delivered = [item.group for message in messages for item in message.groups]
    assert delivered == groups
    assert max(message.ByteSize() for message in messages) < 2 * (1 << 20)


def test_bundles_of_one_stream_are_acknowledged_in_order(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=64)
    bundles = [[make_group(f"x{i}-{j}") for j in range(3)] for i in range(20)]
    replies = run.push_stream(bundles)
    assert [reply.sequence for reply in replies] == list(range(1, 21))
    assert [ack.group_id for reply in replies for ack in reply.acks] == [
        f"x{i}-{j}/0" for i in range(20) for j in range(3)
    ]
    assert [reply.revision for reply in replies] == sorted(reply.revision for reply in replies)
    assert replies[-1].published == VERSION_0


def test_a_bad_group_does_not_hurt_its_bundle(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    bad = make_group("bad")
    bad.payload += b"x"
    acks = run.push([make_group("x0"), bad, make_group("x1")])
    assert [ack.outcome for ack in acks] == [QUEUED, groups_pb2.PUSH_OUTCOME_INVALID, QUEUED]
    assert acks[1].error.reason == "invalid_field"
    assert acks[1].error.attributes["field"] == "payload"


def test_a_group_pushed_twice_is_accepted_once(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.submit([make_task("a")])
    lease = run.lease().leases[0]
    group = make_group("a", lease_id=lease.lease_id)
    assert run.push_one(group).outcome == QUEUED
    assert run.push_one(group).outcome == groups_pb2.PUSH_OUTCOME_DUPLICATE
    assert run.get().groups.accepted.groups == 1


def test_a_task_that_has_its_result_is_closed_to_other_attempts(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.submit([make_task("a")])
    first = run.lease().leases[0].lease_id
    run.instance_id = "instance-2"
    second = run.lease().leases[0].lease_id
    assert run.push_one(make_group("a", lease_id=second)).outcome == QUEUED
    assert run.push_one(make_group("a", lease_id=first)).outcome == groups_pb2.PUSH_OUTCOME_CLOSED


def test_a_full_queue_rejects_where_the_policy_says_so(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1, overflow_action=runs_pb2.OVERFLOW_ACTION_REJECT)
    acks = run.push([make_group("x0"), make_group("x1")])
    assert [ack.outcome for ack in acks] == [QUEUED, groups_pb2.PUSH_OUTCOME_REJECTED_FULL]
    assert run.get().statistics.pushes_rejected == 1


def test_ranks_share_a_step_without_overlap(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=5)
    groups = run.fill(5)
    shards = [run.pull(0, rank=rank, world_size=2) for rank in range(2)]
    ids = [{item.group.header.task_id for item in delivered} for _, delivered in shards]
    assert ids[0] | ids[1] == {group.header.task_id for group in groups}
    assert not ids[0] & ids[1]
    assert shards[0][0].total_groups == shards[1][0].total_groups == 5
    assert sum(batch.shard_groups for batch, _ in shards) == 5


def test_a_step_is_replayed_until_it_is_checkpointed(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2)
    run.fill(2)
    _, first = run.pull(0)
    batch, again = run.pull(0)
    assert batch.replayed
    assert again == first
    assert run.commit(0).committed_steps == 1
    assert run.pull(0)[1] == first
    assert run.checkpoint(0).checkpointed_steps == 1
    assert run.get().groups.trained.groups == 2


def test_a_resumed_trainer_gets_the_same_batches_again(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=2, max_queued_groups=4)
    run.submit([make_task("a")])
    run.fill(4)
    first = [run.pull(step)[1] for step in range(2)]
    run.commit(0)
    reply = run.resume()
    assert (reply.term, reply.next_step, reply.next_unassembled_step, reply.cursor) == (2, 1, 2, 1)
    assert run.pull(1)[1] == first[1]


@pytest.mark.parametrize(
    ("mode", "queued"), [(batches_pb2.RESUME_MODE_REQUEUE, 2), (batches_pb2.RESUME_MODE_DISCARD, 0)]
)
def test_a_resume_can_requeue_or_discard(rpc: Rpc, mode: batches_pb2.ResumeMode, queued: int) -> None:
    run = rpc.create(batch_groups=2)
    run.fill(2)
    run.pull(0)
    reply = run.resume(mode=mode, next_step=0)
    assert reply.next_unassembled_step == 0
    assert run.get().groups.queued.groups == queued


# ── weights ──────────────────────────────────────────────────────────────────


def test_publishing_commits_and_is_idempotent(rpc: Rpc) -> None:
    run = rpc.create(batch_groups=1)
    run.fill(1)
    run.pull(0)
    reply = run.publish(1, manifest=manifest(), commit_through_step=0)
    assert (reply.published.version, reply.committed_steps) == (1, 1)
    assert run.publish(1, manifest=manifest()).published == reply.published


def test_a_watch_sends_the_present_state_and_then_every_newer_one(rpc: Rpc) -> None:
    run = rpc.create()
    run.publish(3, manifest=manifest())
    watch = streamed(rpc.weights.WatchWeights(weights_pb2.WatchWeightsRequest(run=run.ref), timeout=TIMEOUT_S))
    present = next(watch)
    assert present.published.version == 3
    assert present.manifest == manifest()
    run.publish(4)
    newer = next(watch)
    assert newer.published.version == 4
    assert not newer.HasField("manifest")
    watch.cancel()


def test_an_engine_report_is_kept_and_answered_with_the_published_weights(rpc: Rpc) -> None:
    run = rpc.create()
    run.publish(2)
    report = weights_pb2.EngineReport(
        engine_id="engine-0",
        worker_id="worker",
        state=weights_pb2.ENGINE_STATE_READY,
        loaded=VERSION_0,
        reloads=1,
        last_reload_ms=20,
        last_error="it was slow",
        errors=2,
    )
    reply = rpc.weights.ReportEngine(weights_pb2.ReportEngineRequest(run=run.ref, report=report), timeout=TIMEOUT_S)
    assert reply.published.version == 2
    (kept,) = run.get().engines
    assert kept.silent_ms < 60_000
    kept.silent_ms = 0
    assert kept == report


# ── standard services ────────────────────────────────────────────────────────


def test_health_is_serving_for_the_whole_and_for_each_service(rpc: Rpc) -> None:
    stub = health_pb2_grpc.HealthStub(rpc.channel)
    for name in ("", "rollout_buffer.v1.GroupService"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_services_of_the_contract(rpc: Rpc) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(rpc.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)
    names = {service.name for service in reply.list_services_response.service}
    assert {f"rollout_buffer.v1.{name}Service" for name in ("Run", "Task", "Group", "Batch", "Weight")} <= names


def test_an_unknown_method_is_unimplemented(rpc: Rpc) -> None:
    call = rpc.channel.unary_unary("/rollout_buffer.v1.RunService/Nothing")
    with pytest.raises(grpc.RpcError) as error:
        call(b"", timeout=TIMEOUT_S)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
