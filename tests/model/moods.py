"""Moods: how often each action is taken, and what the policies are about, by the mood of a history.

One rule chooses among the actions by these weights. (Rules of their own would not do: Hypothesis leaves a random part
of a machine's rules out of each history, and most histories then get nowhere.)
"""

from dataclasses import dataclass

STEADY = {
    "submit": 5,
    "lease": 7,
    "push_results": 9,
    "push_without_lease": 1,
    "push_again": 2,
    "push_forged": 1,
    "write_and_push": 2,
    "push_written_again": 1,
    "retry_blocked": 4,
    "extend": 2,
    "give_back": 4,
    "report_engine": 1,
    "pull": 4,
    "fill_and_pull": 3,
    "train": 1,
    "commit": 1,
    "publish": 5,
    "checkpoint": 2,
    "time_passes": 4,
    "sweep": 1,
}
TROUBLE = {
    "reject": 2,
    "replace": 2,
    "resume": 3,
    "report_lost": 4,
    "update_policy": 2,
    "change_budget": 1,
    "create_again": 2,
    "come_from_the_future": 2,
    "pause": 1,
    "drain": 1,
    "go_on": 2,
    "delete_and_create": 1,
}


@dataclass(frozen=True)
class Mood:
    """Weights of actions, and the features of every policy."""

    weights: dict[str, int]
    features: tuple[str, ...] = ()


MOODS = {
    "steady": Mood(STEADY),
    "resumed": Mood(
        {
            **STEADY,
            "resume": 3,
            "fill_and_pull": 6,
            "train": 8,
            "checkpoint": 4,
            "report_lost": 4,
            "time_passes": 1,
        },
    ),
    "interrupted": Mood(
        {
            **STEADY,
            "lease": 12,
            "give_back": 14,
            "train": 6,
            "push_results": 2,
            "push_again": 1,
            "interrupt_and_rewind": 5,
        },
    ),
    "short of everything": Mood({**STEADY, "time_passes": 12, "give_back": 8, "change_budget": 4}),
    "troubled": Mood({**STEADY, **TROUBLE}),
    "shared": Mood(
        {
            **STEADY,
            "submit": 7,
            "work": 8,
            "flood": 6,
            "fill_and_pull": 8,
            "change_shares": 3,
            "update_policy": 1,
            "resume": 1,
        },
        ("shared", "ordered"),
    ),
    "blended": Mood(
        {**STEADY, "work": 6, "flood": 6, "fill_and_pull": 9, "train": 3, "change_shares": 1, "resume": 1},
        ("shared", "by tokens", "equal"),
    ),
    "streamed": Mood(
        {
            **STEADY,
            "fill_and_pull": 9,
            "train": 6,
            "pull": 8,
            "reject": 2,
            "replace": 2,
            "report_lost": 3,
            "resume": 5,
            "update_policy": 2,
            "pause": 3,
        },
        ("streamed",),
    ),
    "streamed by tokens": Mood(
        {**STEADY, "work": 4, "fill_and_pull": 12, "pull": 8, "report_lost": 4, "resume": 2, "publish": 3},
        ("by tokens", "streamed", "foresighted"),
    ),
    "standing in line": Mood(
        {
            **STEADY,
            "flood": 10,
            "retry_blocked": 14,
            "time_passes": 9,
            "fill_and_pull": 6,
            "drain": 2,
            "go_on": 1,
            "filter_from_now_on": 2,
            "come_from_the_future": 2,
        },
        ("blocking", "limited"),
    ),
    "paced": Mood(
        {**STEADY, "fall_behind": 22, "train": 6, "fill_and_pull": 4, "publish": 3, "resume": 1, "update_policy": 1},
        ("foresighted", "ordered"),
    ),
    "direct": Mood(
        {
            **STEADY,
            "write_and_push": 14,
            "push_written_again": 10,
            "expire_written": 4,
            "flood": 3,
            "retry_blocked": 8,
            "fill_and_pull": 6,
            "resume": 1,
            "filter_from_now_on": 1,
            "reject_from_now_on": 2,
            "update_policy": 1,
        },
        ("limited",),
    ),
    "given back": Mood(
        {
            **STEADY,
            "fill_and_pull": 10,
            "train": 4,
            "reject": 12,
            "replace": 12,
            "resume": 3,
            "report_lost": 2,
            "commit": 2,
            "fall_behind": 2,
        },
    ),
    "used again": Mood(
        {
            "train_on": 24,
            "pull": 4,
            "reject": 8,
            "replace": 3,
            "report_lost": 2,
            "lose_again": 6,
            "resume": 6,
            "checkpoint": 4,
            "publish": 3,
            "update_policy": 2,
            "sweep": 1,
            "push_again": 1,
            "delete_and_create": 1,
        },
        ("reusing",),
    ),
    "paced back": Mood(
        {**STEADY, "fall_behind": 4, "fill_and_pull": 8, "train": 4, "reject": 10, "replace": 6, "publish": 2},
        ("foresighted", "cancelling"),
    ),
    "rationed": Mood({**STEADY, "flood": 10, "fill_and_pull": 12, "train": 0, "publish": 1}, ("limited",)),
    "spread": Mood({**STEADY, "interrupt_and_lease_again": 14, "publish": 8, "lease": 9}, ("narrow",)),
    "outdated": Mood(
        {**STEADY, "outdate": 7, "interrupt_and_lease_again": 6, "publish": 8, "lease": 9, "rewind_under_leases": 3},
        ("cancelling", "recycling"),
    ),
    "measured": Mood(
        {
            **STEADY,
            "flood": 6,
            "work": 4,
            "outdate_queue": 6,
            "push_from_before": 3,
            "publish": 9,
            "fill_and_pull": 6,
            "update_policy": 2,
            "resume": 2,
        },
        ("recycling", "measured", "ordered"),
    ),
    "choosy": Mood(
        {**STEADY, "flood": 5, "fill_and_pull": 9, "train": 4, "push_again": 4, "update_policy": 1},
        ("filtering", "by tokens", "forgetting"),
    ),
    "even": Mood(
        {**STEADY, "flood": 5, "fill_and_pull": 12, "train": 6, "pull": 6, "reject": 4, "replace": 4, "resume": 2},
        ("equal",),
    ),
    "operated": Mood(
        {**STEADY, "pause": 4, "drain": 4, "go_on": 3, "delete_and_create": 4, "flood": 3, "update_policy": 3},
        ("recording",),
    ),
    "waiting": Mood(
        {
            **STEADY,
            "lease": 10,
            "fill_and_pull": 10,
            "pull_under_leases": 8,
            "train": 6,
            "pull": 8,
            "give_back": 2,
            "reject": 2,
            "replace": 2,
            "time_passes": 6,
            "update_policy": 2,
            "resume": 1,
        },
        ("waiting",),
    ),
    "in order": Mood(
        {
            **STEADY,
            "submit": 8,
            "lease": 12,
            "fill_and_pull": 5,
            "pull": 12,
            "give_back": 5,
            "reject": 2,
            "replace": 2,
            "time_passes": 5,
            "update_policy": 2,
            "resume": 2,
        },
        ("windowed", "longest first"),
    ),
    "staged": Mood(
        {
            **STEADY,
            "lease_groups": 14,
            "add_columns": 14,
            "pass_stages": 4,
            "keep_groups": 6,
            "push_without_lease": 8,
            "flood": 10,
            "fill_and_pull": 6,
            "report_lost": 3,
            "time_passes": 5,
            "update_policy": 3,
            "resume": 2,
            "delete_and_create": 1,
        },
        ("staged",),
    ),
    "steered": Mood(
        {**STEADY, "steer": 12, "lease": 4, "fill_and_pull": 10, "train": 6, "update_policy": 2, "resume": 1},
        ("steered",),
    ),
    "rolling": Mood(
        {
            **STEADY,
            "plan": 8,
            "report_engine": 3,
            "report_for_loads": 6,
            "take_turns": 4,
            "start_fresh": 4,
            "outlive_a_place": 6,
            "fall_silent": 4,
            "hold_for_long": 4,
            "update_policy": 2,
            "resume": 1,
        },
        ("rolling",),
    ),
}

INSTEAD = {
    "push_results": "lease",
    "push_again": "push_without_lease",
    "push_written_again": "write_and_push",
    "retry_blocked": "flood",
    "extend": "lease",
    "give_back": "lease",
    "commit": "train",
    "checkpoint": "train",
    "report_lost": "fill_and_pull",
    "reject": "fill_and_pull",
    "replace": "fill_and_pull",
}
"""Action that is taken when there is nothing yet to do another with."""
