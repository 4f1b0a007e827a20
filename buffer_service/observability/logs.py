"""Structured log lines on standard error. Payloads, prompts and secrets are never logged."""

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog


class _Bearing:
    """Standard error; a line that cannot be written, as into a file on a full disk, is left out and ends nothing."""

    def write(self, text: str) -> None:
        """Write the text, where standard error takes it."""
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush standard error, where that is possible."""
        with suppress(OSError):
            sys.stderr.flush()


def configure(level: str, log_format: str) -> None:
    """Set up structlog and route the standard library's loggers (uvicorn, asyncio, grpc) to the same stream."""
    number = logging.getLevelNamesMapping()[level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            # Without the values of locals, which may be prompts.
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write a line: the processes of a service share the stream.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Bearing())),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    # It says on its own account which way a client's payloads go.
    logging.getLogger("buffer_wire").setLevel(number)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_to_be_told)


def _is_to_be_told(record: logging.LogRecord) -> bool:
    """False for two of gRPC's lines. One is about a header field that is not UTF-8: it shows the field, which may be a
    token. The other is about a reply that found its client gone, which is no error of anybody's.
    """
    gone = record.exc_info is not None and getattr(record.exc_info[0], "__name__", "") == "ExecuteBatchError"
    return not gone and not str(record.msg).startswith("Invalid encoding")
