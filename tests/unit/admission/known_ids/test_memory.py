"""Which producer ids a node knows, until when, and which ids it renews."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.known_ids.memory import (
    BUCKET_BYTES,
    ID_BYTES,
    NEVER,
    PAUSED_MS,
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
    """A node that has read the marks once, and knows that alice's open layer holds these ids."""
    known = KnownIds()
    known.compare(b"born", 0)
    learn(known, *ids, closes_ms=closes_ms)
    return known


def learn(known: KnownIds, *ids: int | str, closes_ms: int = CLOSES) -> None:
    known.learn(KEY, ALICE, "alice", ids, closes_ms, closes_ms - INTERVAL)


def answers(known: KnownIds, *ids: int | str, at: int = BEGAN, applied: AppliedQuota = ALICE) -> bool:
    """Whether the store need not be asked about these ids; their use is noted."""
    return not known.unknown(KEY, applied, ids, at)


def due(known: KnownIds, most: int = 100, at: int = BEGAN) -> list[Renewal]:
    """The renewals of the next call."""
    return known.renewals(most, at, lambda applied: applied)


def renewals(known: KnownIds, most: int = 100, at: int = BEGAN) -> list[tuple[tuple[int | str, ...], int]]:
    """All waiting renewals, each accepted by the store: their ids, and the resets that they name."""
    taken = []
    while found := due(known, most, at):
        for renewal in found:
            taken.append((renewal.ids, renewal.resets))
            answer(known, renewal, at=at)
    return taken


def answer(
    known: KnownIds, renewal: Renewal, *, at: int = BEGAN, open_ms: int = INTERVAL, was_reset: bool = False
) -> None:
    """The store's answer to a renewal."""
    open_ms = open_ms if renewal.ids and not was_reset else 0
    known.renewed(renewal, "reject" if was_reset else "admit", open_ms, at)


def confirm(known: KnownIds, at: int = BEGAN) -> None:
    """Let the store accept all waiting renewals, which confirms that no bucket was reset."""
    renewals(known, at=at)


def test_known_id_is_answered_until_its_layer_dies():
    known = knowing(1, "a")
    assert answers(known, 1)
    assert answers(known, "a", 1)
    assert answers(known, 1, at=BEGAN + TTL - RENEWED_WITHIN_MS)
    assert not answers(known, 1, at=BEGAN + TTL - RENEWED_WITHIN_MS + 1)  # the use could not be renewed
    assert known.knows(KEY, ALICE, [1], BEGAN + TTL - 1)
    assert not known.knows(KEY, ALICE, [1], BEGAN + TTL)


def test_unknown_ids_are_left_to_the_store():
    known = knowing(1, 3)
    assert known.unknown(KEY, ALICE, (2,), BEGAN) == [2]
    assert known.unknown(KEY, ALICE, (1, 2, 3, 4), BEGAN) == [2, 4]
    assert known.unknown(b"bob", ALICE, (1,), BEGAN) == (1,)
    assert not known.knows(KEY, ALICE, (1, 2), BEGAN)
    assert not known.due


def test_known_ids_of_closed_layers_are_asked_for_among_unknown_ones():
    known = knowing(1, 2, 3)
    learn(known, 2, closes_ms=CLOSES + INTERVAL)
    assert known.unknown(KEY, ALICE, (1, 2, 4), CLOSES) == [1, 4]
    assert renewals(known) == [], "the ask itself has their use written"


def test_use_is_renewed_once_the_layer_is_closed():
    known = knowing(1, 2)
    answers(known, 1, at=CLOSES - 1)
    assert renewals(known) == []
    for _ in range(3):
        assert answers(known, 1, at=CLOSES)
    assert renewals(known) == [((1,), 0)]
    assert not known.due


def test_use_is_due_until_the_store_has_written_it():
    known = knowing(1, 2, 3)
    answers(known, 1, 2, at=CLOSES)
    assert [renewal.ids for renewal in due(known, 1)] == [(1,)]
    (renewal,) = due(known, 1)
    answers(known, 3, at=CLOSES)
    assert answers(known, 1, at=CLOSES + 1)
    answer(known, renewal, at=CLOSES + 2)
    assert renewals(known) == [((2, 3), 0)]


def test_use_of_an_id_that_an_ask_wrote_is_not_due():
    known = knowing(1, 2)
    answers(known, 1, 2, at=CLOSES)
    learn(known, 1, closes_ms=CLOSES + INTERVAL)
    assert renewals(known) == [((2,), 0)]


def test_buckets_take_turns():
    known = KnownIds()
    for key in (b"one", b"other"):
        known.learn(key, ALICE, "alice", range(4), CLOSES, BEGAN)
        known.unknown(key, ALICE, range(4), CLOSES)
    turns = []
    while found := due(known, 2):
        turns += [renewal.key for renewal in found]
        for renewal in found:
            answer(known, renewal)
    assert turns == [b"one", b"other"] * 2


def test_renewed_id_is_known_for_longer():
    known = knowing(1, 2)
    learn(known, 1, closes_ms=CLOSES + INTERVAL)
    assert answers(known, 1, at=BEGAN + TTL)
    assert not answers(known, 2, at=BEGAN + TTL)


def test_id_with_an_earlier_end_ends_earlier():
    known = knowing(1)
    learn(known, 1, closes_ms=CLOSES - 10)
    assert not answers(known, 1, at=BEGAN + TTL - 10)
    assert not known.knows(KEY, ALICE, [1], BEGAN + TTL - 10)


@pytest.mark.parametrize("changed", [{"window_ms": 3_001}, {"layers": Layers(INTERVAL, TTL - 1)}])
def test_another_window_or_other_layers_end_the_knowledge(changed: dict[str, int]):
    known = knowing(1)
    other = replace_quota(**changed)
    assert not answers(known, 1, applied=other)
    assert not answers(known, 1)


def test_another_limit_keeps_the_knowledge():
    known = knowing(1)
    assert answers(known, 1, applied=replace_quota(limit=6))


def replace_quota(**changes: object) -> AppliedQuota:
    return AppliedQuota(replace(QUOTA, **changes), ALICE.entity, ALICE.bucket, ALICE.owner)  # type: ignore[arg-type]


# Resets and losses


def test_own_reset_forgets_and_teaches_nothing_from_before():
    known = knowing(1)
    generation = known.generation
    known.reset([KEY])
    assert not answers(known, 1)
    assert known.generation != generation


def test_reset_elsewhere_has_the_bucket_confirmed():
    known = knowing(1)
    known.compare(b"born", 7)
    assert not answers(known, 1)
    learn(known, 2)  # an id learned before the bucket is confirmed is not kept
    assert due(known) == [Renewal(KEY, ALICE, "alice", 0, (), known.generation)]
    confirm(known)
    assert answers(known, 1)
    assert not answers(known, 2)


def test_bucket_that_was_reset_elsewhere_is_forgotten():
    known = knowing(1)
    known.compare(b"born", 7)
    assert not answers(known, 1)
    (renewal,) = due(known)
    answer(known, renewal, was_reset=True)
    assert not answers(known, 1)
    assert renewals(known) == []


def test_answer_from_before_another_reset_confirms_nothing():
    known = knowing(1)
    known.compare(b"born", 7)
    assert not answers(known, 1)
    (renewal,) = due(known)
    known.compare(b"born", 8)
    answer(known, renewal)
    assert not answers(known, 1)
    assert due(known) == [renewal._replace(generation=known.generation)]


def test_renewal_that_the_store_could_not_decide_confirms_nothing_and_is_not_repeated():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    known.compare(b"born", 7)
    (renewal,) = due(known)
    assert renewal.ids == (1,)
    known.renewed(renewal, None, 0, CLOSES)
    assert not known.due
    assert not answers(known, 1, at=CLOSES)
    assert [(each.ids, each.resets) for each in due(known)] == [((), 0)]


def test_loss_keeps_the_answers_and_renews_everything():
    known = knowing(1, 2, 3)
    generation = known.generation
    known.compare(b"born again", 0)
    assert known.generation != generation
    assert answers(known, 1, 2)
    assert sorted(len(ids) for ids, _ in renewals(known, 2)) == [1, 2]
    assert answers(known, 1, 2, 3)


def test_loss_while_a_renewal_is_on_its_way_renews_that_again():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    (renewal,) = due(known)
    known.compare(b"born again", 0)
    answer(known, renewal, at=CLOSES)  # the renewal was written to the lost state
    assert renewals(known) == [((1,), 0)]


def test_ids_that_are_not_restored_yet_are_asked_for_among_unknown_ones():
    known = knowing(1, 2)
    learn(known, 2, closes_ms=CLOSES + INTERVAL)
    known.compare(b"born again", 0)
    assert known.unknown(KEY, ALICE, (1, 2, 3), CLOSES) == [1, 2, 3]


@pytest.mark.parametrize("resets", [0, 7])
def test_loss_keeps_the_answers_unless_any_bucket_was_reset_since(resets: int):
    known = KnownIds()
    known.compare(b"born", resets)
    learn(known, 1)
    known.compare(b"born again", resets)
    assert answers(known, 1)
    assert due(known)[0].resets == 0, "the store may have lost the number of that reset"
    known.compare(b"born once more", resets + 1)
    assert not answers(known, 1)
    assert due(known)[0].resets == 0


def test_restored_ids_are_taken_for_those_used_lately_first():
    known = KnownIds()
    known.compare(b"born", 0)
    for key in (b"one", b"other"):
        known.learn(key, ALICE, "alice", [1], CLOSES, BEGAN)
    known.compare(b"born again", 0)
    assert [renewal.key for renewal in due(known)] == [b"other", b"one"]


def test_loss_renews_nothing_that_is_dead():
    known = knowing(1)
    learn(known, 2, closes_ms=CLOSES + INTERVAL)
    known.compare(b"other", 0)
    assert renewals(known, at=BEGAN + TTL) == [((2,), 0)]
    known.compare(b"another", 0)
    assert renewals(known, at=BEGAN + 11 * 86_400_000) == []


def test_layer_that_dies_while_it_is_restored_is_not_written():
    known = knowing(1, 2, 3)
    known.compare(b"other", 0)
    (renewal,) = due(known, 1)
    answer(known, renewal)
    assert renewals(known, at=BEGAN + TTL) == []
    assert known.ids == 1


def test_loss_restores_no_bucket_that_may_have_been_reset():
    known = knowing(1, 2, 3)
    answers(known, 1, at=CLOSES)  # its renewal waits, too
    known.compare(b"born", 7)
    known.compare(b"other", 7)
    assert renewals(known) == []
    assert not answers(known, 1)


def test_reset_before_a_loss_was_noticed_has_buckets_confirmed():
    known = knowing(1)
    known.compare(b"other", 5)
    assert not answers(known, 1)
    confirm(known)
    assert answers(known, 1)


def test_reset_after_a_loss_has_buckets_confirmed():
    known = knowing(1)
    known.compare(b"other", 0)
    assert answers(known, 1)
    known.compare(b"other", 5)
    assert not answers(known, 1)


def test_reset_before_a_loss_is_no_reset_after_it():
    known = KnownIds()
    known.compare(b"born", 7)
    learn(known, 1)
    known.compare(b"other", 0)
    assert answers(known, 1)


def test_use_whose_layer_died_is_not_renewed():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    assert renewals(known, at=BEGAN + TTL) == []
    assert (known.ids, known.due) == (0, {})


def test_renewal_of_a_bucket_that_the_node_forgot_is_dropped():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    (renewal,) = due(known)
    known.reset([KEY])
    assert not known.due
    answer(known, renewal)
    assert not answers(known, 1, at=CLOSES)


def test_bucket_is_confirmed_although_nobody_asks_for_what_it_holds():
    known = knowing(1)
    known.compare(b"born", 7)
    learn(known, 2)
    assert known.due
    confirm(known)
    learn(known, 2)
    assert answers(known, 1, 2)


def test_bucket_in_which_nothing_is_alive_needs_no_confirmation():
    known = knowing(1)
    known.compare(b"born", 7)
    learn(known, 2, closes_ms=CLOSES + TTL)
    assert answers(known, 2, at=BEGAN + TTL)


def test_bucket_that_may_have_been_reset_does_not_pass_while_the_store_is_away():
    known = knowing(1)
    assert known.knows(KEY, ALICE, [1], BEGAN)
    known.compare(b"born", 7)
    assert not known.knows(KEY, ALICE, [1], BEGAN)


def test_restored_bucket_is_like_any_other():
    known = knowing(1)
    known.compare(b"born again", 5)
    (renewal,) = due(known)
    assert renewal.resets == 0  # any reset after the loss has a larger number
    answer(known, renewal)
    assert answers(known, 1)
    known.compare(b"born again", 6)
    assert not answers(known, 1)


def test_birth_that_is_not_known_is_no_loss():
    known = knowing(1)
    known.compare(b"", 0)
    known.compare(b"born", 0)
    assert renewals(known) == []


@pytest.mark.parametrize("now", [None, {"window_ms": 1}])
def test_renewal_of_a_quota_that_changed_is_dropped_with_all_that_is_known(now: dict[str, int] | None):
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    assert known.renewals(100, CLOSES, lambda _: replace_quota(**now) if now else None) == []
    assert (known.ids, known.due) == (0, {})


def test_renewal_is_planned_by_the_quota_in_force():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    (renewal,) = known.renewals(100, CLOSES, lambda _: replace_quota(limit=9))
    assert renewal.applied.quota.limit == 9


@pytest.mark.parametrize("changed", [{"limit": 9}, {"window_ms": 3_001}])
def test_answer_to_a_renewal_by_a_former_quota_is_ignored(changed: dict[str, int]):
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    (renewal,) = due(known)
    known.learn(KEY, replace_quota(**changed), "alice", [2], CLOSES + INTERVAL, CLOSES)
    answer(known, renewal, was_reset=True)
    assert answers(known, 2, at=CLOSES, applied=replace_quota(**changed))
    assert [renewal.ids for renewal in due(known)] == ([] if "window_ms" in changed else [(1,)])


def test_bucket_that_the_store_has_no_room_for_is_not_renewed_for_a_second():
    known = knowing(1, 2)
    answers(known, 1, at=CLOSES)
    (renewal,) = due(known)
    answer(known, renewal, at=CLOSES, open_ms=0)
    assert answers(known, 1, 2, at=CLOSES + PAUSED_MS - 1)
    assert renewals(known) == []
    assert answers(known, 1, at=CLOSES + PAUSED_MS)
    assert renewals(known) == [((1,), 0)]


def test_bucket_whose_uses_wait_is_forgotten_last():
    known = KnownIds(8 * (BUCKET_BYTES + ID_BYTES + 350))
    used, *others = [b"%d" % n for n in range(8)]
    known.learn(used, ALICE, "alice", [1], CLOSES, BEGAN)
    known.unknown(used, ALICE, [1], CLOSES)
    for key in others * 2:
        known.learn(key + b"more", ALICE, "alice", [1, 2, 3], CLOSES + INTERVAL, CLOSES)
    assert [(renewal.key, renewal.ids) for renewal in due(known)] == [(used, (1,))]


# Room


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(0, 9)), max_size=100))
def test_memory_is_bounded(steps: list[tuple[int, int, int]]):
    most = 40_000
    known = KnownIds(most)
    for at, (who, first, then) in enumerate(steps):
        key, now = b"%d" % who, CLOSES + 100 * at
        ids = range(first, first + 40)
        known.learn(key, ALICE, "alice", ids, now, now - INTERVAL)
        known.unknown(key, ALICE, ids, now)
        if then == 0:
            known.compare(b"%d" % at, 0)
        elif then < 5:
            for renewal in due(known, 30, now):
                answer(known, renewal, at=now, open_ms=INTERVAL * (then > 1))
        assert known.bytes <= most + BUCKET_BYTES
        assert known.bytes == sum(bucket.bytes for bucket in known._buckets.values())
        assert known.ids == sum(len(bucket.ids) + len(bucket.due) for bucket in known._buckets.values())
        assert {key for key, bucket in known._buckets.items() if bucket.due} <= set(known.due)
        assert known.due.keys() <= known._buckets.keys()
        for bucket in known._buckets.values():
            assert_counted(bucket, most // 4)


def assert_counted(bucket: KnownBucket, most: int) -> None:
    """Check the running totals of a bucket against sums over its ids."""
    held = [size_of(each) for ids in (bucket.ids, bucket.due) for each in ids]
    assert len(held) == len(bucket.ids | bucket.due)
    assert 0 < bucket.bytes - sum(held) - BUCKET_BYTES < 500
    assert not held or bucket.bytes <= most
    assert bucket.oldest_ms <= min(bucket.ids.values(), default=NEVER)


def full(ids: int) -> KnownIds:
    """A node that knows as many ids of alice as there is room for, all in the open layer."""
    known = KnownIds(4 * (BUCKET_BYTES + 400 + ids * ID_BYTES))
    known.compare(b"born", 0)
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


HOSTILE = "hostile texts", "hostile letters", "hostile buckets", "hostile waits"
KINDS = "numbers", "texts", "buckets", "waits", *HOSTILE


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_not_too_small(kind: str):
    many, is_hostile, what = 5_000, kind in HOSTILE, kind.rsplit(maxsplit=1)[-1]
    tracemalloc.start()
    known = KnownIds(10**9)
    for n in range(many):
        each: int | str = f"transaction-{n:0>500}" if is_hostile else f"transaction-{n}"
        if what == "letters":
            each = "\N{GOTHIC LETTER AHSA}" * 500 + f"{n}"
        if what == "buckets":
            name = f"{n:0>512}" if is_hostile else f"{n}"
            applied = AppliedQuota(QUOTA, "user=*", f"user={name}", f"user={name}")
            known.learn(f"bucket-{name}".encode(), applied, name, [n], CLOSES, BEGAN)
        else:
            known.learn(KEY, ALICE, "alice", [2**40 + n if kind == "numbers" else each], CLOSES, BEGAN)
        if what == "waits":
            assert not known.unknown(KEY, ALICE, ["".join(str(each))], CLOSES)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < known.bytes < 4 * used, f"{used / many:.0f} bytes, estimated {known.bytes / many:.0f}"


def test_ids_that_all_wait_at_once_take_no_more_memory():
    many = 5_000
    tracemalloc.start()
    known = KnownIds(10**9)
    for n in range(many):
        learn(known, 2**40 + n)
    for n in range(many):
        assert answers(known, 2**40 + n, at=CLOSES)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < known.bytes


def test_bucket_used_least_lately_is_forgotten():
    names = [b"%d" % n for n in range(8)]
    known = KnownIds(8 * (BUCKET_BYTES + ID_BYTES + 350))
    for key in names:
        known.learn(key, ALICE, "alice", [1], CLOSES, BEGAN)
    known.unknown(names[0], ALICE, [1], BEGAN)
    known.learn(b"new", ALICE, "alice", [1], CLOSES, BEGAN)
    forgotten = [key for key in names if known.unknown(key, ALICE, [1], BEGAN)]
    assert forgotten == [names[1]]


# Time


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 40), st.floats(0, 40)), min_size=1, max_size=30),
    st.floats(0, 1e9),
)
def test_estimated_time_is_never_behind_the_store(calls: list[tuple[int, float, float]], ahead: float):
    time, at = StoreTime(), 0.0
    for pause, there, back in calls:
        at += pause
        time.read(int(at + there + ahead), at, at + there + back)
        at += there + back
        assert (time.at_ms(at) or 0) >= int(at + ahead)


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
    assert not time.read(9_000, 0, 2)
    assert not time.read(9_100, 100, 110)
    assert not time.read(8_196, 199, 202)  # it may have been no more than a second
    assert time.at_ms(202) == 8_200
    assert time.read(1_200, 1_200, 1_202)
    assert time.at_ms(1_202) == 1_203


def test_clock_that_is_set_back_by_a_second_is_noticed_whatever_the_way_took():
    for fell_ms, is_noticed in ((1_000, False), (1_001, True)):
        time = StoreTime()
        time.read(9_000, 0, 5)
        least_ahead_ms = 9_000 - 5
        assert time.read(least_ahead_ms - fell_ms - 1, 0, 5) is is_noticed


def test_everything_is_forgotten_at_once():
    known = knowing(1)
    answers(known, 1, at=CLOSES)
    generation = known.generation
    known.forget_all()
    assert not answers(known, 1)
    assert (known.ids, known.bytes, known.due) == (0, 0, {})
    assert known.generation != generation
