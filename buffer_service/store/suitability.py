"""Whether a store may be used: it answers, evicts nothing, knows cmsgpack, is new enough, and has our layout."""

from typing import TYPE_CHECKING

from buffer_service.store.keys import SCHEMA, SCHEMA_VERSION
from buffer_service.store.replies import text
from buffer_wire.errors import StoreFault, StoreOutOfMemory, StoreUnavailable, StoreUnsuitable

if TYPE_CHECKING:
    from buffer_service.store.connection import StoreConnection

OLDEST = (6, 2)


async def check_suitable(connection: "StoreConnection") -> None:
    """Raises StoreUnsuitable, naming the setting and the way to change it; StoreUnavailable."""
    info = fields_of(await connection.command("INFO"))
    version = info.get("valkey_version") or info.get("redis_version", "")
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if number < OLDEST:
        raise StoreUnsuitable(connection.name, f"version {version or 'unknown'} is older than 6.2")
    if info.get("cluster_enabled") == "1":
        raise StoreUnsuitable(connection.name, "it runs in cluster mode; give the address of a single primary")
    if info.get("role") not in {None, "master"}:
        raise StoreUnsuitable(
            connection.name, "it is a replica; give the address of its primary, or redis+sentinel:// and its Sentinels"
        )
    try:
        packed = await connection.command("EVAL", "return cmsgpack.pack({'ok'})", 0)
    except (StoreUnavailable, StoreOutOfMemory):
        raise
    except StoreFault as error:
        raise StoreUnsuitable(connection.name, f"its scripts have no cmsgpack library ({error.message})") from error
    if packed != b"\x91\xa2ok":
        raise StoreUnsuitable(connection.name, "its cmsgpack library does not pack as msgpack")
    await check_layout(connection)


async def check_layout(connection: "StoreConnection") -> None:
    """Raises StoreUnsuitable when the store has a layout that this service does not know; an empty one gets ours."""
    schema = await connection.command("GET", SCHEMA)
    if schema is None:
        await connection.command("SET", SCHEMA, SCHEMA_VERSION, "NX")
    elif text(schema) != str(SCHEMA_VERSION):
        raise StoreUnsuitable(
            connection.name,
            f"its layout ({SCHEMA}) is version {text(schema)}; this service knows version {SCHEMA_VERSION}",
        )


def refuse_eviction(store: str, info: dict[str, str]) -> None:
    """Raises StoreUnsuitable for a server that deletes keys when memory runs short; `info` is its INFO memory."""
    policy = info.get("maxmemory_policy", "")
    if policy != "noeviction":
        raise StoreUnsuitable(
            store,
            f"maxmemory-policy is {policy or 'unknown'}, which deletes acknowledged groups when memory runs short; "
            "set it with `CONFIG SET maxmemory-policy noeviction` or in the server's configuration",
        )


def fields_of(info: bytes) -> dict[str, str]:
    """Fields of an INFO reply."""
    lines = text(bytes(info)).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
