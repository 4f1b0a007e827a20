"""The rollout-buffer service. `domain` holds the rules, `store` knows Redis, `rpc` knows gRPC, `admin` knows HTTP."""
