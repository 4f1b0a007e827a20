"""A store that is a cluster: runs spread over its shards, each with its index and scripts in one slot."""
