"""`layerswap play`: a local page to compose, ask and compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from layerswap.cli import options, output
from layerswap.cli.merge import RecipeOptions

if TYPE_CHECKING:
    from layerswap.merge.plan import Plan
    from layerswap.play.player import Prompt

LENGTH = 64
"""Default maximum of tokens in an answer."""
OFFERED = 200
"""Number of the lab's prompts on the page."""


def play(
    *,
    described: RecipeOptions,
    target_language: str | None = None,
    prompts: Path | None = None,
    port: Annotated[int | None, Option(min=1, max=65535)] = None,
    browser: Annotated[bool, Option("--browser/--no-browser")] = True,
    device: options.Device = None,
) -> None:
    """Compose two experts on a local page, ask compositions side by side, and compare.

    Without arguments the page opens on the lab. Give two experts as to merge, a recipe, or the
    folder of a study. Prints the page's address; Ctrl-C stops it.

    Example: layerswap play --task-expert math-expert --language-expert swahili-expert

    Options:
        target_language: Target language of the lab or the study.
        prompts FILE: Prompts to offer: lines, or JSON Lines.
        port: Port. (default: 8765, or a free one)
        browser: Open the page in a browser.
    """
    from layerswap.play.player import Player, read_prompts
    from layerswap.play.serve import make_server, open_socket, url_of
    from layerswap.versions import need_extras

    need_extras("the page", "play")
    plan, offered, length = _opened(described, target_language)
    if prompts is not None:
        offered = read_prompts(prompts)
    player = Player(plan, prompts=offered, device=device, length=length)
    socket = open_socket(port)
    server = make_server(player)
    url = url_of(socket)
    output.say(url)
    output.log("Ctrl-C stops the page")
    if browser and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(url)
    try:
        server.run(sockets=[socket])
    except KeyboardInterrupt:
        output.log("stopped")


def _opened(described: RecipeOptions, language: str | None) -> tuple[Plan, Sequence[Prompt], int]:
    """The plan, prompts of the lab, and the length of an answer to begin with."""
    from layerswap.merge.api import make_plan
    from layerswap.study.report import selected_recipe

    if not described.given():
        from layerswap.lab.assets import shipped
        from layerswap.lab.questions import NEW_TOKENS, questions
        from layerswap.lab.quickstart import lab_plan

        lab = shipped()
        target = lab.scarce(language)
        prompts = questions("problem", target, "development")[:OFFERED]
        return lab_plan(lab, target), prompts, NEW_TOKENS
    if described.file is not None and described.file.is_dir():
        recipe = selected_recipe(described.file, language)
        return make_plan(recipe), [], LENGTH
    plan = make_plan(described.recipe(), follow_training=described.file is None)
    return plan, [], LENGTH
