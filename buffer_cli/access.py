"""The options with which every command that calls the service gets in: a token file, and TLS.

A token itself is no option, for command lines are seen by everybody on the machine; RB_TOKEN may hold one.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from buffer_wire.connection.access import Access

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_PANEL = "Access"
_given: ContextVar[Access] = ContextVar("access")

TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="RB_TOKEN_FILE", help="File with the token, where the service asks.", rich_help_panel=_PANEL),
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        envvar="RB_TLS_CA", help='PEM file of who signed its certificate, or "system".', rich_help_panel=_PANEL
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="RB_TLS_CLIENT_CERT", help="PEM file of a certificate of one's own.", rich_help_panel=_PANEL),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="RB_TLS_CLIENT_KEY", help="PEM file of its key.", rich_help_panel=_PANEL)
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        envvar="RB_TLS_SERVER_NAME", help="Name in its certificate, if not the address's host.", rich_help_panel=_PANEL
    ),
]

_OPTIONS = {
    "token_file": TokenFile,
    "tls_ca": TlsCa,
    "tls_cert": TlsCert,
    "tls_key": TlsKey,
    "tls_server_name": TlsServerName,
}


def with_access(command: CommandT) -> CommandT:
    """Give a command these options; `access()` is what they say while it runs."""

    @functools.wraps(command)
    def commanded(**values: Any) -> Any:  # noqa: ANN401 - as the command's
        chosen = {name: values.pop(name) for name in _OPTIONS}
        token = _given.set(Access(**{name: value for name, value in chosen.items() if value is not None}))
        try:
            return command(**values)
        finally:
            _given.reset(token)

    own = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    commanded.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    commanded.__annotations__ = {**command.__annotations__, **_OPTIONS}
    return commanded  # type: ignore[return-value]


def access() -> Access:
    """Access by the options of the command that runs; outside of one, by the environment."""
    return _given.get(Access())


if not set(_OPTIONS) <= {one.name for one in fields(Access)}:
    raise AssertionError("an option of access that Access does not have")
