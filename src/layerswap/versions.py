"""Which versions of libraries made something, and whether they are there at all."""

from __future__ import annotations

from typing import Literal

from layerswap.errors import LayerswapError

__version__ = "0.1.0"

Extra = Literal["models", "gguf", "report", "train", "eval"]
EXTRAS: dict[Extra, tuple[str, ...]] = {
    "models": ("safetensors", "torch", "transformers"),
    "gguf": ("gguf",),
    "report": ("jinja2", "matplotlib", "pyarrow"),
    "train": ("accelerate", "datasets", "datasketch", "peft", "py3langid", "trl"),
    "eval": (
        "babel", "langcodes", "lm_eval", "py3langid", "sacrebleu", "scikit_posthocs",
        "scipy", "statsmodels",
    ),
}  # fmt: skip
"""What each extra installs, by the names that are imported."""


def need_extras(what: str, *extras: Extra) -> None:
    """Check before any work that extras are installed.

    Args:
        what: that needs them, for the message.
        extras: their names.

    Raises:
        LayerswapError: naming the packages that are missing.
    """
    for extra in extras:
        if missing := missing_of(extra):
            raise LayerswapError(
                f"{what} needs {', '.join(missing)}; install layerswap with its extra `{extra}`: "
                f'pip install "layerswap[{extra}]", or in a clone pip install ".[{extra}]"'
            )


def missing_of(extra: Extra) -> list[str]:
    """What is not installed of an extra, by the names that are imported."""
    from importlib.util import find_spec

    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def versions(*packages: str) -> dict[str, str]:
    """The version of each package that is installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an extra that was done without
    return found
