"""`layerswap data`: build a data mix with its card, and list the ready recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def data(
    mix: Annotated[
        str | None,
        typer.Argument(metavar="[MIX.yaml]", help="Mix, or the name of a ready recipe."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder to create.")] = None,
    local: Annotated[
        Path | None, typer.Option(help="Folder of downloaded data sets (OWNER/NAME or NAME).")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer that counts the tokens: a folder or a Hub id.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Largest number of rows read per source, for a trial.")
    ] = None,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the ready recipes and exit.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe and exit.")] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Build a training set from sources and filters.

    Writes shuffled Parquet files and a data card into the folder OUT.

    Example: layerswap data swahili --out data/swahili --local downloads
    """
    from layerswap.errors import RecipeError
    from layerswap.training.mix.schema import mix_text

    if list_recipes:
        _list()
        return
    if mix is None:
        raise RecipeError("give a mix, or --list for the ready recipes")
    if show:
        typer.echo(mix_text(mix), nl=False)
        return
    if out is None:
        raise RecipeError("give --out, the folder to create")
    _build(mix, out, local=local, tokenizer=tokenizer, limit=limit, overwrite=overwrite)


def _build(
    mix: str, out: Path, *, local: Path | None, tokenizer: str | None, limit: int | None,
    overwrite: bool,
) -> None:  # fmt: skip
    from layerswap.checkpoint import refuse_target
    from layerswap.checkpoint.loading import load_tokenizer
    from layerswap.cli.progress import named_progress
    from layerswap.cli.tables import mix_table
    from layerswap.training.mix.build import build_mix
    from layerswap.training.mix.card import CARD, data_card, save_mix, separator_warning
    from layerswap.training.mix.schema import mix_text, parse_mix
    from layerswap.versions import need_extras

    need_extras("a data mix", "train")
    text = mix_text(mix)
    checked = parse_mix(text, where=mix)
    refuse_target(out, marker=CARD, overwrite=overwrite)
    if tokenizer is not None:
        load_tokenizer(
            tokenizer, named=f"--tokenizer {tokenizer}"
        )  # a wrong one fails before the work
    with named_progress() as progress:
        built = build_mix(
            checked, folder=Path(mix).parent, local=local, limit=limit, progress=progress
        )
    card = data_card(built, tokenizer)
    written = save_mix(built, out, recipe=text, card=card, overwrite=overwrite)
    output.say(mix_table(card))
    warning = separator_warning(card, checked.separator)
    if warning:
        output.log(f"warning: {warning}")
    output.say(f"wrote {written}: {len(built.train):,} rows, {len(built.validation):,} held out")
    for warning in card["warnings"]:
        output.log(f"warning: {warning}")
    wanted = checked.total
    if wanted is not None and len(built.examples) < wanted:
        output.say(f"the sources hold {len(built.examples):,} of the {wanted:,} examples wanted")


def _list() -> None:
    from layerswap.training.mix.schema import parse_mix, ready_recipes

    for name, text in ready_recipes().items():
        mix = parse_mix(text, where=name)
        output.say(f"{name}: {mix.description}")
        for source_name, source in mix.sources.items():
            config = f" ({source.config})" if source.config else ""
            output.say(
                f"    {source_name}: {source.id or source.path}{config}, "
                f"{source.licence or 'licence not stated'}"
            )
