"""`rollout-buffer serve`."""

import asyncio
import sys
from typing import Any

from pydantic import ValidationError

from buffer_cli.serve.config import explained
from buffer_service.observability import logs
from buffer_service.security.certificates import TlsRefused
from buffer_service.security.tokens import TokensRefused
from buffer_service.settings import Settings
from buffer_service.supervisor.address import AddressRefused
from buffer_service.supervisor.data_dir import DataDirRefused
from buffer_service.supervisor.open_files import TooFewFiles
from buffer_service.supervisor.rpc_processes import StartFailed
from buffer_service.supervisor.run import serve
from buffer_wire.errors import StoreFault

EXIT_REFUSED, EXIT_SETTINGS = 1, 2
REFUSALS = (AddressRefused, DataDirRefused, StartFailed, StoreFault, TlsRefused, TokensRefused, TooFewFiles)


def run(**given: Any) -> int:  # noqa: ANN401 - settings, as their model checks them
    """Run the service with the settings that are not None on top of the environment's; returns the exit code."""
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        sys.stderr.write(explained(error))
        return EXIT_SETTINGS
    logs.configure(settings.log_level, settings.log_format)
    status = 0
    try:
        asyncio.run(serve(settings))
    except* REFUSALS as refusals:
        for refusal in _leaves(refusals):
            sys.stderr.write(f"error: {refusal}\n")
        status = EXIT_REFUSED
    return status


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for child in error.exceptions for leaf in _leaves(child)]
    return [error]
