"""Overflow action `drop_stalest`: a full queue drops its stalest group, by the run's measure."""

from tests.planted.change import Change, Edit

CHANGE = Change(
    name="overflow_action",
    title="a new overflow action",
    most_files=6,
    edits=(
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="  OVERFLOW_ACTION_REJECT = 3;\n",
            put="  // The stalest queued groups are dropped.\n  OVERFLOW_ACTION_DROP_STALEST = 4;\n",
        ),
        Edit(
            "buffer_service/domain/policy.py",
            at='    REJECT = "reject"\n',
            put='    DROP_STALEST = "drop_stalest"\n',
        ),
        Edit(
            "buffer_service/store/lua/lib/groups/groups.lua",
            at="-- Overflow actions that make room, with what drops a group of subqueues",
            where="before",
            put="""\
-- Drops the stalest group of subqueues; false when there is none.
function Groups.drop_stalest(ctx, subqueues)
  local stalest, members, blocks = Queue.stalest(ctx, subqueues, math.huge, 1)
  if not stalest[1] then
    return false
  end
  Queue.remove(ctx, stalest, members, blocks, 'stalest_first')
  Groups.finish(ctx, stalest[1], 'queued', 'dropped_overflow')
  return true
end

""",
        ),
        Edit(
            "buffer_service/store/lua/lib/groups/groups.lua",
            at="  drop_oldest = Groups.drop_oldest,\n",
            put="  drop_stalest = Groups.drop_stalest,\n",
        ),
        Edit(
            "buffer_service/observability/estimate/prediction.py",
            at="OverflowAction.REJECT: _RETRIES",
            put=", OverflowAction.DROP_STALEST: _DROPS",
        ),
        Edit(
            "trainer_client/policy.py",
            at='OverflowAction: TypeAlias = Literal["drop_oldest", "block", "reject"',
            put=', "drop_stalest"',
        ),
        Edit(
            "buffer_service/simulator/buffer.py",
            at="    OverflowAction.DROP_OLDEST: Queue.oldest,\n",
            put="    OverflowAction.DROP_STALEST: Queue.stalest,\n",
        ),
        Edit(
            "docs/policies.md",
            at="- `reject`: the push is answered `REJECTED_FULL`; the lease stays live.\n",
            put="- `drop_stalest`: the stalest queued groups, by `staleness_measure`, are dropped.\n",
        ),
        Edit(
            "tests/oracle/pushing.py",
            at="                if not run.make_way():\n"
            "                    return _counted(run, facts, PushKind.REJECTED_FULL)\n",
            put="""\
        case OverflowAction.DROP_STALEST:
            while not run.has_room(facts.tokens, facts.size_bytes):
                stalest = run.queue.stalest(run.policy.staleness_measure)
                if stalest is None:
                    return _counted(run, facts, PushKind.REJECTED_FULL)
                run.dequeue(stalest, GroupState.DROPPED_OVERFLOW)
                run.end_group(stalest)
""",
        ),
        Edit(
            "tests/oracle/micro_batches.py",
            at="        case OverflowAction.DROP_OLDEST",
            put=" | OverflowAction.DROP_STALEST",
        ),
    ),
    tests=(
        "tests/wire/test_enums.py::test_the_clients_literals_are_the_words_of_the_wire",
        "tests/store/test_unknown_values.py::test_the_docs_name_every_value_of_every_enum",
    ),
)
