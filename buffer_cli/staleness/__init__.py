"""`rollout-buffer plan`, `simulate`, `lab` and `worth`, on the laboratory `rollout_lab`."""
