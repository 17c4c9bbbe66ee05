"""`layerswap plan`: draw the composition of a merge, and write nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.cli import options, output

if TYPE_CHECKING:
    from layerswap.compose import Recipe
    from layerswap.merge.planner import Plan


@options.takes_recipe
def plan(
    recipe: Recipe,
    *,
    follow_training: bool,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Draw a composition and list the size and the sources of its merge.

    Takes the arguments of merge, reads only headers, and writes nothing.

    Example: layerswap plan --task-expert math-expert --language-expert swahili-expert --bottom 5
    """
    from layerswap.merge.planner import make_plan

    made = make_plan(
        recipe,
        allow_pickle=allow_pickle,
        follow_training=follow_training,
        in_place=True,
        log=output.log,
    )
    output.finish("plan", made.to_dict(), described(made))


def described(made: Plan) -> list[object]:
    """A plan for people: its drawing, notes, sources and sizes, as `output.finish` takes them."""
    from rich.filesize import decimal

    facts = made.to_dict()
    files = f"{facts['shards']} file{'s' if facts['shards'] > 1 else ''}"
    copied = facts["copied_bytes"] / max(1, facts["weight_bytes"])
    return [
        made, "",
        *(f"note: {note}" for note in made.notes),
        *(f"{name}: {identity}" for name, identity in facts["experts"].items()),
        f"{facts['tensors']} tensors, {decimal(facts['output_bytes'])} in {files}; "
        f"{copied:.0%} copied bit for bit",
    ]  # fmt: skip
