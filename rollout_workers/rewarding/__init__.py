"""Running of reward functions, in processes and in threads."""
