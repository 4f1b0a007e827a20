"""Suitability of a store: it answers, evicts nothing, knows cmsgpack, is new enough, and has our layout."""

from typing import Any, Protocol

from buffer_service.commands.replies import text
from buffer_service.store.keys import PLACE, SCHEMA_VERSION, Names
from buffer_wire.errors import LayoutChanged, StoreFault, StoreOutOfMemory, StoreUnavailable, StoreUnsuitable

OLDEST = (6, 2)


class Store(Protocol):
    """A store that answers single commands."""

    @property
    def name(self) -> str:
        """The address, without its password."""
        ...

    @property
    def names(self) -> Names:
        """Keys that are of no run."""
        ...

    async def command(self, *parts: str | int) -> Any:  # noqa: ANN401 - replies are of any type
        """Send one command."""
        ...


async def check_suitable(connection: Store, *, apart: bool = False) -> None:
    """Raises StoreUnsuitable, naming the setting and the way to change it; StoreUnavailable. `apart`: the payloads of
    its runs lie on servers of their own.
    """
    info = fields_of(await connection.command("INFO"))
    version = info.get("valkey_version") or info.get("redis_version", "")
    if _number(version) < OLDEST:
        raise StoreUnsuitable(connection.name, f"version {version or 'unknown'} is older than 6.2")
    if info.get("cluster_enabled") == "1":
        raise StoreUnsuitable(
            connection.name,
            "it runs in cluster mode; give the cluster's address, redis+cluster://host:port,… as --store, or as "
            "--payload-store beside a --store that is a single primary",
        )
    if info.get("role") not in {None, "master"}:
        raise StoreUnsuitable(
            connection.name, "it is a replica; give the address of its primary, or redis+sentinel:// and its Sentinels"
        )
    await check_scripts(connection)
    found = text(await connection.command("EVAL", _SETTLE_PLACE, 2, PLACE, connection.names.runs, _place(apart=apart)))
    if found != _place(apart=apart):
        raise StoreUnsuitable(connection.name, f"payloads of its runs lie {found}, see --payload-store")


async def check_scripts(connection: Store) -> None:
    """Raises StoreUnsuitable for a store whose scripts lack cmsgpack, or that has another layout; StoreUnavailable."""
    try:
        packed = await connection.command("EVAL", "return cmsgpack.pack({'ok'})", 1, connection.names.schema)
    except (StoreUnavailable, StoreOutOfMemory):
        raise
    except StoreFault as error:
        raise StoreUnsuitable(connection.name, f"its scripts have no cmsgpack library ({error.message})") from error
    if packed != b"\x91\xa2ok":
        raise StoreUnsuitable(connection.name, "its cmsgpack library does not pack as msgpack")
    await _settle_layout(connection)


def _place(*, apart: bool) -> str:
    return "on a cluster" if apart else "beside the index"


_SETTLE_PLACE = """
local found = redis.call('GET', KEYS[1]) or 'beside the index'
if found ~= ARGV[1] and redis.call('SCARD', KEYS[2]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1])
  return ARGV[1]
end
return found
"""

_SETTLE = """
local found = redis.call('GET', KEYS[1])
if not found or (tonumber(found) < tonumber(ARGV[1]) and redis.call('SCARD', KEYS[2]) == 0) then
  redis.call('SET', KEYS[1], ARGV[1])
  return ARGV[1]
end
return found
"""


async def _settle_layout(connection: Store) -> None:
    """Raises StoreUnsuitable; a store that is empty, or has an older layout and no runs, gets ours.

    Not one with a newer layout: services of two versions that are restarted beside each other would take it from one
    another again and again.
    """
    names = connection.names
    found = text(await connection.command("EVAL", _SETTLE, 2, names.schema, names.runs, SCHEMA_VERSION))
    if found != str(SCHEMA_VERSION):
        known = f"this service knows version {SCHEMA_VERSION}"
        raise StoreUnsuitable(connection.name, f"its layout ({names.schema}) is version {found}; {known}")


async def check_layout(connection: Store, *, apart: bool = False) -> None:
    """Raises LayoutChanged when the store, which had our layout, has another one by now; one that was emptied gets it
    again.
    """
    if apart:
        await connection.command("SET", PLACE, _place(apart=True), "NX")
    found = await connection.command("GET", connection.names.schema)
    if found is None:
        await connection.command("SET", connection.names.schema, SCHEMA_VERSION, "NX")
    elif text(found) != str(SCHEMA_VERSION):
        raise LayoutChanged(text(found), str(SCHEMA_VERSION))


def refuse_eviction(store: str, info: dict[str, str]) -> None:
    """Raises StoreUnsuitable for a server that deletes keys when memory runs short; `info` is its INFO memory."""
    policy = info.get("maxmemory_policy", "")
    if policy != "noeviction":
        raise StoreUnsuitable(
            store,
            f"maxmemory-policy is {policy or 'unknown'}, which deletes acknowledged groups when memory runs short; "
            "set it with `CONFIG SET maxmemory-policy noeviction` or in the server's configuration",
        )


def refuse_classic_migration(store: str, info: dict[str, str]) -> None:
    """Raises StoreUnsuitable for a server that moves slots key by key alone, under scripts that run; `info` is its INFO
    server.
    """
    name, needed = ("valkey_version", (9, 0)) if "valkey_version" in info else ("redis_version", (8, 4))
    version = info.get(name, "")
    if _number(version) < needed:
        raise StoreUnsuitable(
            store,
            f"{name} is {version or 'unknown'}, which cannot move a slot as a whole; runs on a cluster need Valkey 9.0 "
            "or Redis 8.4",
        )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def fields_of(info: bytes) -> dict[str, str]:
    """Fields of an INFO reply."""
    lines = text(bytes(info)).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
