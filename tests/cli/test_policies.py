"""Policies as command lines write them: what is set, what stays, what is refused."""

import pytest

from buffer_cli.policies import applied, assign, changed, changes, default_policy, shown
from buffer_service.domain.policy import RunPolicy
from buffer_service.domain.presets import PRESETS
from buffer_service.rpc.convert.policies import policy as effective
from buffer_service.rpc.convert.policies import to_policy
from buffer_wire.errors import InvalidField
from rollout_buffer.v1 import runs_pb2 as pb


def assigned(*assignments: str) -> pb.RunPolicy:
    message = pb.RunPolicy()
    assign(message, assignments)
    return message


def test_fields_of_every_kind_are_set() -> None:
    message = assigned(
        "batch_groups=64",
        "max_queued_bytes=1_000_000_000",
        "filter_min_mean_reward_milli=-500",
        "filter_equal_rewards=yes",
        "record_groups=False",
        "order=stalest_first",
        " overflow_action = BLOCK ",
    )
    assert message == pb.RunPolicy(
        batch_groups=64,
        max_queued_bytes=10**9,
        filter_min_mean_reward_milli=-500,
        filter_equal_rewards=True,
        record_groups=False,
        order=pb.ORDER_STALEST_FIRST,
        overflow_action=pb.OVERFLOW_ACTION_BLOCK,
    )


def test_environments_are_set_one_number_at_a_time() -> None:
    message = assigned(
        "environments.math.share=3",
        "environments.math.priority=7",
        "environments.a.b.share=0",
        "environments..share=1",
    )
    assert list(message.environments) == [
        pb.EnvironmentRule(environment="math", share=3, priority=7),
        pb.EnvironmentRule(environment="a.b", share=0),
        pb.EnvironmentRule(environment="", share=1),
    ]
    assign(message, ["environments.math.priority=none", "environments.a.b.share=none"])
    assert list(message.environments) == [
        pb.EnvironmentRule(environment="math", share=3),
        pb.EnvironmentRule(environment="", share=1),
    ]


def test_none_unsets() -> None:
    message = pb.RunPolicy(max_staleness=3, order=pb.ORDER_LIFO, batch_groups=4)
    assign(message, ["max_staleness=none", "order=none"])
    assert message == pb.RunPolicy(batch_groups=4)


@pytest.mark.parametrize(
    ("assignment", "field", "limit"),
    [
        ("batch_groups", "--set", "field=value"),
        ("groups=1", "--set groups", "batch_groups"),
        ("batch_groups=x", "--set batch_groups", "a whole number"),
        ("batch_groups=-1", "--set batch_groups", "0 to"),
        ("batch_groups=4294967296", "--set batch_groups", "0 to 4294967295"),
        ("equal_shards=2", "--set equal_shards", "true, false"),
        ("order=random", "--set order", "fifo, lifo, stalest_first, priority, submission"),
        ("preset=miles", "--set preset", "--preset"),
        ("environments=a", "--set environments", "environments.NAME.share"),
        ("environments.a.weight=1", "--set environments.a.weight", "environments.NAME.priority"),
        ("environments.a.share=x", "--set environments.a.share", "a whole number"),
    ],
)
def test_what_cannot_be_set_is_named_with_what_can(assignment: str, field: str, limit: str) -> None:
    with pytest.raises(InvalidField) as error:
        assigned(assignment)
    assert error.value.attributes["field"] == field
    assert limit in error.value.attributes["limit"]


def test_what_is_shown_can_be_set_again() -> None:
    message = default_policy(
        "prime_rl(3)",
        ["batch_groups=8", "failure_budget=4", "filter_max_mean_reward_milli=-1", "environments.x.share=2"],
    )
    again = pb.RunPolicy(preset="prime_rl(3)")
    assign(again, [f"{name}={value}" for name, value in shown(message) if name != "preset"])
    assert again == message


def sent(present: pb.RunPolicy, preset: str, *assignments: str) -> pb.RunPolicy:
    return to_policy(applied(effective(present), preset, assignments))


@pytest.mark.parametrize("name", PRESETS)
def test_a_change_of_what_a_preset_does_not_set_leaves_it(name: str) -> None:
    preset = PRESETS[name]
    needed = [str(max(number.least, 1)) for number in preset.numbers if not number.optional]
    present = default_policy(f"{name}({','.join(needed)})" if needed else name)
    after = sent(present, "", "retry_backoff_ms=none", "max_attempts=9", "environments.math.share=1")
    assert [name for name, _, _ in changes(present, after)] == ["max_attempts", "environments.math.share"]


def test_a_change_names_the_fields_that_it_is_about() -> None:
    present = default_policy("", ["environments.a.b.share=3"])
    message, names = changed(present, "", ["environments.a.b.priority=5", "max_staleness=none", "order=lifo"])
    assert names == {"environments", "max_staleness", "order"}
    assert [(rule.environment, rule.share, rule.priority) for rule in message.environments] == [("a.b", 3, 5)]
    assert changed(present, "areal(2)", ["order=lifo"])[1] == frozenset()


def test_a_change_leaves_everything_else() -> None:
    present = default_policy("areal(2)", ["batch_groups=8", "retained_steps=9", "environments.math.share=3"])
    after = sent(present, "", "environments.math.share=5", "max_staleness=1")
    assert list(changes(present, after)) == [
        ("max_staleness", "2", "1"),
        ("environments.math.share", "3", "5"),
    ]
    assert after.preset == "areal(2)"


def test_a_bound_of_the_preset_can_be_taken_away_which_ends_the_preset() -> None:
    present = default_policy("areal(2)")
    after = sent(present, "", "max_staleness=none")
    assert list(changes(present, after)) == [("preset", "areal(2)", "none"), ("max_staleness", "2", "none")]


def test_a_new_preset_starts_anew_but_for_the_batch_and_the_environments() -> None:
    present = default_policy("areal(2)", ["batch_groups=8", "retained_steps=9", "environments.math.share=3"])
    after = sent(present, "queue_drop(2)", "min_acceptance_milli=5")
    assert after.preset == "queue_drop(2)"
    assert (after.batch_groups, after.max_queued_groups) == (8, 16)
    assert not after.HasField("max_staleness")
    assert after.retained_steps == RunPolicy().retained_steps
    assert after.min_acceptance_milli == 5
    assert list(after.environments) == list(present.environments)
