"""`python -m buffer_service.app`, with an Assignment on standard input. Not meant to be started by hand."""

from buffer_wire.malloc import keep_big_blocks

keep_big_blocks()

from buffer_service.app.process import main  # noqa: E402 - it imports grpc, which must find malloc set up

main()
