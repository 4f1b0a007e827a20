"""Rules of the protocol, and verdicts of a record by them."""
