"""Options of channels and servers that both ends agree on.

Two channels a process: one for control (small messages that must not wait), one for bulk (pushes and pulls): a 1 KB
message waits 13 ms behind 4 x 8 MB on a shared channel.
"""

from buffer_wire.limits import MAX_MESSAGE_BYTES

Options = list[tuple[str, int | str]]


def message_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Message limits of either side; a little above the payload's own limit for header and framing."""
    limit = max_message_bytes + (2 << 20)
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """A client's channel: keepalive that notices a dead peer in 30 s, and connections of its own.

    Without the local subchannel pool gRPC would fold the control and the bulk channel into one connection.
    """
    return [
        *message_options(max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """A server's: tolerates the clients' keepalive, shares its port, bounds what a stalled peer can hold."""
    return [
        *message_options(max_message_bytes),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    ]
