"""Percentiles, the moments of an open loop, and the best of several rounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.bench.arithmetic import NS, best_ratio, merged, moments, percentile, usual_ratio

HUNDRED = [(bound, 1) for bound in range(1, 101)]


@pytest.mark.parametrize(("share", "bound"), [(0.5, 50), (0.9, 90), (0.99, 99), (0.999, 100), (1.0, 100)])
def test_percentile_is_the_least_bound_that_so_many_do_not_exceed(share, bound):
    assert percentile(HUNDRED, share) == bound


def test_one_slow_value_of_a_hundred_is_above_the_99th_percentile():
    assert percentile([(10, 99), (5_000, 1)], 0.99) == 10
    assert percentile([(10, 98), (5_000, 2)], 0.99) == 5_000


def test_percentile_of_nothing_is_zero():
    assert percentile([], 0.99) == 0


def test_merged_histogram_has_the_values_of_all():
    assert merged([[(10, 1), (30, 2)], [(20, 5), (30, 1)]]) == [(10, 1), (20, 5), (30, 3)]


@pytest.mark.parametrize(("rate", "seconds"), [(1.0, 5.0), (7.0, 3.0), (12_345.6, 1.5), (333.3, 2.0)])
def test_moments_keep_the_rate_without_drift(rate, seconds):
    due = moments(rate, seconds)
    assert len(due) == round(rate * seconds)
    assert due[0] == 0
    assert due[-1] < seconds * NS
    assert due[-1] == pytest.approx((len(due) - 1) * NS / rate, abs=1)
    gaps = {later - earlier for earlier, later in pairwise(due)}
    assert max(gaps) - min(gaps) <= 1


def test_best_ratio_is_of_the_least_echo_and_the_least_work():
    assert best_ratio([20.0, 30.0, 25.0], [14.0, 10.0, 40.0]) == 2.0


def test_a_disturbed_echo_does_not_improve_the_best_ratio():
    quiet = best_ratio([20.0, 20.0], [10.0, 10.0])
    assert best_ratio([20.0, 90.0], [10.0, 10.0]) == quiet
    assert usual_ratio([20.0, 20.0, 90.0], [10.0, 10.0, 10.0]) == quiet


def test_usual_ratio_compares_each_work_with_the_echo_of_its_round():
    assert usual_ratio([20.0, 40.0, 60.0], [10.0, 20.0, 30.0]) == 2.0
