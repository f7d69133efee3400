"""Logging of all processes: one line per event, for people or as JSON. Prompts and keys are never logged."""

import logging
import sys
from typing import Any

import structlog


def configure(level: str, style: str) -> None:
    """Sets level ("debug" to "error") and style ("console" or "json") for our loggers and those of libraries."""
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if style == "json" else "%H:%M:%S"),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(
            colors=False,
            exception_formatter=structlog.dev.plain_traceback,  # others print local variables: prompts and keys
        )
    )
    ending: list[Any] = [structlog.processors.format_exc_info, renderer] if style == "json" else [renderer]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line in one write: others' come between two
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending], foreign_pre_chain=shared
        )
    )
    logging.basicConfig(level=number, handlers=[handler], force=True)
    # Libraries speak only when something is wrong, unless all was asked for.
    for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "asyncio", "redis", "grpc"):
        logging.getLogger(name).setLevel(number if level == "debug" else max(number, logging.WARNING))
