"""Proposals judged on the lab, where the whole grid can be tried."""

from __future__ import annotations

import pytest
from research.proposals import Trial, try_proposal

from layerswap.compose import Zones
from layerswap.lab.assets import shipped


def test_places_and_tries_are_counted_from_one():
    grid = {Zones(0, 0): 0.5, Zones(1, 0): 0.7, Zones(0, 1): 0.5, Zones(1, 1): 0.6}
    ranked = (Zones(0, 1), Zones(1, 1), Zones(1, 0), Zones(0, 0))
    trial = Trial("furo", 2, grid, ranked, Zones(1, 1))
    assert trial.place(Zones(1, 0)) == (1, 1)
    assert trial.place(Zones(0, 0)) == (3, 4)
    assert trial.tries == 3
    assert str(trial) == (
        "furo 2: proposal bottom 0, top 1: 0.500, rank 3 to 4; default bottom 1, top 1: 0.600, "
        "rank 2; best bottom 1, top 0: 0.700, rank 1; best after 3 tries of 4"
    )


@pytest.mark.slow
def test_the_proposal_is_better_than_taking_no_layer():
    for language in shipped().languages:
        found = try_proposal(shipped(), language, 2)
        assert found.ranked[0] == Zones(2, 1)
        assert found.place(found.ranked[0])[1] < found.place(Zones(0, 0))[0]
