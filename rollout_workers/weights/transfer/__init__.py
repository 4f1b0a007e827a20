"""Transfer of one file over http: from whom, in which pieces, how fast."""
