"""The page of a run, its targets and its plots are made from raw JSON alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.bench import results, scale
from tests.bench.generator import Found
from tests.bench.report import page, written
from tests.bench.results import Measured, OpenRun, Pair, Plan, Results, ShedError
from tests.bench.targets import FLOOR, ROWS, TARGETS, ratio, shortfalls
from tests.bench.works import ECHO, selected

ONE, HEAD, BATCH, LOGGED, UNLOGGED, BEFORE, NGINX = (
    "quotagate/one quota",
    "quotagate/one quota/100 callers/one head",
    "quotagate/one quota/batch 100",
    "quotagate/one quota/log all",
    "quotagate/one quota/log off",
    "before/one quota",
    "nginx/one quota",
)


def found(**changed: object) -> Found:
    """A result of the generator, with changes."""
    usual: dict[str, object] = {
        "wall_ns": 10**9,
        "answers": 1_000,
        "expected": 1_000,
        "local": 0,
        "lost": 0,
        "unanswered": 0,
        "fresh": 0,
        "own_ns": 5_000_000,
        "machine_ns": 60_000_000,
        "processor_ns": [20_000_000, 5_000_000],
        "statuses": {"200": 1_000},
        "waits": [(1_000_000, 990), (9_000_000, 10)],
        "lateness": [(1_000, 1_000)],
        "odd": "",
    }
    return Found(**{**usual, **changed})  # type: ignore[arg-type]


def measured(api_us: float, store_us: float = 0.0, p99_ms: float = 1.0, local: float = 0.0) -> Measured:
    return Measured(
        wall_s=1.0,
        answers=100,
        decisions=100,
        api_us=api_us,
        store_us=store_us,
        generator_us=2.0,
        busy=0.9,
        others=0.0,
        right=1.0,
        local=local,
        unanswered=0,
        waits_ms={"p50": 0.5, "p90": 0.7, "p99": p99_ms, "p99.9": 4.0, "max": 8.0},
    )


def pairs(name: str, *rounds: tuple[float, float], store_us: float = 0.0, local: float = 0.0) -> list[Pair]:
    return [
        Pair(
            round=number,
            name=name,
            echo=measured(echo_us),
            work=measured(work_us, store_us / number, local=local),
        )
        for number, (echo_us, work_us) in enumerate(rounds, 1)
    ]


def run(name: str, p99_ms: float, number: int = 1, share: float = 0.5) -> OpenRun:
    return OpenRun(
        round=number, name=name, share=share, capacity=100, rate=50, measured=measured(1, p99_ms=p99_ms)
    )


@pytest.fixture
def made() -> Results:
    names = [ONE, HEAD, BATCH, LOGGED, UNLOGGED, BEFORE, NGINX]
    return Results(
        made_at="2026-11-23 01:00 UTC",
        command="make bench",
        commit="0123456789",
        machine={"processor": "a <fast> one"},
        versions={"Valkey": "9.1.2"},
        cores="server on core 1; store and generator on core 0",
        plan=Plan(),
        skipped={"node": "node is not here", "quotagate/check": "503"},
        works={work.name: work for work in (ECHO, *selected(",".join(names)))},
        pairs=[
            *pairs(ONE, (20, 25), (22, 16), store_us=8),
            *pairs(HEAD, (20, 15)),
            *pairs(BATCH, (20, 10)),
            *pairs(LOGGED, (20, 11)),
            *pairs(UNLOGGED, (20, 10)),
            *pairs(BEFORE, (20, 60), store_us=5),
            *pairs(NGINX, (20, 5)),
        ],
        open_runs=[run(ECHO.name, 1.0), run(ONE, 9.0), run(ONE, 2.0, number=2)],
    )


def reached(results: Results) -> dict[str, tuple[float | None, str | None]]:
    return {target.name: (target.reached(results), target.outcome(results)) for target in TARGETS}


def test_ratios_are_of_the_best_rounds(made):
    assert ratio(made, ONE) == 20 / 16


def test_targets_are_met_or_short_or_not_measured(made):
    figures = reached(made)
    assert figures["decisions for one echo: one quota"] == (1.25, "met")
    assert figures["decisions for one echo: one quota, 100 callers, one head"] == (20 / 15, "above the floor")
    assert figures["decisions for one echo: one quota, batch 100"] == (2.0, "**short**")
    assert figures["decisions for one echo: check"] == (None, None)
    assert figures["store, in times of before: one quota"] == (0.8, "met")
    assert figures["p99 at half of capacity, in times of the echo's"] == (2.0, "met")
    share, outcome = figures["processor time that a log of all decisions adds, as a share of a decision"]
    assert share == pytest.approx(0.1)
    assert outcome == "met"


def test_rows_that_may_not_fall_short_have_no_floor(made):
    firm = {name for name, wanted in ROWS.items() if not wanted.may_fall_short}
    assert {name.partition("/")[2] for name in firm} == {
        "one quota",
        "rate and bytes",
        "refused by a rate",
        "refused id",
        "check",
    }
    floors = {target.name: target.floor / target.wanted for target in TARGETS}
    for name in ROWS:
        words = name.removeprefix("quotagate/").replace("/", ", ")
        wanted = 1.0 if name in firm else FLOOR
        assert floors[f"decisions for one echo: {words}"] == pytest.approx(wanted)
    made.pairs = pairs(ONE, (20, 20))
    assert reached(made)["decisions for one echo: one quota"] == (1.0, "**short**")


def test_shortfalls_name_all_that_misses_its_floor_or_was_not_measured(made):
    found = shortfalls(made)
    assert "decisions for one echo: one quota, batch 100: 2, floor 2.125" in found
    assert "decisions for one echo: check: not measured" in found
    assert not any("one head" in each for each in found)


@pytest.mark.parametrize(("mixed", "outcome"), [(20.5, "met"), (22.0, "**short**")])
def test_odd_requests_are_not_charged_to_the_others(made, mixed, outcome):
    """An ask takes 16 us without odd requests; 0.8 of that is 20 us, and odd ones add 1 us to each."""
    made.pairs += [*pairs(f"{ONE}/1 in 100 odd", (20, mixed)), *pairs(f"{ONE}/all odd", (20, 100))]
    share, found = reached(made)["share of its figure that an ask keeps among 1 % of odd ones"]
    assert share == pytest.approx(16 / ((mixed - 1) / 0.99))
    assert found == outcome


def test_many_callers_are_compared_with_few(made):
    made.pairs += pairs(f"{ONE}/100 callers", (20, 14))
    assert reached(made)["processor time for 100,000 callers, in times of 100"] == (16 / 14, "met")


def test_page_shows_each_target_each_work_and_what_was_skipped(made):
    text = page(made, "results")
    for target in TARGETS:
        assert f"| {target.name} |" in text
    for name in (pair.name for pair in made.pairs):
        assert f"| {name} |" in text
    assert "| decisions for one echo: one quota | at least 1.2 |  | 1.25 | met |" in text
    assert "| decisions for one echo: one quota, batch 100 | at least 2.5 | 2.125 | 2 | **short** |" in text
    assert "**Skipped:** node: node is not here" in text
    assert "**Shed:** quotagate/check: 503" in text
    assert "| echo/one quota | 50% | 50 |" in text


def test_page_warns_of_a_disturbed_machine_and_of_a_shared_core(made):
    assert "Disturbed" not in page(made, "results")
    for pair in made.pairs:
        pair.work.others = 0.3
    made.cores = "server, store and generator share core 0: the server has no core of its own"
    assert "**Disturbed:** other programs had 30%" in page(made, "results")
    assert "**One core:**" in page(made, "results")


def test_results_are_read_as_they_were_written(made, tmp_path: Path):
    path = tmp_path / "results.json"
    results.write(made, path)
    assert results.read(path) == made
    names = [each.name for each in written(path)]
    assert names == ["scale.md", "results.md", "results-cost.svg", "results-latency.svg"]
    page_of_scale = tmp_path / "scale.md"
    page_of_scale.write_text(f"# Old\n\n{scale.BY_HAND}\nBy hand.\n", encoding="utf-8")
    written(path)
    assert page_of_scale.read_text(encoding="utf-8").endswith(f"\n{scale.BY_HAND}\nBy hand.\n")
    assert "# Old" not in page_of_scale.read_text(encoding="utf-8")
    for name in names[2:]:
        drawn = ET.parse(tmp_path / name).getroot()
        assert drawn.tag.endswith("svg")
    assert ONE in (tmp_path / names[2]).read_text(encoding="utf-8")


def test_a_page_of_nothing_can_be_made(made):
    made.pairs, made.open_runs = [], []
    assert "not measured" in page(made, "results")


def test_scale_is_computed_from_processor_times(made):
    made.store_bytes = {"one quota": 200.0}
    made.resident_bytes = {"quotagate/denied": 150 * 2**20, "node/denied": 2**30}
    text = scale.page(made)
    assert "| one quota | 16 | 62,500 | 4 | 250,000 | 4 |" in text
    assert "| one quota | 4.44 | 1.11 | 5.56 |" in text
    assert "| one quota | 0.0229, 0.00571 | 0.229, 0.0571 | 2.29, 0.571 |" in text
    assert "| one quota | 200 | 191 MiB |" in text
    assert "An API process had 150 MiB" in text
    assert "| 50% | 0.5 | 2 | 4 |" in text


def test_measured_takes_each_decision_of_a_batch():
    (work,) = selected(BATCH)
    figures = Measured.of(
        work, found(answers=10, expected=1_000, statuses={"200": 10}), 20_000_000, 5_000_000
    )
    assert (figures.decisions, figures.api_us, figures.store_us) == (1_000, 20.0, 5.0)
    assert figures.generator_us == 500
    assert figures.busy == 0.02
    assert figures.waits_ms["p99"] == 1.0
    assert figures.waits_ms["max"] == 9.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"answers": 0},
        {"statuses": {"200": 990, "500": 10}},
        {"expected": 900},
    ],
)
def test_wrong_answers_end_the_benchmark(wrong):
    (work,) = selected(ONE)
    with pytest.raises(AssertionError, match=ONE):
        Measured.of(work, found(**wrong), 1, 1)


def test_a_shed_ask_spoils_a_measurement():
    (work,) = selected(ONE)
    with pytest.raises(ShedError, match=ONE):
        Measured.of(work, found(statuses={"200": 990, "503": 10}), 1, 1)


def test_a_plan_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert Plan.of_environment() == Plan()
    monkeypatch.setenv("BENCH_ROUNDS", "2")
    monkeypatch.setenv("BENCH_SECONDS", "0.25")
    monkeypatch.setenv("BENCH_WORKS", "node/*")
    assert Plan.of_environment() == Plan(rounds=2, seconds=0.25, works="node/*")
