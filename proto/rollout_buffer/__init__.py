"""Root of the wire contract's packages, one per major version."""
