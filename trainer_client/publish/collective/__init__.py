"""Weights broadcast to the engines: the publisher, the process group that it forms with them, and its plans."""
