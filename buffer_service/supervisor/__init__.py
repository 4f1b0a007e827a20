"""The process that the user starts: owns the data directory, the embedded store, the admin page and the rpc processes.

Never imports grpc: it starts processes, and gRPC's threads do not survive that.
"""
