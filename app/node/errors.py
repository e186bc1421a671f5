"""Errors that end a command with exit code 1. Each message is shown to the person who ran the command.

CommandError
├── SettingsError           a setting has an invalid value
├── HomeInUseError          another supervisor uses the same home directory
├── ListenError             the address and port cannot be bound
├── StartError              a component did not start
├── NodeRequestError        a request to a running node failed
│   └── NodeRefusalError        the node answered with a problem (app/run/commands/node/requests.py)
└── InvalidAssertionsError  a folder of assertions cannot be loaded (app/backfill/errors.py)
"""

from __future__ import annotations

from app.terminal import plain_lines


class CommandError(Exception):
    """The command cannot do its work; the message is for the person who ran it.

    Each argument is one line. Texts from outside cannot add lines, nor steer the terminal.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)

    def __str__(self) -> str:
        return plain_lines(self.args)


class SettingsError(CommandError):
    """One or more settings are invalid; each line of the message begins with the setting's name."""


class HomeInUseError(CommandError):
    """Another supervisor uses the same home directory."""


class ListenError(CommandError):
    """The address and port cannot be bound."""


class StartError(CommandError):
    """A component did not start."""


class NodeRequestError(CommandError):
    """A request to a running node failed: no answer, no JSON, or a refusal."""
