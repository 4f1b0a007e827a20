"""Work that a stop cuts short."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The stop came before the work was done."""


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, and raise what it raises.

    Raises Stopped where `stop` is set first: `work` is cancelled then, and what it does at its end is waited for.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    if working.cancelled():
        raise Stopped
    return working.result()
