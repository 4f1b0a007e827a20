"""Options of channels and servers that both ends agree on.

A process has two channels: one for control (small messages that must not wait), one for bulk (pushes and pulls). A 1 KB
message waits 13 ms behind 4 x 8 MB on a shared channel.
"""

from buffer_wire.limits import MAX_MESSAGE_BYTES

MAX_METADATA_BYTES = 16 << 10
"""Largest size in bytes of the header fields of one request, names and values."""

MAX_RPCS_PER_CONNECTION = 4_096
"""Largest number of RPCs at once on a connection; more wait at the client."""

MAX_PENDING_RPCS = 32_768
"""Largest number of RPCs that a server has received and not begun, as when all clients of a lost replica come; more
are cancelled. gRPC's own bound is 1,000, and some are cancelled from there on."""

HANDSHAKE_TIMEOUT_MS = 20_000
"""Longest time for TLS and the first frames of a connection, in milliseconds."""

KEEPALIVE_S = 20.0
"""Silence of a peer after which it is pinged; one that does not answer within half of it again is dead."""

Options = list[tuple[str, int | str]]


def message_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Message limits of either side; a little above the payload's own limit for header and framing."""
    limit = max_message_bytes + (2 << 20)
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def _keepalive(after_s: float) -> Options:
    timeout_ms = round(after_s * 500)
    return [
        ("grpc.keepalive_time_ms", round(after_s * 1_000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC's core starts no timer for the one above; this one is a minute by default.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        # Of those that are sent while no data is, for which gRPC has a bound: a stream may be silent for hours.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """A client's channel: keepalive that notices a dead peer in 30 s, while RPCs are open, and connections of its own.

    Without the local subchannel pool gRPC would fold the control and the bulk channel into one connection.
    """
    return [
        *message_options(max_message_bytes),
        *_keepalive(KEEPALIVE_S),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The longest time to set up a connection: two round trips, which may be between sites.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int = 0,
    keepalive_s: float = KEEPALIVE_S,
    connection_age_s: float = 0.0,
) -> Options:
    """Options of a server: tolerates the clients' keepalive, shares its port, bounds what a peer can hold.

    `max_connections`: connections at once, more are closed as they come; 0: no bound. `keepalive_s`: a connection whose
    peer says nothing for so long and half as long again is closed, which ends its RPCs. So a client whose host is lost
    gives back its stream slots. `connection_age_s`: a connection that old, give or take a tenth, takes no new RPCs,
    which their client begins on a new one; those that it has go on for as long as they like; 0: no such age.
    """
    return [
        *message_options(max_message_bytes),
        *_keepalive(keepalive_s),
        # The first is a soft limit, which refuses at random up to the second, unless they are the same.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_RPCS_PER_CONNECTION),
        # As above: a soft limit and a hard one.
        ("grpc.server.max_pending_requests", MAX_PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_RPCS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        *([("grpc.max_allowed_incoming_connections", max_connections)] if max_connections else []),
        *([("grpc.max_connection_age_ms", round(connection_age_s * 1_000))] if connection_age_s else []),
        ("grpc.so_reuseport", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    ]
