"""Fleet: the engines of a worker together, reported, guarded and known to a router."""
