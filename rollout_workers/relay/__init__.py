"""Relay of weights: has the files of a site by their SHA-256, fetched once from further away."""
