"""Weights on their way into the engines: watched, fetched, verified, loaded in flight."""
