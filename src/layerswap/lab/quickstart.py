"""The main job on the lab: from two experts to a proven merged model, with a report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap import __version__
from layerswap.checkpoint import atomic_folder, refuse_target
from layerswap.compose import Zones, default_zones
from layerswap.delta.atlas import Atlas, measure_delta
from layerswap.errors import RecipeError
from layerswap.evaluate.statistics import Interval, mean_interval, paired_difference
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.build import RECORD, read_record
from layerswap.lab.contenders import Answers, Shown, answer_all, contenders, in_memory
from layerswap.lab.scoring import (
    MEASURES,
    Measure,
    correct,
    load,
    questions,
    score_model,
)
from layerswap.lab.skills import Split
from layerswap.merge import Plan, swap

if TYPE_CHECKING:
    pass

RESULTS = "results.json"
BOTTOMS, TOPS = range(5), range(3)
"""The grid of zones that is tried, in layers."""
DEVELOPMENT_QUESTIONS = 500
TEST_QUESTIONS = 1000

Say = Callable[[str], None]
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar from a label and a total; gives the function that advances it."""


@dataclass(frozen=True)
class Outcome:
    """Everything the quickstart measured.

    Attributes:
        language: the target language.
        source: the source language.
        grid: share of right answers on the development split, by zones.
        best: the zones with the largest share.
        default: the paper's zones, scaled to the lab's depth.
        plan: the plan of the best zones.
        answers: per model and measure, right or wrong per test question.
        examples: the first test problems in the target language, with what each model wrote.
        change: what fine-tuning changed in both experts.
        seconds: how long it took, wall clock.
    """

    language: str
    source: str
    grid: Mapping[Zones, float]
    best: Zones
    default: Zones
    plan: Plan
    answers: Mapping[str, Answers]
    examples: Sequence[Shown]
    change: Atlas
    seconds: float

    def intervals(self) -> dict[str, dict[Measure, Interval]]:
        """Mean and 95% bootstrap interval per model and measure."""
        return {
            model: {measure: mean_interval(right) for measure, right in answers.items()}
            for model, answers in self.answers.items()
        }

    def differences(self) -> dict[str, Interval]:
        """Paired difference of the best swap to every other model, on the target-language task."""
        best = self.answers["swap_best"]["task_target"]
        return {
            model: paired_difference(best, answers["task_target"])
            for model, answers in self.answers.items()
            if model != "swap_best"
        }


def run(
    out: str | os.PathLike[str],
    *,
    language: str | None = None,
    overwrite: bool = False,
    say: Say,
    progress: Bar,
) -> tuple[Path, Outcome]:
    """Take the lab's experts, try the grid, write the best swap, score, and report.

    The composition is chosen on the development split and judged on the test split.

    Args:
        out: the folder to create: `results.json`, `report.html` and `merged/`.
        language: a scarce language of the lab; the nearest to the source when None.
        overwrite: replace the folder of an earlier run.
        say: prints a line for the user.
        progress: opens a progress bar.

    Returns:
        The folder, and what was measured.

    Raises:
        LayerswapError: the folder exists, or the lab has no such language.
    """
    from layerswap.lab.story import write_story

    target = Path(out).expanduser().absolute()
    refuse_target(target, marker=RESULTS, overwrite=overwrite)
    lab = shipped()
    chosen = pick_language(lab, language)
    started = time.perf_counter()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts[chosen][0])
    with progress("trying compositions", len(BOTTOMS) * len(TOPS)) as advance:
        grid = try_grid(plan, lab, chosen, advance)
    # Of equally good compositions, the one that departs least from the task expert.
    best = max(grid, key=lambda zones: (grid[zones], -zones.bottom - zones.top))
    best_plan = plan.grid(bottom=[best.bottom], top=[best.top])[0]
    say(f"The composition that answers most development problems in {chosen}:\n\n{best_plan}\n")
    with atomic_folder(target, marker=RESULTS, overwrite=overwrite) as folder:
        best_plan.save(folder / "merged")
        with progress("scoring on the test split", 7 * len(MEASURES)) as advance:
            answers, examples = answer_all(
                contenders(lab, chosen, plan, folder / "merged"),
                lab,
                chosen,
                TEST_QUESTIONS,
                advance,
            )
        experts = {"task expert": lab.task_experts[0],
                   "language expert": lab.language_experts[chosen][0]}  # fmt: skip
        outcome = Outcome(
            chosen, lab.world.source.name, grid, best, default_zones(plan.composition.layers),
            best_plan, answers, examples, measure_delta(lab.base, experts),
            time.perf_counter() - started,
        )  # fmt: skip
        (folder / RESULTS).write_text(json.dumps(results(outcome), indent=2) + "\n", "utf-8")
        write_story(folder / "report.html", outcome)
    return target, outcome


def results(outcome: Outcome) -> dict[str, Any]:
    """The content of `results.json`: the models' scores, and how they came about."""
    return {
        **{
            model: {measure: asdict(interval) for measure, interval in measures.items()}
            for model, measures in outcome.intervals().items()
        },
        "composition": {
            **asdict(outcome.best),
            "resolved": outcome.plan.composition.to_dict(),
            "chosen_on": {"split": "development", "questions": DEVELOPMENT_QUESTIONS},
        },
        "differences_of_swap_best": {
            model: asdict(interval) for model, interval in outcome.differences().items()
        },
        "grid": [{**asdict(zones), "task_target": share} for zones, share in outcome.grid.items()],
        "target_language": outcome.language,
        "source_language": outcome.source,
        "seconds": round(outcome.seconds, 1),
        "layerswap_version": __version__,
    }


def score_folders(
    models: Sequence[Path], *, language: str | None, split: Split, n: int, progress: Bar
) -> dict[str, dict[Measure, Interval]]:
    """Scores of checkpoint folders, or of whole labs, on the lab's questions, by folder name.

    Raises:
        LayerswapError: a folder holds no checkpoint, or the lab has no such language.
    """
    lab = shipped()
    chosen = pick_language(lab, language)
    scores: dict[str, dict[Measure, Interval]] = {}
    folders = [found for folder in models for found in _checkpoints(folder)]
    names = {folder.name for folder in folders}
    with progress("scoring", len(folders)) as advance:
        for folder in folders:
            model, tokenizer = load(folder)
            answers = score_model(model, tokenizer, chosen, split, n, world=lab.world)
            name = folder.name if len(names) == len(folders) else str(folder)
            scores[name] = {m: mean_interval(right) for m, right in answers.items()}
            advance(1)
    return scores


def _checkpoints(folder: Path) -> list[Path]:
    """The folder itself, or the models of the lab that it holds."""
    if not (folder / RECORD).is_file():
        return [folder]
    return [folder / name for name in read_record(folder)["models"]]


def pick_language(lab: Lab, language: str | None) -> str:
    """A scarce language of the lab; the farthest from the source language when None.

    Raises:
        RecipeError: the lab has no such language.
    """
    if language is None:
        return lab.languages[0]
    if language not in lab.languages:
        raise RecipeError(
            f"no target language {language!r} in the lab; it has {', '.join(lab.languages)}"
        )
    return language


def try_grid(
    plan: Plan, lab: Lab, language: str, advance: Callable[[int], None]
) -> dict[Zones, float]:
    """The share of development problems that each composition of the grid answers right."""
    asked = questions(
        "task_target", language, "development", DEVELOPMENT_QUESTIONS, world=lab.world
    )
    _, tokenizer = load(lab.base)
    shares = {}
    for candidate in plan.grid(bottom=BOTTOMS, top=TOPS):
        assert candidate.recipe.swap is not None
        zones = candidate.recipe.swap.zones(plan.composition.layers)
        shares[zones] = float(correct(in_memory(candidate), tokenizer, asked).mean())
        advance(1)
    return shares
