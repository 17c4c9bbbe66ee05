"""`layerswap data` and `layerswap train`: build training sets, and train experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from layerswap.cli import options, output
from layerswap.ground.errors import RecipeError


def data(
    mix: str | None = None,
    *,
    out: Path | None = None,
    values: Annotated[list[str] | None, Option("--set")] = None,
    local: Path | None = None,
    limit: Annotated[int | None, Option(min=1)] = None,
    list_recipes: Annotated[bool, Option("--list")] = False,
    show: bool = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Build a training set from sources and filters.

    Writes shuffled Parquet files and a data card into the folder OUT.

    Example: layerswap data swahili --out data/swahili --local downloads

    Options:
        mix [MIX.yaml]: Mix, or the name of a ready recipe.
        out: Folder to create.
        values NAME=VALUE: Parameter of the mix. Repeatable.
        local: Folder of downloaded data sets (OWNER/NAME or NAME).
        limit: Largest number of rows read per source, for a trial.
        list_recipes: List the ready recipes and exit.
        show: Print the mix and exit.
    """
    from layerswap.training.mix.schema import mix_text

    if list_recipes:
        _list_recipes()
        return
    if mix is None:
        raise RecipeError("give a mix, or --list for the ready recipes")
    parameters = options.read_pairs("--set", values, "NAME=VALUE")
    if show:
        typer.echo(mix_text(mix, parameters), nl=False)
        return
    if out is None:
        raise RecipeError("give --out, the folder to create")
    from layerswap.checkpoint import refuse_target
    from layerswap.cli.tables import mix_table
    from layerswap.training.mix.build import build_mix
    from layerswap.training.mix.card import CARD, data_card, first_rows, save_mix
    from layerswap.training.mix.schema import read_mix
    from layerswap.versions import need_extras

    need_extras("a data mix", "train")
    checked, text = read_mix(mix, parameters), mix_text(mix, parameters)
    refuse_target(out, marker=CARD, overwrite=overwrite)
    with output.named_progress("rows") as progress:
        built = build_mix(
            checked, folder=Path(mix).parent, local=local, limit=limit, progress=progress
        )
    card = data_card(built)
    written = save_mix(built, out, recipe=text, card=card, overwrite=overwrite)
    output.say(mix_table(card))
    for line in first_rows(built):
        output.say(line)
    output.say(f"wrote {written}: {len(built.train):,} rows, {len(built.validation):,} held out")
    for warning in card["warnings"]:
        output.log(f"warning: {warning}")
    if limit is None and checked.total is not None and len(built.examples) < checked.total:
        output.say(
            f"the sources hold {len(built.examples):,} of the {checked.total:,} examples in "
            "`total`; write total: all"
        )


def _list_recipes() -> None:
    from layerswap.training.mix.schema import missing_parameters, read_mix, ready_recipes

    for name in ready_recipes():
        missing = missing_parameters(name)
        if missing:
            output.say(
                f"{name}: a template; give {' '.join(f'--set {key}=...' for key in missing)}"
            )
            continue
        mix = read_mix(name)
        output.say(f"{name}: {mix.description}")
        for source_name, source in mix.sources.items():
            config = f" ({source.config})" if source.config else ""
            output.say(
                f"    {source_name}: {source.named}{config}, "
                f"{source.licence or 'licence not stated'}"
            )


def train(
    spec: Path | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: options.Overwrite = False,
    launch_config: str | None = None,
) -> None:
    """Train an expert: full or partial fine-tuning, LoRA, or two data sets in turns.

    Writes the expert and its checkpoints into the folder OUT. On several devices, run
    accelerate launch -m layerswap train EXPERT.yaml --out OUT.

    Example: layerswap train swahili.yaml --out experts/swahili

    Options:
        spec EXPERT.yaml: Base, data and settings.
        out: Folder to create.
        resume: Resume from the newest checkpoint in OUT.
        launch_config: Print an accelerate configuration (ddp, fsdp2) and exit.
    """
    if launch_config is not None:
        from layerswap.training.expert.hyperparameters import launch_configuration

        typer.echo(launch_configuration(launch_config), nl=False)
        return
    if spec is None or out is None:
        raise RecipeError("give EXPERT.yaml, and --out, the folder to create")
    from layerswap.training.expert import trainer

    written = trainer.train(spec, out, resume=resume, overwrite=overwrite, log=output.log)
    output.say(f"wrote {written}")
