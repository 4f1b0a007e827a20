"""Process that serves RPCs: gRPC on a port that it shares with its siblings, wired to the store.

Started by the supervisor.
"""
