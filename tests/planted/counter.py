"""Counter of the groups that a run accepts without a lease."""

from tests.planted.change import Change, Edit

CHANGE = Change(
    name="counter",
    title="a counter of a run",
    most_files=3,
    edits=(
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="  uint64 written_bytes = 42;\n",
            put="  // Groups accepted without a lease.\n  uint64 groups_without_lease = 43;\n",
        ),
        Edit(
            "buffer_service/rules/statistics.py",
            at='    "staleness_max": Statistic(),\n',
            where="before",
            put='    "groups_without_lease": Statistic("groups_without_lease", "Groups accepted without a lease."),\n',
        ),
        Edit(
            "buffer_service/store/lua/groups/push.lua",
            at="  Ledger.move_task(ctx, task, 'completed')\n",
            put="""\
  if attempt == 0 then
    Run.count(ctx, 'groups_without_lease', 1)
  end
""",
        ),
        Edit(
            "tests/oracle/pushing.py",
            at="    task.accepted_attempt, task.accepted_key = _attempt(facts), payload_key\n",
            put="""\
    if not task.accepted_attempt:
        run.count("groups_without_lease")
""",
        ),
    ),
    tests=("tests/service/test_metrics_reference.py",),
)
