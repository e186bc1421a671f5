"""A parser of command lines whose errors repeat no word that may be a secret."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from app.redaction import redact


class PlainArgumentParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that names the option and its choices in errors, and not the word typed."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse words, and keep them for the text of errors."""
        self._typed = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        super().error(self.redacted(message))

    def redacted(self, message: str) -> str:
        """Return a message without the typed words, except options and choices."""
        return redact(message, self._typed, set(self.vocabulary()))

    def vocabulary(self) -> Iterator[str]:
        """Yield the options and choices of this parser and its subparsers."""
        for action in self._actions:
            yield from action.option_strings
            yield from map(str, action.choices or ())
            for choice in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
                if isinstance(choice, PlainArgumentParser):
                    yield from choice.vocabulary()
