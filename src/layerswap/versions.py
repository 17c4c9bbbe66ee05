"""Versions of libraries, and the check that optional ones are installed."""

from __future__ import annotations

from typing import Literal

from layerswap.errors import LayerswapError

__version__ = "0.1.0"

Extra = Literal["models", "gguf", "report", "play", "train", "eval"]
EXTRAS: dict[Extra, tuple[str, ...]] = {
    "models": ("safetensors", "torch", "transformers"),
    "gguf": ("gguf",),
    "report": ("jinja2", "matplotlib", "pyarrow"),
    "play": ("jinja2", "starlette", "torch", "transformers", "uvicorn"),
    "train": ("accelerate", "datasets", "datasketch", "peft", "py3langid", "trl"),
    "eval": (
        "babel", "langcodes", "lm_eval", "py3langid", "sacrebleu", "scikit_posthocs",
        "scipy", "statsmodels",
    ),
}  # fmt: skip
"""Packages that each extra installs, by their import names."""


def need_extras(purpose: str, *extras: Extra) -> None:
    """Check that the extras for a purpose are installed, before any work."""
    for extra in extras:
        if missing := missing_of(extra):
            raise LayerswapError(
                f"{purpose} needs {', '.join(missing)}; install layerswap with its extra "
                f'`{extra}`: pip install "layerswap[{extra}]", or in a clone pip install '
                f'".[{extra}]"'
            )


def missing_of(extra: Extra) -> list[str]:
    """Return the packages of an extra that are not installed, by their import names."""
    from importlib.util import find_spec

    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def versions(*packages: str) -> dict[str, str]:
    """Return the version of each package that is installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
