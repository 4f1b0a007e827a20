"""Connections: access, channels that last, and repeated calls of clients; the HTTP of servers."""
