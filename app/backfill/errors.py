"""Errors of a load.

CommandError (app/node/errors.py)
└── InvalidAssertionsError   a folder of assertions cannot be loaded

LogFullError                 the decision log's stream has no room; the load retries
"""

from app.node.errors import CommandError


class InvalidAssertionsError(CommandError):
    """The folder is not what a backfill job writes; names the file, the field, and what would be right."""


class LogFullError(Exception):
    """The decision log's stream has no room for more rows."""
