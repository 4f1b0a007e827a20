"""Cost of staleness in reward: the demo's task under policies of different staleness, by loss and seed."""
