"""The options that several commands share, and the recipe that those of a merge add up to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.compose import Recipe

RecipeFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RECIPE.yaml]",
        help="A recipe or a mergekit configuration; or give --task and --language.",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Where models run: cpu, cuda, mps; a GPU if there is one.")
]
ModelDtype = Annotated[
    str | None,
    typer.Option(metavar="float32|bfloat16|float16", help="Of the models; as stored if not given."),
]
Task = Annotated[
    str | None, typer.Option(help="Task expert: a folder or a Hub id (name[@revision]).")
]
Language = Annotated[str | None, typer.Option(help="Language expert: a folder or a Hub id.")]
Base = Annotated[
    str | None,
    typer.Option(help="What both were fine-tuned from; checked, and needed for magnitude weights."),
]
Bottom = Annotated[
    int | None,
    typer.Option(min=0, help="Layers from the language expert at the input (paper: 5 of 32)."),
]
Top = Annotated[
    int | None,
    typer.Option(min=0, help="Layers from the language expert at the output (paper: 2 of 32)."),
]
BottomTransition = Annotated[
    int | None, typer.Option(min=0, help="Blended layers above the bottom zone.")
]
TopTransition = Annotated[
    int | None, typer.Option(min=0, help="Blended layers below the top zone.")
]
OutsideLayers = Annotated[
    str | None,
    typer.Option(
        "--outside",
        metavar="blend|language|task",
        help="What embeddings, final norm and head take. Default: blend.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="uniform|magnitude|W_TASK,W_LANG", help="Weights of a blend. Default: uniform."
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="task|language|union",
        help="Whose tokenizer the output has, where they differ; rows are aligned by token.",
    ),
]
Bake = Annotated[
    bool | None,
    typer.Option("--bake", help="Write full weights even where both experts are adapters."),
]
Rank = Annotated[
    int | None, typer.Option(min=1, help="Largest rank of a merged adapter. Default: exact.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16", help="Dtype of the output; as stored if not given."
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest size of an output file. Default: 5GB.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a folder that layerswap wrote.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Workers. Default: the usable processors.")
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read pickled weights (.bin), as tensors only."),
]

OUTPUT = ("tokenizer", "bake", "rank", "dtype", "max_shard_size")
"""Options that may stand beside a recipe file."""


def build_recipe(path: Path | None, flags: dict[str, Any]) -> Recipe:
    """The recipe in a file, or the one that the flags of `merge` and `plan` describe.

    With a file, only what is said of the output (`tokenizer`, `bake`, `rank`, `dtype` and
    `max_shard_size`) may be given beside it, and overrides it.

    Raises:
        RecipeError: both or neither are given, or the recipe is wrong.
    """
    from layerswap.compose.recipe import check_recipe, read_recipe

    given = {name: value for name, value in flags.items() if value is not None}
    output: dict[str, Any] = {name: given.pop(name) for name in OUTPUT if name in given}
    if path is not None:
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise RecipeError(f"--{flag} cannot be given beside a recipe; write it into {path}")
        recipe = read_recipe(path).model_dump(exclude_unset=True)
        return check_recipe({**recipe, **output}, where=str(path))
    if not {"task", "language"} <= set(given):
        raise RecipeError("give a recipe file, or both --task and --language")
    data: dict[str, Any] = {
        "experts": {name: given.pop(name) for name in ("task", "language")},
        "weights": _read_weights(given.pop("weights", "uniform")),
        **({"base": given.pop("base")} if "base" in given else {}),
        "swap": given,
        **output,
    }
    return check_recipe(data, where="command line")


def _read_weights(text: str) -> str | dict[str, float]:
    if "," not in text:
        return text
    try:
        task, language = map(float, text.split(","))
    except ValueError:
        raise RecipeError(
            f"--weights: {text!r} is not uniform, magnitude or two numbers like 0.6,0.4"
        ) from None
    return {"task": task, "language": language}


def read_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Values of an option that is given as `NAME=VALUE`, by name.

    Raises:
        RecipeError: a text without a name or a value, or a name given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise RecipeError(f"{option}: {text!r} is not NAME=PATH")
        if name in pairs:
            raise RecipeError(f"{option}: {name!r} is given twice")
        pairs[name] = value
    return pairs
