"""Metrics of a scrape: of runs, evaluations, staleness, the store and the doors."""
