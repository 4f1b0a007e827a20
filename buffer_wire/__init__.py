"""Parts shared by both ends of the wire: errors, payload layout, codec, connections, access, estimates and limits.

Needs grpcio, protobuf and numpy only, and knows neither the service, nor the workers, nor the trainer client.
"""
