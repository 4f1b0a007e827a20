"""What both ends of the wire share: errors, payload layout, message codec, connections, access, estimates and limits.

Needs grpcio, protobuf and numpy only, and knows neither the service, nor the workers, nor the trainer client.
"""
