"""The only place of the service that knows gRPC: servicers, conversion, streams, waits."""
