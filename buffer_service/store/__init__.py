"""The store: the only package that knows Redis and Valkey; `RedisRunStore` implements domain.ports.RunStore."""
