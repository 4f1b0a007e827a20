"""`rollout-buffer serve` and `config`."""
