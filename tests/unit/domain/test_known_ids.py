"""What a node may answer alone about producer ids, until when, and what it renews."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.known_ids import (
    BUCKET_BYTES,
    ID_BYTES,
    PAUSED_MS,
    REFUSAL_BYTES,
    REFUSED_MS,
    RENEWED_WITHIN_MS,
    KnownBucket,
    KnownIds,
    Renewal,
    StoreTime,
    size_of,
)
from app.domain.ladder import AppliedQuota
from app.domain.quota import Layers, Quota

WINDOW, INTERVAL, TTL = 3_000, 1_000, 4_000
QUOTA = Quota("producer_ids_rate", 5, "producer_ids", "deny", window_ms=WINDOW, layers=Layers(INTERVAL, TTL))
ALICE = AppliedQuota(QUOTA, "user=*", "user=alice", "user=alice")
KEY = b"alice"
BEGAN = 10_000
CLOSES = BEGAN + INTERVAL


def knowing(*ids: int | str, closes_ms: int = CLOSES) -> KnownIds:
    """A node that has looked once, and knows that alice's open layer holds these ids."""
    known = KnownIds()
    known.look(b"born", 0)
    learn(known, *ids, closes_ms=closes_ms)
    return known


def learn(known: KnownIds, *ids: int | str, closes_ms: int = CLOSES) -> None:
    known.learn(KEY, ALICE, "alice", ids, closes_ms, closes_ms - INTERVAL)


def answers(known: KnownIds, *ids: int | str, at: int = BEGAN, applied: AppliedQuota = ALICE) -> bool:
    return known.answers(KEY, applied, ids, at)


def refuse(known: KnownIds, throttle_ms: int = 36_000, at: int = BEGAN) -> None:
    known.learn_refusal(KEY, ALICE, "alice", 9, "throttle", throttle_ms, None, at)


def renewals(known: KnownIds, most: int = 100, at: int = BEGAN) -> list[tuple[tuple[int | str, ...], int]]:
    """All renewals that wait: their ids, and the reset that they name."""
    taken = []
    while (found := known.next_renewal(most, at, lambda applied: applied)) is not None:
        taken.append((found[1].ids, found[1].resets))
    return taken


def test_known_id_is_answered_until_its_layer_dies():
    known = knowing(1, "a")
    assert answers(known, 1)
    assert answers(known, "a", 1, -1)
    assert answers(known, 1, at=BEGAN + TTL - RENEWED_WITHIN_MS)
    assert not answers(known, 1, at=BEGAN + TTL - RENEWED_WITHIN_MS + 1)  # the use could not be renewed
    assert known.passes(KEY, ALICE, [1], BEGAN + TTL - 1)
    assert not known.passes(KEY, ALICE, [1], BEGAN + TTL)


def test_unknown_id_or_none_at_all_is_left_to_the_store():
    known = knowing(1)
    assert not answers(known, 2)
    assert not answers(known, 1, 2)
    assert not answers(known)
    assert not answers(known, -1)
    assert not known.answers(b"bob", ALICE, (1,), BEGAN)


def test_use_is_renewed_once_the_layer_is_closed():
    known = knowing(1, 2)
    answers(known, 1, at=CLOSES - 1)
    assert renewals(known) == []
    for _ in range(3):
        assert answers(known, 1, -1, at=CLOSES)
    assert known.waiting == 1
    assert renewals(known) == [((1,), 0)]
    assert known.waiting == 0


def test_renewed_id_is_known_for_longer():
    known = knowing(1, 2)
    learn(known, 1, closes_ms=CLOSES + INTERVAL)
    assert answers(known, 1, at=BEGAN + TTL)
    assert not answers(known, 2, at=BEGAN + TTL)


def test_layer_with_an_earlier_start_ends_earlier():
    known = knowing(1)
    learn(known, 2, closes_ms=CLOSES - 10)
    assert not answers(known, 1, at=BEGAN + TTL - 10)


@pytest.mark.parametrize("changed", [{"window_ms": 3_001}, {"layers": Layers(INTERVAL, TTL - 1)}])
def test_another_window_or_other_layers_end_the_knowledge(changed: dict[str, int]):
    known = knowing(1)
    other = replace_quota(**changed)
    assert not answers(known, 1, applied=other)
    assert not answers(known, 1)


def test_another_limit_keeps_the_knowledge_and_ends_refusals():
    known = knowing(1)
    refuse(known)
    other = replace_quota(limit=6)
    assert answers(known, 1, applied=other)
    assert known.refusal(KEY, other, 9, BEGAN) is None


def confirm(known: KnownIds, at: int = BEGAN) -> None:
    """Let the store say that no bucket was reset, and renew what waits."""
    while (found := known.next_renewal(100, at, lambda applied: applied)) is not None:
        known.renewed(*found, known.edition, at, was_reset=False, is_written=True)


def replace_quota(**changes: object) -> AppliedQuota:
    return AppliedQuota(replace(QUOTA, **changes), ALICE.entity, ALICE.bucket, ALICE.owner)  # type: ignore[arg-type]


# Resets and losses


def test_own_reset_forgets_and_teaches_nothing_from_before():
    known = knowing(1)
    edition = known.edition
    known.reset([KEY])
    assert not answers(known, 1)
    assert known.edition != edition


def test_reset_elsewhere_has_the_bucket_confirmed():
    known = knowing(1)
    known.look(b"born", 7)
    assert not answers(known, 1)
    learn(known, 2)  # what is learned before it is confirmed is not kept
    key, renewal = known.next_renewal(100, BEGAN, lambda applied: applied) or (b"", None)
    assert (key, renewal) == (KEY, Renewal(ALICE, "alice", 0, b"born", ()))
    assert renewal is not None
    known.renewed(key, renewal, known.edition, BEGAN, was_reset=False, is_written=True)
    assert answers(known, 1)
    assert not answers(known, 2)


def test_bucket_that_was_reset_elsewhere_is_forgotten():
    known = knowing(1)
    known.look(b"born", 7)
    assert not answers(known, 1)
    key, renewal = known.next_renewal(100, BEGAN, lambda applied: applied) or (b"", None)
    assert renewal is not None
    known.renewed(key, renewal, known.edition, BEGAN, was_reset=True, is_written=True)
    assert not answers(known, 1)
    assert renewals(known) == []


def test_loss_keeps_the_answers_and_renews_everything():
    known = knowing(1, 2, 3)
    edition = known.edition
    known.look(b"born again", 0)
    assert known.edition != edition
    assert answers(known, 1, 2)
    assert sorted(len(ids) for ids, _ in renewals(known, 2)) == [1, 2]


def test_loss_renews_nothing_that_is_dead():
    known = knowing(1)
    learn(known, 2, closes_ms=CLOSES + INTERVAL)
    known.look(b"other", 0)
    assert renewals(known, at=BEGAN + TTL) == [((2,), 0)]
    known.look(b"another", 0)
    assert renewals(known, at=BEGAN + 11 * 86_400_000) == []


def test_layer_that_dies_while_it_is_restored_is_not_written():
    known = knowing(1, 2, 3)
    known.look(b"other", 0)
    assert known.next_renewal(1, BEGAN, lambda applied: applied) is not None
    assert renewals(known, at=BEGAN + TTL) == []


def test_loss_restores_no_bucket_that_may_have_been_reset():
    known = knowing(1, 2, 3)
    answers(known, 1, at=CLOSES)  # its renewal waits, too
    known.look(b"born", 7)
    known.look(b"other", 7)
    assert renewals(known) == []
    assert not answers(known, 1)


def test_reset_before_a_loss_was_noticed_has_buckets_confirmed():
    known = knowing(1)
    known.look(b"other", 5)
    assert not answers(known, 1)
    confirm(known)
    assert answers(known, 1)


def test_reset_after_a_loss_has_buckets_confirmed():
    known = knowing(1)
    known.look(b"other", 0)
    assert answers(known, 1)
    known.look(b"other", 5)
    assert not answers(known, 1)


def test_reset_before_a_loss_is_no_reset_after_it():
    known = KnownIds()
    known.look(b"born", 7)
    learn(known, 1)
    known.look(b"other", 0)
    assert answers(known, 1)


def test_use_whose_layer_died_is_not_renewed():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    assert renewals(known, at=BEGAN + TTL) == []
    assert (known.waiting, known.has_renewals) == (0, False)


def test_renewal_that_fails_after_the_node_forgot_something_is_dropped():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    edition = known.edition
    key, renewal = known.next_renewal(1, CLOSES, lambda applied: applied) or (b"", None)
    assert renewal is not None
    known.reset([KEY])
    known.put_back(key, renewal, edition, BEGAN)
    assert not known.has_renewals


def test_bucket_is_confirmed_although_nobody_asks_for_what_it_holds():
    known = knowing(1)
    known.look(b"born", 7)
    learn(known, 2)
    assert known.has_renewals
    confirm(known)
    learn(known, 2)
    assert answers(known, 1, 2)


def test_bucket_in_which_nothing_is_alive_needs_no_confirmation():
    known = knowing(1)
    known.look(b"born", 7)
    learn(known, 2, closes_ms=CLOSES + TTL)
    assert answers(known, 2, at=BEGAN + TTL)


def test_bucket_that_may_have_been_reset_does_not_pass_while_the_store_is_away():
    known = knowing(1)
    assert known.passes(KEY, ALICE, [1], BEGAN)
    known.look(b"born", 7)
    assert not known.passes(KEY, ALICE, [1], BEGAN)


def test_restored_bucket_is_like_any_other():
    known = knowing(1)
    known.look(b"born again", 5)
    key, renewal = known.next_renewal(100, BEGAN, lambda applied: applied) or (b"", None)
    assert renewal is not None
    assert renewal.resets == 0  # a number of after the loss is newer than all that is known
    known.renewed(key, renewal, known.edition, BEGAN, was_reset=False, is_written=True)
    assert answers(known, 1)
    known.look(b"born again", 6)
    assert not answers(known, 1)


def test_birth_that_is_not_known_is_no_loss():
    known = knowing(1)
    known.look(b"", 0)
    known.look(b"born", 0)
    assert renewals(known) == []


def test_renewal_of_a_quota_that_changed_is_dropped():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    assert known.next_renewal(100, BEGAN, lambda _: None) is None
    answers(known, 1, at=CLOSES)
    assert known.next_renewal(100, BEGAN, lambda _: replace_quota(window_ms=1)) is None
    answers(known, 1, at=CLOSES)
    _, renewal = known.next_renewal(100, BEGAN, lambda _: replace_quota(limit=9)) or (b"", None)
    assert renewal is not None
    assert renewal.applied.quota.limit == 9


def test_failed_renewal_waits_again():
    known = knowing(1, 2)
    answers(known, 1, 2, at=CLOSES)
    key, renewal = known.next_renewal(1, BEGAN, lambda applied: applied) or (b"", None)
    assert renewal is not None
    known.put_back(key, renewal, known.edition, BEGAN)
    assert known.waiting == 2
    assert sorted(renewals(known)[0][0]) == [1, 2]


def test_bucket_that_the_store_has_no_room_for_is_not_renewed_for_a_second():
    known = knowing(1, 2)
    answers(known, 1, at=CLOSES)
    key, renewal = known.next_renewal(1, CLOSES, lambda applied: applied) or (b"", None)
    assert renewal is not None
    known.renewed(key, renewal, known.edition, CLOSES, was_reset=False, is_written=False)
    assert answers(known, 1, 2, at=CLOSES + PAUSED_MS - 1)
    assert renewals(known) == []
    assert answers(known, 1, at=CLOSES + PAUSED_MS)
    assert renewals(known) == [((1,), 0)]


def test_store_is_asked_for_what_waits_too_long():
    known = knowing(1, 2)
    assert answers(known, 1, at=CLOSES)
    assert answers(known, 1, 2, at=CLOSES + INTERVAL)
    assert not answers(known, 1, at=CLOSES + INTERVAL + 1)
    assert answers(known, 2, at=CLOSES + INTERVAL + 1)


def test_store_is_asked_when_too_much_waits():
    known = KnownIds(240 * ID_BYTES)
    known.look(b"born", 0)
    for key in (b"one", b"other", b"third"):
        known.learn(key, ALICE, "alice", range(40), CLOSES, BEGAN)
    assert known.answers(b"one", ALICE, range(40), CLOSES)
    assert known.answers(b"other", ALICE, range(10), CLOSES)
    assert known.answers(b"one", ALICE, [1], CLOSES)
    assert not known.answers(b"other", ALICE, [20], CLOSES)
    assert not known.answers(b"third", ALICE, [1], CLOSES)


# Refusals


def test_refusal_is_repeated_for_a_second_at_most():
    known = knowing(1)
    refuse(known)
    assert known.refusal(KEY, ALICE, 9, BEGAN + REFUSED_MS - 1) is not None
    assert known.refusal(KEY, ALICE, 9, BEGAN + REFUSED_MS) is None
    assert known.refusal(KEY, ALICE, 8, BEGAN) is None


def test_refusal_is_repeated_until_it_could_differ():
    known = knowing(1)
    refuse(known, throttle_ms=5)
    found = known.refusal(KEY, ALICE, 9, BEGAN + 4)
    assert found is not None
    assert found.passes_ms == BEGAN + 5
    assert known.refusal(KEY, ALICE, 9, BEGAN + 5) is None


@pytest.mark.parametrize("end", ["write", "reset here", "reset elsewhere", "loss"])
def test_refusal_ends(end: str):
    known = knowing(1)
    refuse(known)
    match end:
        case "write":
            known.wrote(KEY, BEGAN)
        case "reset here":
            known.reset([KEY])
        case "reset elsewhere":
            known.look(b"born", 3)
        case "loss":
            known.look(b"born again", 0)
    assert known.refusal(KEY, ALICE, 9, BEGAN) is None


def test_limit_that_is_changed_and_set_back_ends_refusals():
    """Another node may have admitted the id in between, which is seen from then on."""
    known = knowing(1)
    refuse(known)
    assert known.refusal(KEY, replace_quota(limit=ALICE.quota.limit), 9, BEGAN) is None


def test_no_refusal_is_kept_while_a_record_is_on_its_way():
    known = knowing(1)
    known.wrote(KEY, BEGAN, quiet=True)
    refuse(known)
    assert known.refusal(KEY, ALICE, 9, BEGAN) is None
    refuse(known, at=BEGAN + REFUSED_MS)
    assert known.refusal(KEY, ALICE, 9, BEGAN + REFUSED_MS) is not None


# Room


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.booleans()), max_size=100))
def test_memory_is_bounded(steps: list[tuple[int, int, bool]]):
    most = 40_000
    known = KnownIds(most)
    for at, (who, first, refused) in enumerate(steps):
        key = b"%d" % who
        if refused:
            known.learn_refusal(key, ALICE, "alice", first, "throttle", 500, None, BEGAN + at)
        else:
            ids = range(first, first + 40)
            known.learn(key, ALICE, "alice", ids, CLOSES + 100 * at, BEGAN + 100 * at)
            known.answers(key, ALICE, ids, CLOSES + 100 * at)
        assert known.bytes <= most + BUCKET_BYTES + REFUSAL_BYTES + 40 * ID_BYTES
        waiting = sum(its.bytes for its in known._waiting.values())
        assert known.bytes == sum(bucket.bytes for bucket in known._buckets.values()) + waiting
        assert known.waiting == sum(its.known for its in known._waiting.values())
        assert known.ids == sum(bucket.known for bucket in known._buckets.values())
        for bucket in known._buckets.values():
            assert_counted(bucket, most // 4)


def assert_counted(bucket: KnownBucket, most: int) -> None:
    """The running totals of a bucket are what adding up gives."""
    held = {
        layer.number: [size_of(e) for e, n in bucket.ids.items() if n == layer.number]
        for layer in bucket.layers
    }
    assert {layer.number: (layer.known, layer.bytes) for layer in bucket.layers} == {
        number: (len(sizes), sum(sizes)) for number, sizes in held.items()
    }
    assert sum(map(len, held.values())) == len(bucket.ids)
    assert bucket.refused_bytes == sum(REFUSAL_BYTES + size_of(each) for each in bucket.refusals)
    ids_bytes = sum(map(sum, held.values()))
    assert 0 < bucket.bytes - ids_bytes - bucket.refused_bytes - BUCKET_BYTES < 500
    assert not ids_bytes or bucket.bytes - bucket.refused_bytes <= most
    assert bucket.dies_ms == min((layer.dies_ms for layer in bucket.layers), default=0)


def full(ids: int) -> KnownIds:
    """A node that knows as many ids of alice as there is room for, all of the open layer."""
    known = KnownIds(4 * (BUCKET_BYTES + 400 + ids * ID_BYTES))
    known.look(b"born", 0)
    for n in range(2 * ids):
        learn(known, n)
    assert ids <= known.ids <= ids + 2
    assert answers(known, 0, ids - 1)
    assert not answers(known, 2 * ids - 1)
    return known


def test_id_that_is_used_again_needs_no_more_room():
    known = full(20)
    before = known.ids, known.bytes
    learn(known, *range(20), closes_ms=CLOSES + INTERVAL)
    assert (known.ids, known.bytes) == before
    assert answers(known, *range(20), at=BEGAN + TTL)


def test_new_id_takes_the_room_of_the_oldest_layer():
    known = full(20)
    learn(known, 1, closes_ms=CLOSES + INTERVAL)
    learn(known, 100, closes_ms=CLOSES + INTERVAL)
    assert answers(known, 1, 100, at=CLOSES)
    assert not answers(known, 2, at=CLOSES)
    assert known.ids == 2


def test_ids_that_moved_from_layer_to_layer_take_no_more_memory():
    many = 5_000
    tracemalloc.start()
    known = KnownIds(10**9)
    for layer in range(4):
        for n in range(many):
            learn(known, 2**40 + n, closes_ms=CLOSES + layer * INTERVAL)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert known.ids == many
    assert used < known.bytes


HOSTILE = "hostile texts", "hostile letters", "hostile buckets", "hostile refusals", "hostile waits"
KINDS = "numbers", "texts", "buckets", "refusals", "waits", *HOSTILE


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_not_too_small(kind: str):
    many, is_hostile, what = 5_000, kind in HOSTILE, kind.rsplit(maxsplit=1)[-1]
    tracemalloc.start()
    known = KnownIds(10**9)
    for n in range(many):
        each: int | str = f"transaction-{n:0>500}" if is_hostile else f"transaction-{n}"
        if what == "letters":
            each = "\N{GOTHIC LETTER AHSA}" * 500 + f"{n}"
        if what == "refusals":
            known.learn_refusal(b"%d" % (n // 250), ALICE, "alice", each, "throttle", 500 + n, None, n)
        elif what == "buckets":
            name = f"{n:0>512}" if is_hostile else f"{n}"
            applied = AppliedQuota(QUOTA, "user=*", f"user={name}", f"user={name}")
            known.learn(f"bucket-{name}".encode(), applied, name, [n], CLOSES, BEGAN)
        else:
            known.learn(KEY, ALICE, "alice", [2**40 + n if kind == "numbers" else each], CLOSES, BEGAN)
        if what == "waits":
            assert known.answers(KEY, ALICE, ["".join(str(each))], CLOSES)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < known.bytes < 4 * used, f"{used / many:.0f} bytes, estimated {known.bytes / many:.0f}"


def test_bucket_used_least_lately_is_forgotten():
    names = [b"%d" % n for n in range(8)]
    known = KnownIds(8 * (BUCKET_BYTES + ID_BYTES + 350))
    for key in names:
        known.learn(key, ALICE, "alice", [1], CLOSES, BEGAN)
    known.answers(names[0], ALICE, [1], BEGAN)
    known.learn(b"new", ALICE, "alice", [1], CLOSES, BEGAN)
    forgotten = [key for key in names if not known.answers(key, ALICE, [1], BEGAN)]
    assert forgotten == [names[1]]


# Time


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 40), st.floats(0, 40)), min_size=1, max_size=30),
    st.floats(0, 1e9),
)
def test_store_is_between_the_earliest_and_the_latest_time(
    calls: list[tuple[int, float, float]], ahead: float
):
    time, at = StoreTime(), 0.0
    for pause, there, back in calls:
        at += pause
        time.read(int(at + there + ahead), at, at + there + back)
        at += there + back
        assert (time.at_ms(at) or 0) >= int(at + ahead) >= (time.earliest_ms(at) or 0)


def test_estimated_time_follows_a_clock_that_goes_ahead():
    time = StoreTime()
    assert time.at_ms(0) is None
    time.read(1_000, 0, 2)
    time.read(9_000, 100, 102)
    assert time.at_ms(102) == 9_003
    time.read(9_150, 250, 250.5)
    assert time.at_ms(252) == 9_153


def test_clock_that_is_set_back_is_noticed():
    time = StoreTime()
    assert time.read(9_000, 0, 2) == 0
    assert time.read(9_100, 100, 110) == 0
    assert time.read(1_200, 200, 202) == 9_000 - 2 - (1_200 + 1 - 200)
    assert (time.earliest_ms(202), time.at_ms(202)) == (1_200, 1_203)


def test_everything_is_forgotten_at_once():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    edition = known.edition
    known.forget_all()
    assert not answers(known, 1)
    assert (known.ids, known.bytes, known.waiting, known.has_renewals) == (0, 0, 0, False)
    assert known.edition != edition
