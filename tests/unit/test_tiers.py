"""The tables of the two tiers name tests that exist, and the longest path decides."""

from __future__ import annotations

import pytest

from tests.tiers import FIRST, FULL, ROOT, is_full, is_full_throughout, refusal


@pytest.mark.parametrize("path", sorted({*FULL, *FIRST}))
def test_tier_tables_name_what_exists(path: str):
    file, _, test = path.partition("::")
    assert (ROOT / file).exists()
    assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8") if test else True


@pytest.mark.parametrize("path", sorted(FIRST))
def test_first_tier_names_only_exceptions(path: str):
    assert any(path.startswith((f"{folder}/", f"{folder}::")) for folder in FULL)


def test_longest_path_decides():
    assert is_full("tests/system/test_outages.py::test_answers_follow_policy_during_an_outage[valkey-slow]")
    assert not is_full("tests/system/test_vectors.py::test_a_vector[3]")
    assert is_full("tests/contract/test_machine.py::test_planted_fault_is_found[x]")
    assert not is_full("tests/contract/test_machine.py::test_store_and_oracle_agree[valkey]")
    assert not is_full("tests/unit/domain/test_entity.py::test_it")


def test_test_on_redis_runs_in_the_full_tier():
    assert is_full("tests/contract/test_pieces.py::test_it[redis]", ["redis"])
    assert not is_full("tests/contract/test_pieces.py::test_it[valkey]", ["valkey"])


def test_folder_is_skipped_only_if_it_holds_nothing_of_the_first_tier():
    assert is_full_throughout("tests/spark")
    assert is_full_throughout("tests/system/test_outages.py")
    assert not is_full_throughout("tests/system")
    assert not is_full_throughout("tests/contract/test_machine.py")
    assert not is_full_throughout("tests/unit")


def test_narrowed_run_of_the_first_tier_says_where_a_full_test_runs():
    assert refusal("tests/spark/") == (
        "tests/spark is in the full tier (needs Java and Spark): make test-all T=tests/spark"
    )
    assert refusal("tests/unit") == ""
