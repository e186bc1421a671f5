"""Why a command does not do what it was told; each ends it with exit code 1 and its message.

CannotRun
├── SettingsRefused   a setting cannot be used
├── HomeTaken         another supervisor keeps its state there
├── CannotListen      the address or port is not to be had
├── CannotStart       a part of the whole did not come up
└── CannotAsk         a running service could not be asked, or refused to answer
"""


class CannotRun(Exception):
    """The command cannot do what it was told; the message is for the person who gave it."""


class SettingsRefused(CannotRun):
    """One or more settings cannot be used; each line of the message begins with the setting's name."""


class HomeTaken(CannotRun):
    """Another supervisor keeps its state in this directory."""


class CannotListen(CannotRun):
    """The address or port is not to be had."""


class CannotStart(CannotRun):
    """A part of the whole did not come up."""


class CannotAsk(CannotRun):
    """A running service could not be asked, or refused to answer."""
