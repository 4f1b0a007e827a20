"""Payloads on the store: their keys, and the two ends that write and read them there."""
