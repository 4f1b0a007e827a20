"""The page of runs and its data, metrics and probes over HTTP."""
