"""Benchmarks: ratios inside one run, made by a command."""
