"""Trajectory of a sample that a rollout function makes: its rows, and the turns that the model writes in them."""
