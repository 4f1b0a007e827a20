"""Benchmarks of the laboratory: simulator beside closed forms, published figures and live loops."""
