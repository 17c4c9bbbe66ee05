"""`layerswap learn`: learn the coefficients of a merge from a few unlabelled prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def learn(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    task_prompts: Annotated[
        Path, typer.Option(help="Prompts for the task expert: .jsonl, or a text on each line.")
    ],
    language_prompts: Annotated[
        Path, typer.Option(help="Texts for the language expert: .jsonl, or a text on each line.")
    ],
    recipe: Annotated[Path, typer.Option(help="Recipe file to write.")],
    limit: Annotated[int, typer.Option(min=1, help="Number of texts per file.")] = 16,
    max_length: Annotated[int, typer.Option(min=2, help="Number of tokens per text.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 60,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 0.1,
    regularise: Annotated[
        float, typer.Option(min=0, help="Weight of the distance to the start, 0.5.")
    ] = 0.1,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Layer to match, from 0. Default: the middle one.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Learn how much of each expert every place takes, from a few unlabelled prompts.

    The merge is made to behave as each expert does on that expert's own prompts. Holds the base,
    both experts and the merge in memory. Writes the file RECIPE for `layerswap merge`.

    Example: layerswap learn --base b --task-expert math --language-expert swahili
    --task-prompts gsm8k.jsonl --language-prompts sw.txt --recipe learned.yaml
    """
    import yaml

    from layerswap.checkpoint.loading import open_device, pick_device
    from layerswap.cli.progress import step_progress
    from layerswap.compose.recipe import check_recipe
    from layerswap.errors import RecipeError
    from layerswap.evaluation.examples import read_examples, tokenize
    from layerswap.merge.planner import make_plan, plan_tokenizer
    from layerswap.search.coefficients import LearningSettings, learn_coefficients
    from layerswap.versions import need_extras

    need_extras("learning", "models")
    place = pick_device(device)
    open_device(place)
    if not recipe.absolute().parent.is_dir():
        raise RecipeError(f"--recipe: {recipe.parent}: no such folder")
    texts = {"task": read_examples(task_prompts), "language": read_examples(language_prompts)}
    experts = {"task": task_expert, "language": language_expert}
    alone = {"experts": {"task": task_expert}, "soup": {"experts": ["task"]}, "bake": True}
    tokenizer = plan_tokenizer(make_plan(check_recipe(alone, where="--task-expert")))
    prompts = {
        name: [list(tokenize(one, tokenizer, max_length).ids) for one in found[:limit]]
        for name, found in texts.items()
    }
    settings = LearningSettings(
        steps=steps, learning_rate=learning_rate, regularise=regularise, layer=layer, device=place
    )
    with step_progress("learning", steps) as progress:
        found = learn_coefficients(base, experts, prompts, settings=settings, progress=progress)
    data = found.recipe()
    recipe.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    plan = make_plan(check_recipe(data, where=str(recipe)))
    lines = [
        plan,
        f"loss {found.losses[0]:.4f} before, {found.losses[-1]:.4f} after {steps} steps",
        f"wrote {recipe}; write the model: layerswap merge {recipe} --out merged",
    ]
    facts = {
        "losses": found.losses,
        "coefficients": [
            {**place._asdict(), **weights} for place, weights in found.coefficients.items()
        ],
        "recipe": str(recipe),
    }
    output.finish("learn", facts, lines)
