"""Every record is one line on stderr, once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from server.running import ROOT

PROGRAM = """
import logging, logging.config, sys, warnings
import uvicorn.config
from mmtp_jax.server.logs import configure_logging

logging.config.dictConfig(uvicorn.config.LOGGING_CONFIG)  # its own handlers
for _ in range(2):
    configure_logging(sys.argv[1], json_lines=sys.argv[2] == "json")
logging.getLogger("mmtp_jax.server").debug("ours debug")
logging.getLogger("mmtp_jax.server").info("ours %d", 1)
access = ("1.2.3.4:5", "GET", "/health", "1.1", 200)
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *access)
logging.getLogger("uvicorn.error").info("uvicorn started")
logging.getLogger("other").info("other info")
logging.getLogger("other").warning("other warning")
warnings.warn("a warning of Python's")
logging.getLogger("mmtp_jax").error('say "é"\\nand more')
try:
    raise ValueError("broken")
except ValueError:
    logging.getLogger("mmtp_jax").exception("it failed")
"""


def lines(level: str, form: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, form],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert run.stdout == ""
    return run.stderr.splitlines()


def records(level: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(level, "json")]


def test_lines_for_people() -> None:
    found = lines("info", "text")
    for line in found[:4]:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) \S", line)
    assert [line.split(" ", 2)[2] for line in found[:5]] == [
        "INFO ours 1",
        'INFO 1.2.3.4:5 - "GET /health HTTP/1.1" 200',
        "INFO uvicorn started",
        "WARNING other warning",
        "WARNING a warning of Python's",
    ]
    assert sum("it failed" in line for line in found) == 1
    assert found[-1] == "ValueError: broken"


def test_lines_for_machines() -> None:
    found = records("info")
    assert [(one["level"], one["name"], one["message"]) for one in found] == [
        ("INFO", "mmtp_jax.server", "ours 1"),
        ("INFO", "uvicorn.access", '1.2.3.4:5 - "GET /health HTTP/1.1" 200'),
        ("INFO", "uvicorn.error", "uvicorn started"),
        ("WARNING", "other", "other warning"),
        ("WARNING", "py.warnings", "a warning of Python's"),
        ("ERROR", "mmtp_jax", 'say "é"\nand more'),
        ("ERROR", "mmtp_jax", "it failed"),
    ]
    assert found[-1]["exc_info"].endswith("ValueError: broken")
    assert all(one["asctime"] and one["processName"] == "MainProcess" for one in found)


@pytest.mark.parametrize(
    ("level", "first"), [("debug", "ours debug"), ("warning", "other warning"), ("error", "say")]
)
def test_levels(level: str, first: str) -> None:
    assert records(level)[0]["message"].startswith(first)
