"""Steering of a run towards its target of staleness: knobs, and what a decision is made from and made of."""
