"""Why a job does not do what it was told, and with which exit code it then ends."""

from __future__ import annotations


class Refused(Exception):
    """The job cannot be done; the message is for the person who asked for it."""

    exit_code = 1


class WrongUse(Refused):
    """The job was asked for in a way that can never work."""

    exit_code = 2
