"""Tasks, and evaluations: from a lease to groups to push."""
