"""`rollout-buffer size`: shards, replicas and memory that a run needs, from measured costs."""
