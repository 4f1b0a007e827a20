"""Fetching of weight files, once a host, from the trainer or from peers."""
