"""Logging to stderr, for people or for machines."""

from __future__ import annotations

import logging
import sys
import warnings

from pythonjsonlogger.json import JsonFormatter

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, json_lines: bool) -> None:
    """Send every log record (uvicorn's and Python's warnings too) to stderr, one line each or one
    JSON object per line. Other libraries only speak up from "warning" on.
    """
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        fields = "%(asctime)s %(levelname)s %(name)s %(processName)s %(message)s"
        handler.setFormatter(JsonFormatter(fields, rename_fields={"levelname": "level"}))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    for name in ("mmtp_jax", "uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        # uvicorn may have set up its own.
        logger.handlers = []
        logger.propagate = True
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_args, **_kwargs: str(message)
