"""Traces of OpenTelemetry: their ids, the spans of a process, and contexts on their way through gRPC's metadata."""
