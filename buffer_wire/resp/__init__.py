"""RESP2, the protocol of the store, for all its clients. Knows neither gRPC nor protobuf: supervisors do without."""
