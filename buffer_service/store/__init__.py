"""The store: the only package that knows Redis and Valkey. `redis_store.RedisRunStore` implements domain.ports.RunStore."""
