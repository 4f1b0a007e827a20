"""Scenarios of the suites: the sequences of events and faults that the kit puts a candidate through."""
