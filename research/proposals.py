"""How good `layerswap suggest` is on the lab, where the whole grid can be tried.

    python -m research.proposals

For every scarce language and seed: the proposal, where it stands among the 20 compositions of the
quickstart's grid by the share of development problems answered right, and how far down the ranked
list the best composition of the grid comes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from layerswap.compose import Zones, default_zones
from layerswap.deltas import measure_delta, suggest
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import BOTTOMS, TOPS, try_grid


@dataclass(frozen=True)
class Trial:
    """One pair of experts.

    Attributes:
        language: the scarce language.
        seed: of both experts, from 1.
        grid: share of development problems answered right, by zones.
        ranked: the zones of the grid as `suggest` ranks them; the first is its proposal.
        default: the paper's default, scaled to the lab's depth.
    """

    language: str
    seed: int
    grid: Mapping[Zones, float]
    ranked: tuple[Zones, ...]
    default: Zones

    def place(self, zones: Zones) -> tuple[int, int]:
        """Where a composition stands in the grid from 1, first and last place if tied."""
        better = sum(value > self.grid[zones] for value in self.grid.values())
        level = sum(value == self.grid[zones] for value in self.grid.values())
        return better + 1, better + level

    @property
    def tries(self) -> int:
        """Compositions to try down the ranked list until the grid's best is reached."""
        best = max(self.grid.values())
        return 1 + next(i for i, zones in enumerate(self.ranked) if self.grid[zones] == best)

    def __str__(self) -> str:
        chosen, best = self.ranked[0], max(self.grid, key=lambda zones: self.grid[zones])
        parts = [f"{self.language} {self.seed}:"]
        for label, zones in (("proposal", chosen), ("default", self.default), ("best", best)):
            first, last = self.place(zones)
            rank = f"{first}" if first == last else f"{first} to {last}"
            parts.append(f"{label} {zones}: {self.grid[zones]:.3f}, rank {rank};")
        return " ".join([*parts, f"best after {self.tries} tries of {len(self.grid)}"])


def try_proposal(lab: Lab, language: str, seed: int) -> Trial:
    """Propose for one pair of the lab's experts, and try the whole grid."""
    task, expert = lab.task_experts[seed - 1], lab.language_experts[language][seed - 1]
    atlas = measure_delta(lab.base, {"task": task, "language": expert})
    grid = [Zones(bottom, top) for bottom in BOTTOMS for top in TOPS]
    ranked = suggest(atlas, "task", "language", candidates=grid).ranked
    tried = {
        one.zones: share for one, share in try_grid(lab, language, seed - 1).items() if one.zones
    }
    default = default_zones(atlas.layers)
    return Trial(language, seed, tried, tuple(zones for zones, _ in ranked), default)


def main() -> None:
    """Print a line for every pair."""
    lab = shipped()
    for language in lab.languages:
        for seed in range(1, len(lab.task_experts) + 1):
            sys.stdout.write(f"{try_proposal(lab, language, seed)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
