"""Loading histories: added, present and expired content; how long a loaded id is remembered."""

from __future__ import annotations

from app.domain.digest import digest, spread
from app.domain.loading import (
    Charges,
    LoadResult,
    WrittenId,
    load_charges,
    load_ids,
    load_samples,
    load_tokens,
)
from app.domain.producer_ids import ProducerIds
from app.domain.quota import Layers, Quota
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens

WINDOW = 1_200
LAYERS = Layers.named("layered", WINDOW)  # open for 400 ms, alive for 1,600
IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny", window_ms=WINDOW, layers=LAYERS)
RATE = Quota("request_rate", 5, "sampled_rate", "deny", samples=3, sample_ms=1_000)
BUCKET = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=50)
MAX_IDS = 1_000
ONE, OTHER = (spread(digest(b"s" * 32, "alice", number)) for number in (1, 2))


def remembered_until(state: ProducerIds, id_: bytes) -> int:
    """The first time at which an id is forgotten."""
    return next(now for now in range(10_000) if state.find(id_, now, LAYERS) is None)


def test_loading_an_id_twice_is_the_same_as_once():
    state = ProducerIds()
    written = [WrittenId(ONE, at_ms=1_000, layer_ms=900)]
    assert load_ids(state, written, 1_500, IDS, MAX_IDS) == LoadResult(added=1)
    assert load_ids(state, written, 1_500, IDS, MAX_IDS) == LoadResult(there=1)
    assert state.remembered(1_500, LAYERS) == 1
    assert remembered_until(state, ONE) == 2_500


def test_later_write_of_an_id_is_remembered_for_longer():
    state = ProducerIds()
    load_ids(state, [WrittenId(ONE, 1_000, 900)], 1_500, IDS, MAX_IDS)
    again = [WrittenId(ONE, 1_400, 1_400)]
    assert load_ids(state, again, 1_500, IDS, MAX_IDS) == LoadResult(added=1)
    assert remembered_until(state, ONE) == 3_000
    assert state.remembered(1_500, LAYERS) == 1


def test_layer_of_a_loaded_id_begins_when_the_one_before_it_ends():
    state = ProducerIds()
    load_ids(state, [WrittenId(ONE, 1_000, 900)], 1_500, IDS, MAX_IDS)
    assert load_ids(state, [WrittenId(OTHER, 1_350, 1_000)], 1_500, IDS, MAX_IDS) == LoadResult(added=1)
    assert (remembered_until(state, ONE), remembered_until(state, OTHER)) == (2_500, 1_300 + 1_600)


def test_id_whose_layer_has_died_is_over():
    dead = [WrittenId(ONE, 1_000, 900)]
    assert load_ids(ProducerIds(), dead, 2_500, IDS, MAX_IDS) == LoadResult(over=1)


def test_charges_are_added_to_those_in_the_window():
    state = ProducerIds(charges=[100, 1_000])
    loaded = load_charges(state, [Charges(250, 1), Charges(1_000, 1), Charges(1_400, 2)], 1_500, IDS, MAX_IDS)
    assert loaded == LoadResult(added=2, there=1, over=1)
    assert state.charges == [1_000, 1_400, 1_400]


def test_sample_that_no_bucket_would_keep_is_over():
    old, new = Sample(5.0, 1_000, 1_900), Sample(7.0, 90_000, 90_500)
    assert load_samples((), (old, new), 91_000, RATE) == ((new,), LoadResult(added=1, over=1))
    assert load_samples((new,), (new,), 91_000, RATE) == ((new,), LoadResult(there=1))


def test_level_that_is_full_again_is_over_and_a_lower_one_is_taken():
    low = Tokens(10.0, 1_000)
    assert load_tokens(None, low, 9_000, BUCKET) == (None, LoadResult(over=1))
    assert load_tokens(None, low, 8_999, BUCKET) == (low, LoadResult(added=1))
    assert load_tokens(low, low, 8_999, BUCKET) == (low, LoadResult(there=1))
