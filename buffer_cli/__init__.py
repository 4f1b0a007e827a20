"""The console script `rollout-buffer`. Each command imports only what it runs."""
