from typing import Any

import pytest

from buffer_service.domain.policy import RunPolicy
from tests.oracle.behaviour.world import World
from tests.oracle.rules.filters import acceptance_ppm, has_filter, why_filtered


@pytest.mark.parametrize(
    ("policy", "facts", "why"),
    [
        ({"filter_equal_rewards": True}, {"equal_rewards": True}, "filtered_equal_rewards"),
        ({"filter_equal_rewards": True}, {"equal_rewards": False}, None),
        ({"filter_equal_rewards": False}, {"equal_rewards": True}, None),
        ({"filter_min_response_tokens": 3}, {"response_tokens": (2, 9)}, "filtered_response_tokens"),
        ({"filter_min_response_tokens": 3}, {"response_tokens": (3, 9)}, None),
        ({"filter_max_response_tokens": 8}, {"response_tokens": (3, 9)}, "filtered_response_tokens"),
        ({"filter_max_response_tokens": 9}, {"response_tokens": (3, 9)}, None),
        ({"filter_min_mean_reward_milli": -100}, {"mean_reward_milli": -101}, "filtered_mean_reward"),
        ({"filter_min_mean_reward_milli": -100}, {"mean_reward_milli": -100}, None),
        ({"filter_max_mean_reward_milli": 800}, {"mean_reward_milli": 801}, "filtered_mean_reward"),
        ({"filter_max_mean_reward_milli": 800}, {"mean_reward_milli": 800}, None),
        ({}, {"equal_rewards": True, "mean_reward_milli": 10**12, "response_tokens": (0, 10**6)}, None),
    ],
)
def test_what_does_not_pass_which_filter(policy: dict[str, Any], facts: dict[str, Any], why: str | None) -> None:
    assert why_filtered(RunPolicy(**policy), World().facts("a", **facts)) == why
    assert has_filter(RunPolicy(**policy)) is any(policy.values())


def test_the_first_filter_that_a_group_does_not_pass_counts() -> None:
    policy = RunPolicy(filter_equal_rewards=True, filter_min_response_tokens=9, filter_min_mean_reward_milli=1_000)
    assert why_filtered(policy, World().facts("a", equal_rewards=True)) == "filtered_equal_rewards"
    assert why_filtered(policy, World().facts("a")) == "filtered_response_tokens"


def test_acceptance_is_a_moving_average_rounded_down() -> None:
    after_one = acceptance_ppm(1_000_000, passed=False)
    assert after_one == 984_375
    assert acceptance_ppm(after_one, passed=False) == 968_994
    assert acceptance_ppm(968_994, passed=True) == 969_478
    assert acceptance_ppm(1_000_000, passed=True) == 1_000_000
