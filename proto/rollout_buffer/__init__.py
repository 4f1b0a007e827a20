"""Root of the wire contract's packages, one per major version; and `local`, a whole loop in one process tree.

`local` is imported when it is asked for: it needs the service and the worker, and the contract needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_cli.local import local

__all__ = ["local"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any attribute of the module
    if name == "local":
        from buffer_cli.local import local  # noqa: PLC0415 - brings service and worker

        return local
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
