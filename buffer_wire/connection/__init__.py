"""Connections of clients: access, channels that last, calls that are repeated."""
