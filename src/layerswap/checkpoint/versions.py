"""Which versions of libraries made something."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def versions(*packages: str) -> dict[str, str]:
    """The version of each package that is installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that was done without
    return found
