"""Versions of libraries, and the check that optional ones are installed."""

from __future__ import annotations

from typing import Literal

from layerswap.ground.errors import LayerswapError

__version__ = "0.2.0"

Extra = Literal[
    "models", "gguf", "deploy", "report", "play", "lab", "train", "eval", "ray", "slurm"
]
EXTRAS: dict[Extra, tuple[str, ...]] = {
    "models": ("safetensors", "tokenizers", "torch", "transformers"),
    "gguf": ("gguf",),
    "deploy": ("gguf", "jinja2", "torch", "transformers", "xllamacpp"),
    "report": ("jinja2", "matplotlib", "pyarrow"),
    "lab": ("safetensors", "torch", "transformers", "jinja2", "matplotlib", "pyarrow"),
    "play": ("jinja2", "starlette", "torch", "transformers", "uvicorn"),
    "train": ("accelerate", "datasets", "datasketch", "peft", "py3langid", "sklearn", "trl"),
    "eval": (
        "babel", "langcodes", "lm_eval", "py3langid", "sacrebleu", "scikit_posthocs",
        "scipy", "sentence_transformers", "sklearn", "statsmodels",
    ),
    "ray": ("ray",),
    "slurm": ("submitit",),
}  # fmt: skip
"""Packages that each extra installs, by their import names."""
PUBLISHED = False
"""True if a package index has layerswap; otherwise pip installs it from a clone."""


def need_extras(purpose: str, *extras: Extra) -> None:
    """Check that the extras for a purpose are installed, before any work."""
    missing = {extra: missing_of(extra) for extra in extras}
    packages = dict.fromkeys(name for names in missing.values() for name in names)
    if packages:
        short: list[Extra] = [extra for extra, names in missing.items() if names]
        raise LayerswapError(f"{purpose} needs {', '.join(packages)}; {install(*short)}")


def install(*extras: Extra) -> str:
    """Return the command that installs extras."""
    names = ",".join(extras)
    what = f'"layerswap[{names}]"' if PUBLISHED else f'-e ".[{names}]" in the clone of layerswap'
    return f"run pip install {what}"


def missing_import(error: ModuleNotFoundError) -> LayerswapError | None:
    """Return the error for a module that an extra installs; None for another module."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return None if extra is None else LayerswapError(f"{package} is needed; {install(extra)}")


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
