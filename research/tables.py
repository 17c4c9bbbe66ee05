"""What holds the tables in docs/tables that no recorded answers make.

    python -m research.tables    # write docs/tables/methods.csv

`research.transfer` and `research.rows` make the tables of recorded answers, and this module that of
the methods. Those of `MEASURED` come from trainings whose answers were not kept: these tables are
the record, and a test checks that counts, intervals, differences and pages agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from layerswap.methods import METHODS
from layerswap.methods.method import Method
from research.markdown import Table, table

CSV = Path(__file__).parent.parent / "docs" / "tables"
MEASURED: Mapping[str, tuple[int, str]] = {
    "lab-scores": (0, "python -m research ask shipped --seeds 5 --n 1000"),
    "lab-grid": (0, "python -m research ask shipped --seeds 5 --n 1000"),
    "lab-questions": (500, "python -m research ask NAME --seeds 1"),
    "lab-distance": (
        0,
        "worlds that share other words; `lab-scores` has the shipped one",
    ),
    "lab-study": (500, "python -m research.lab study --runs 1 --n 500"),
    "lab-layers-put-back": (0, "a task expert in full and one in part, with a layer of the base"),
    "lab-first-world": (0, "the lab as it was before commit 57b669a7"),
    "lab-regimes": (0, "the lab as it was before commit 57b669a7"),
    "types": (40, "layerswap deploy --type, with ten lines of FLORES a language"),
}
"""Documents of each score (0 if it is a mean over models), and what was measured."""
PROSE: Mapping[str, str] = {
    "tried": "ideas that were dropped: most of their code is gone, and with it what could be rerun",
    "mergekit-differences": "words; tests/merge/test_mergekit_parity.py merges by both programs",
}
"""Tables of words, and why nothing computes them."""


def methods_table() -> Table:
    """Tabulate every merge method of the registry."""
    head = ["method", "parameters (default)", "experts", "needs the base", "from"]
    return table(head, [_row(method) for method in METHODS.values()], words=5)


def _row(method: Method) -> list[str]:
    defaults = {name: parameter.default for name, parameter in method.parameters.items()}
    shown = [
        f"{name} ({default if isinstance(default, str) else f'{default:g}'})"
        for name, default in defaults.items()
    ]
    few, many = method.experts
    experts = {(1, 1): "one", (2, 2): "two"}.get((few, int(min(many, 9))), f"{few} or more")
    base = "yes" if method.needs_base(defaults) else "no"
    if "origin" in defaults:
        base = "with origin: base"
    return [method.name, ", ".join(shown), experts, base, method.paper]


if __name__ == "__main__":
    (CSV / "methods.csv").write_text(methods_table().csv(), "utf-8", newline="\n")
