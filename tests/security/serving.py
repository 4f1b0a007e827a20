"""A gRPC server of a test's own methods, on a free loopback port."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from buffer_wire.connection.channel import Options


@asynccontextmanager
async def serving(
    service: str,
    methods: "dict[str, grpc.RpcMethodHandler[Any, Any]]",
    options: Options,
    interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = (),
) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server(interceptors=interceptors, options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
