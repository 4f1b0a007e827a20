"""What the transport has to know of scripts, by their names."""

LOOKS = frozenset({"inspect_groups", "inspect_steps", "inspect_task", "inspect_tasks", "inspect_waits", "view"})
"""Scripts that only read."""

UNACKNOWLEDGED = LOOKS | {"abandon", "delete_run", "free", "sweep"}
"""Scripts whose replies promise nothing: they wait for no replicas, and no revision is remembered of them."""
