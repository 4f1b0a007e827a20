"""Pulls of a session: micro-batches in order, when the trainer asks or ahead of it, and others for rejected groups."""
