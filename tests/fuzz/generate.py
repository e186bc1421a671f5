"""The generator: a case follows from a seed and a number, so it can be made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from random import Random
from typing import Final

from tests.fuzz import framed, visits
from tests.fuzz.cases import Case, Request, Visit

Maker = Callable[[Random, int], Case]


def case(seed: int, number: int) -> Case:
    """Return the case with this number."""
    chance = Random(f"{seed}:{number}")
    return chance.choices(_MAKERS, cum_weights=_WEIGHTS)[0](chance, number)


def pipeline(chance: Random, number: int) -> Visit:
    """Many requests in one write, answered in their order."""
    times = chance.choice((20, 50, 100))
    made = [chance.choice(_PIPELINED)(chance, number) for _ in range(times)]
    text = b"".join(request.text for request in made)
    return Visit("pipeline", (text,), tuple(request.expected for request in made), requests=times)


_PIPELINED: Final[tuple[Callable[[Random, int], Request], ...]] = (
    *(
        framed.ask_on_a_ledger,
        framed.ask_of_anybody,
        framed.spoiled_ask,
        framed.chunked_ask,
        framed.check,
        framed.spoiled_check,
        framed.flipped_body,
    ),
    *(framed.other_paths, framed.quotas_without_a_key, framed.ask_by_another_method, framed.batch_on_ledgers),
)

_MIX: Final[Mapping[Maker, float]] = {
    framed.ask_on_a_ledger: 12,
    framed.batch_on_ledgers: 3,
    framed.ask_of_anybody: 12,
    framed.ask_with_repeated_keys: 2,
    framed.account: 2,
    framed.spoiled_ask: 12,
    framed.spoiled_batch: 5,
    framed.batch_of_a_wrong_size: 0.2,
    framed.flipped_body: 9,
    framed.warped_body: 9,
    framed.random_body: 2,
    framed.oversized_body: 0.1,
    framed.chunked_ask: 4,
    framed.ask_by_another_method: 1.5,
    framed.ask_with_a_bad_key: 1,
    framed.check: 6,
    framed.spoiled_check: 3,
    framed.bent_query: 3,
    framed.administration: 1,
    framed.spoiled_quotas: 1.5,
    framed.warped_quotas: 1,
    framed.bent_lists: 1.5,
    framed.warped_administration: 1,
    framed.quotas_without_a_key: 1.5,
    framed.other_paths: 3,
    framed.many_headers: 0.5,
    visits.random_bytes: 1.5,
    visits.other_protocols: 1,
    visits.blank_lines_first: 0.3,
    visits.flipped_message: 4,
    visits.bad_chunks: 1,
    visits.wrong_lengths: 1.5,
    visits.versions: 0.8,
    visits.expectations: 0.6,
    visits.upgrades: 0.6,
    visits.targets: 1,
    visits.bad_headers: 0.8,
    visits.oversized_heads: 0.1,
    visits.line_ends: 0.5,
    visits.half_closed: 1,
    visits.left: 1.5,
    visits.slow: 0.5,
    visits.deaf: 0.05,
    pipeline: 0.5,
}
"""How many of about a hundred cases are of each kind."""

_MAKERS: Final = tuple(_MIX)
_WEIGHTS: Final = tuple(accumulate(_MIX.values()))
