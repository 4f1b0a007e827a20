"""Conformance kit: tells whether a worker or a trainer, in whatever language, follows the protocol.

The kit runs the candidate against a live service, plays the other half itself, and judges the record by rules. A proxy
in between records everything and loses a reply or breaks a stream now and then. docs/conformance.md says how to use the
kit and lists the rules.

Needs grpcio, protobuf and numpy; knows neither the workers nor the trainer client of this project, which are candidates
like any other.
"""
