"""Options that several commands share; the connection's options are in ``target.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from app.node.errors import CommandError
from app.redaction import redact
from app.terminal import plain

AtMs = Annotated[
    int | None, typer.Option(help="The time in milliseconds, for a node under the caller's clock.")
]
Reason = Annotated[str | None, typer.Option(help="Why; kept in the history.")]
EnvFile = Annotated[
    Path | None, typer.Option(help="Read settings from this file instead of .env; the environment wins.")
]
_ORDER: Final = "the order of the options"


class PlainErrorsGroup(TyperGroup):
    """The group of a whole command line: its errors repeat no typed word that may be a secret."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options of the group."""
        with self._plain_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of a command, and run it."""
        with self._plain_errors():
            return super().invoke(ctx)

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except CommandError as wrong:
            wrong.args = tuple(redact(line, sys.argv[1:], vocabulary(self)) for line in wrong.args)
            raise
        except TyperException as wrong:
            wrong.message = plain(redact(wrong.message, sys.argv[1:], vocabulary(self)))
            raise


def vocabulary(command: Any) -> frozenset[str]:
    """The words of a command line itself: commands, options and choices, and the words of quotas."""
    from app.domain.quota import KEYS, LAYER_POLICIES
    from app.domain.quota_value import CHOICES, FIELDS
    from app.kafka.configuration import PROPERTIES

    words = {*KEYS, *LAYER_POLICIES, *CHOICES, *PROPERTIES}.union(*CHOICES.values(), *FIELDS.values())
    left = [command]
    while left:
        one = left.pop()
        for name, below in getattr(one, "commands", {}).items():
            words.add(name)
            left.append(below)
        for param in one.params:
            words.update((param.name or "", param.metavar or "", *param.opts))
            words.update(filter(_is_text, get_args(param.type_descriptor.annotation)))
    return frozenset(words)


def _is_text(choice: object) -> bool:
    return isinstance(choice, str)


class OrderedOptionsGroup(TyperGroup):
    """A command group that keeps the order in which its options were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options, and remember their order."""
        if args:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            ctx.meta[_ORDER] = [param.name for param in order]
        return super().parse_args(ctx, args)


def option_order(ctx: typer.Context) -> list[str]:
    """The names of the options of an ``OrderedOptionsGroup``, in the order they were given."""
    order: list[str] = ctx.meta.get(_ORDER, [])
    return order
