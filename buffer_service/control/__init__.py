"""Controller that holds a run's target of staleness: pure decisions, one for each publish."""
