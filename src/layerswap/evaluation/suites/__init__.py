"""The papers' benchmarks and suites: one YAML file each, read by `suites.py`."""

from __future__ import annotations

from pathlib import Path


def suite_names() -> list[str]:
    """List the benchmarks and suites of the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))
