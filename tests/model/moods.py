"""How often each action is taken, by the mood of a history.

One rule chooses among the actions by these weights. (Rules of their own would not do: Hypothesis leaves a random part
of a machine's rules out of each history, and most histories then get nowhere.)
"""

STEADY = {
    "submit": 5,
    "lease": 7,
    "push_results": 9,
    "push_without_lease": 1,
    "push_again": 2,
    "push_forged": 1,
    "retry_blocked": 4,
    "extend": 2,
    "give_back": 4,
    "report_engine": 1,
    "pull": 5,
    "fill_and_pull": 2,
    "train": 1,
    "commit": 1,
    "publish": 5,
    "checkpoint": 2,
    "time_passes": 4,
    "sweep": 1,
}
TROUBLE = {
    "resume": 3,
    "report_lost": 4,
    "update_policy": 2,
    "change_budget": 1,
    "create_again": 1,
    "come_from_the_future": 1,
}
MOODS = {
    "steady": STEADY,
    "resumed": {
        **STEADY,
        "resume": 3,
        "fill_and_pull": 6,
        "train": 8,
        "checkpoint": 4,
        "report_lost": 4,
        "time_passes": 1,
    },
    "interrupted": {
        **STEADY,
        "lease": 12,
        "give_back": 14,
        "train": 6,
        "push_results": 2,
        "push_again": 1,
        "interrupt_and_rewind": 5,
    },
    "short of everything": {**STEADY, "time_passes": 12, "give_back": 8, "change_budget": 4},
    "troubled": {**STEADY, **TROUBLE},
}
