"""Fleets of thousands of workers at one rpc process: what they cost, and what breaks first."""
