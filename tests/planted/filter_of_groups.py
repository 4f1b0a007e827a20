"""Filter of groups with many truncated samples, by a fact that every pushed group has."""

from tests.planted.change import Change, Edit

CHANGE = Change(
    name="filter_of_groups",
    title="a new filter",
    most_files=4,
    edits=(
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="  optional uint32 max_unavailable_engines = 42;\n",
            put="""\
  // Filter groups with more truncated samples, 1 to 1,024; 0 (default) is no bound.
  optional uint32 filter_max_truncated_samples = 900;
""",
        ),
        Edit(
            "proto/rollout_buffer/v1/runs.proto",
            at="  uint64 written_bytes = 42;\n",
            put="  // Groups filtered because of their truncated samples.\n  uint64 filtered_truncated_samples = 90;\n",
        ),
        Edit(
            "buffer_service/domain/policy.py",
            at="    max_unavailable_engines: Annotated[int, Between(0, 1_000_000)] = 0\n",
            put="    filter_max_truncated_samples: Annotated[int, Between(0, 1_024)] = 0\n",
        ),
        Edit(
            "buffer_service/rules/filters.py",
            at='    Filter("mean_reward", "mean_reward_milli", "<",',
            where="before",
            put='    Filter("truncated_samples", "truncated_samples", ">", "filter_max_truncated_samples", 0),\n',
        ),
        Edit(
            "trainer_client/policy.py",
            at="    min_acceptance_milli: int | None = None\n",
            where="before",
            put="""\
    filter_max_truncated_samples: int | None = None
    \"\"\"Filter groups with more truncated samples; default 0, no bound.\"\"\"
""",
        ),
        Edit(
            "tests/oracle/rules/filters.py",
            at="    if not policy.filter_min_mean_reward_milli <= facts.mean_reward_milli",
            where="before",
            put="""\
    if 0 < policy.filter_max_truncated_samples < facts.truncated_samples:
        return "filtered_truncated_samples"
""",
        ),
        Edit(
            "tests/oracle/rules/filters.py",
            at="        or policy.filter_max_response_tokens > 0\n",
            put="        or policy.filter_max_truncated_samples > 0\n",
        ),
        Edit(
            "tests/trainer_client/test_values.py",
            at="    filter_max_response_tokens=0,\n",
            put="    filter_max_truncated_samples=1,\n",
        ),
    ),
    tests=(
        "tests/trainer_client/test_values.py::test_every_field_of_the_wire_policy_can_be_stated",
        "tests/trainer_client/test_values.py::test_a_policy_survives_the_way_there_and_back",
    ),
)
