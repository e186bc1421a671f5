"""Options that several commands share; those for the connection are in ``target.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

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
    """The group of a whole command line: errors of use quote arguments with escapes."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options of the group."""
        with _plain_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of a command, and run it."""
        with _plain_errors():
            return super().invoke(ctx)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except TyperException as wrong:
        wrong.message = plain(wrong.message)
        raise


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
