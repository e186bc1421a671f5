"""Errors of a load.

CommandError (app/node/errors.py)
└── InvalidAssertionsError   a folder of assertions cannot be loaded

LogFullError                 the decision log's stream has no room; the load retries
"""

from app.node.errors import CommandError


class InvalidAssertionsError(CommandError):
    """A backfill job writes no such folder; the text names the file, the field and the fault."""


class LogFullError(Exception):
    """The decision log's stream has no room for more rows."""
