"""`layerswap play`: a local page to compose, ask and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from layerswap.cli import commands, options, output
from layerswap.cli.merge import RecipeOptions
from layerswap.ground.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.experiment.documents import Documents
    from layerswap.merge import Plan


class Shown(commands.OptionGroup):
    """The documents that the map scores, and the prompts that the page offers.

    Options:
        documents FILE.jsonl: Documents for the map: `prompt` and `answer`.
        tasks NAME,...: lm-eval tasks for the map. Repeatable.
        suite NAME: Suite or benchmark for the map.
        target_language: Target language of the lab, the suite or the study.
        prompts FILE: Prompts to offer: lines, or JSON Lines.
    """

    documents: Path | None = None
    tasks: list[str] | None = None
    include: options.Include = None
    suite: str | None = None
    target_language: str | None = None
    prompts: Path | None = None


class Served(commands.OptionGroup):
    """Where the page is served.

    Options:
        port: Port. (default: 8765, or a free one)
        history: File for the history of compositions (JSON Lines).
        browser: Open the page in a browser.
    """

    port: Annotated[int | None, Option(min=1, max=65535)] = None
    history: Path = Path("layerswap-play.jsonl")
    browser: Annotated[bool, Option("--browser/--no-browser")] = True


def play(
    *, described: RecipeOptions, shown: Shown, served: Served, device: options.Device = None
) -> None:
    """Compose two experts on a local page, ask compositions side by side, and compare.

    Without arguments the page opens on the lab. Give two experts as to merge, a recipe, or the
    folder of a study. Prints the page's address; Ctrl-C stops it.

    Example: layerswap play --task-expert math-expert --language-expert swahili-expert
    """
    from layerswap.play.open import read_prompts
    from layerswap.play.player import Player
    from layerswap.play.serve import make_server, open_socket, url_of
    from layerswap.versions import need_extras

    need_extras("the page", "play")
    plan, documents, length = _opened(described, shown)
    prompts = read_prompts(shown.prompts) if shown.prompts else []
    player = Player(plan, documents=documents, prompts=prompts, history=served.history,
                    device=device, length=length)  # fmt: skip
    socket = open_socket(served.port)
    server = make_server(player)
    url = url_of(socket)
    output.say(url)
    output.log("Ctrl-C stops the page")
    if served.browser and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(url)
    try:
        server.run(sockets=[socket])
    except KeyboardInterrupt:
        for lost in player.facts()["lost_paths"]:
            output.log(f"note: {lost}")
        output.log("stopped")


def _opened(described: RecipeOptions, shown: Shown) -> tuple[Plan, Documents | None, int]:
    """The plan, the documents, and the length of an answer to begin with."""
    from layerswap.experiment.documents import Answered, Tasks
    from layerswap.merge.api import make_plan
    from layerswap.play.open import open_study, open_suite, read_prompts

    documents: Documents | None = None
    length = 64
    if not described.given():
        from layerswap.lab.assets import shipped
        from layerswap.lab.questions import NEW_TOKENS
        from layerswap.lab.quickstart import lab_documents, lab_plan

        lab = shipped()
        target = lab.scarce(shown.target_language)
        plan, documents = lab_plan(lab, target), lab_documents(target)
        length = NEW_TOKENS
    elif described.file is not None and described.file.is_dir():
        recipe, documents = open_study(described.file, shown.target_language)
        plan = make_plan(recipe, log=output.log)
    else:
        plan = make_plan(described.recipe(), follow_training=described.file is None, log=output.log)
    if sum(map(bool, (shown.documents, shown.tasks, shown.suite))) > 1:
        raise RecipeError("give one of --documents, --tasks and --suite")
    if shown.documents is not None:
        documents = Answered.split(shown.documents.name, read_prompts(shown.documents))
    elif shown.tasks:
        documents = Tasks(options.task_names(shown.tasks), shown.include or [])
    elif shown.suite:
        if shown.target_language is None:
            raise RecipeError("--suite needs --target-language")
        documents = open_suite(shown.suite, shown.target_language)
    return plan, documents, length
