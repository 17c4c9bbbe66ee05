"""Studies by file or by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from layerswap.compose.mistakes import nearest
from layerswap.errors import RecipeError
from layerswap.study.spec import StudySpec, read_study


def find_study(study: str) -> tuple[StudySpec, Path]:
    """A study, and the folder that its paths are relative to.

    Args:
        study: a file, or the name of a study that ships with the package.

    Raises:
        RecipeError: there is none, or it is wrong.
    """
    path = Path(study)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return read_study(path), path.parent
    known = ready_studies()
    if study not in known:
        hint = nearest(study, list(known)) or f"; there is {', '.join(known)}"
        raise RecipeError(f"{study}: no such file, and no such ready study{hint}")
    return read_study(known[study]), Path()


def ready_studies() -> dict[str, Path]:
    """The files of the studies that ship with the package, by name."""
    folder = Path(str(resources.files("layerswap.study") / "ready"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
