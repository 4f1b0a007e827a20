"""Client of the service, blocking and asyncio: calls, the pull of batches, and the waits around them."""
