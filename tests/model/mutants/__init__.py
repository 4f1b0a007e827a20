"""Mutants of the model: what stands in place of what, by subject, and the table of all."""
