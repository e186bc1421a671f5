"""The assignment of cores, on machines with one core and with several."""

from __future__ import annotations

import pytest

from tests.bench.arena import cores


@pytest.mark.parametrize(
    ("available", "shown"),
    [
        ({3}, "server, store and generator share core 3: the server has no core of its own"),
        ({0, 1}, "server on core 1; store and generator on core 0"),
        ({2, 5, 7}, "server on core 7; store on core 2; generator on core 5"),
        ({0, 1, 2, 3, 4, 5, 6, 7}, "server on core 7; store on core 0; generator on core 6"),
    ],
)
def test_the_server_has_a_core_of_its_own_if_there_are_two(available, shown):
    assert str(cores(available)) == shown
