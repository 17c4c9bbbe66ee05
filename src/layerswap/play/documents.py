"""Documents with answers, on which the map scores compositions: development and test.

Both kinds have a `name`, a `measure` (a score in a few words) and development `prompts` to ask.
`open` prepares them for the model in memory, and `score` gives a vector of scores per composition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from layerswap.compose import Recipe, read_recipe
from layerswap.compose.recipe import check_recipe
from layerswap.compose.yaml_file import read_text
from layerswap.errors import EvaluationError, RecipeError, StudyError
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import write_suite
from layerswap.search.conditions import Condition
from layerswap.search.evaluator import DEVELOPMENT, Evaluator, by_condition
from layerswap.search.protocol import Values, split_documents
from layerswap.search.spec import SweepSettings
from layerswap.study.journal import read_journal
from layerswap.study.report import BEST
from layerswap.study.step_functions import recipes_of
from layerswap.versions import need_extras

if TYPE_CHECKING:
    from layerswap.engine.sweep import Sweep
    from layerswap.merge import Plan

Split = Literal["development", "test"]
SHOWN = 200
"""Most prompts that the page offers."""


class Prompt(NamedTuple):
    """A prompt, and its answer if it is known."""

    prompt: str
    answer: str | None = None


class Answered:
    """Prompts with answers; a composition scores 1 where it writes the answer and ends, else 0."""

    measure = "answered exactly"

    def __init__(self, name: str, splits: Mapping[Split, Sequence[Prompt]]) -> None:
        self.name, self._splits = name, splits
        self.prompts = splits["development"][:SHOWN]

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Encode the documents."""
        del sweep, plan
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def encode(one: Prompt) -> tuple[list[int], list[int]]:
            spaced = str(one.answer)[:1].isspace() or one.prompt[-1:].isspace()
            answer = one.answer if spaced else f" {one.answer}"
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            return tokenizer(one.prompt).input_ids, [*ids, *end]

        self._requests = {split: [*map(encode, rows)] for split, rows in self._splits.items()}

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score greedy answers by one pass, which gives the result of generating them."""
        right = np.zeros((len(members), len(self._requests[split])))
        for scores in sweep.iter_loglikelihood(
            self._requests[split], members=members, batch_size=256, share_prefixes=False
        ):
            right[:, scores.requests] = scores.greedy
        return list(right)


class Tasks:
    """Tasks of lm-eval, split and scored as `layerswap sweep` does."""

    def __init__(self, names: Sequence[str], include: Sequence[Path] = (), **settings: Any) -> None:
        need_extras("lm-eval tasks", "eval")
        folders = [str(path.absolute()) for path in include]
        self._spec = SweepSettings(tasks=[*names], include=folders, **settings)
        self.name, self.measure = ", ".join(names), "score"
        self.prompts: Sequence[Prompt] = ()

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Load the tasks."""
        del tokenizer
        self._evaluator = Evaluator(self._spec, {Condition("0"): plan}, sweep=sweep)
        self.prompts = [Prompt(*one) for one in self._evaluator.prompts(DEVELOPMENT, SHOWN)]

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score by the first measure of the tasks."""
        del sweep
        named = {Condition(str(member)): member for member in members}
        self._evaluator.members = named
        rows = self._evaluator.rows(split, list(named))
        chosen = self._evaluator.measure(rows)
        self.measure = f"{chosen[1]} of {chosen[0]}"
        scores = by_condition(rows, chosen)
        return [scores[one] for one in named]


Documents = Answered | Tasks


def open_suite(suite: str, language: str, **settings: Any) -> Tasks:
    """A suite or a benchmark in a language, as tasks in a temporary folder."""
    need_extras("a suite", "eval")
    folder = TaskFolder(Path(mkdtemp(prefix="layerswap-play-")))
    written = write_suite(suite, [language], folder, data=DataFolder.given(None),
                          shots=settings.get("num_fewshot"), needed=True,
                          skip=lambda line: None)  # fmt: skip
    return Tasks([task.name for task in written], [folder.root], **settings)


def open_study(root: Path, language: str | None) -> tuple[Recipe, Tasks]:
    """The selected composition of a study in a language, and the study's tasks.

    Until the study has selected one, the first swap of its first pair of experts.
    """
    journal = read_journal(root)
    steps = {step.settings["language"]: step for step in journal.graph if step.kind == "evaluate"}
    chosen = next(iter(steps), "") if language is None else language
    if chosen not in steps:
        raise StudyError(f"{root}: has no {chosen!r}; its languages are {', '.join(steps)}")
    settings, best = steps[chosen].settings, root / BEST / f"{chosen}.yaml"
    if best.is_file():
        recipe = read_recipe(best)
    else:
        inputs = {name: journal.bring(name) for name in steps[chosen].needs}
        swaps = (data for _, data in recipes_of(settings, inputs) if "swap" in data)
        recipe = check_recipe(next(swaps), where=f"{root}")
    asked = settings["evaluate"]
    shared = {name: asked[name] for name in ("num_fewshot", "limit", "apply_chat_template")
              if asked.get(name) is not None}  # fmt: skip
    if asked["suite"]:
        return recipe, open_suite(asked["suite"], chosen, **shared)
    names = [name.format(language=chosen) for name in asked["tasks"]]
    return recipe, Tasks(names, [Path(one) for one in asked["include"]], **shared)


def split_prompts(name: str, prompts: Sequence[Prompt]) -> Answered:
    """Split prompts with answers into development and test, as a sweep with seed 0 does."""
    if len(prompts) < 2:
        raise EvaluationError(f"{name}: needs two documents, one to choose on and one to test")
    found = split_documents(len(prompts), 0.5)
    development, test = ([prompts[i] for i in sorted(part.tolist())] for part in found)
    return Answered(name, {"development": development, "test": test})


def read_prompts(path: Path, *, answers: bool) -> list[Prompt]:
    """Read prompts from a file: JSON Lines of `prompt` and `answer`, or lines of plain text."""
    lines = [pair for pair in enumerate(read_text(path).split("\n"), 1) if pair[1].strip()]
    if path.suffix != ".jsonl" and not answers:
        return [Prompt(line.strip()) for _, line in lines]
    found = []
    for number, line in lines:
        try:
            row = json.loads(line)
            prompt = row["prompt"]
            answer = row.get("answer", row.get("completion"))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            prompt, answer = None, None
        if not isinstance(prompt, str) or not isinstance(answer, str | None):
            raise RecipeError(f"{path}, line {number}: needs a `prompt` and an `answer`, as texts")
        if answer is None and answers:
            raise RecipeError(f"{path}, line {number}: has no `answer`")
        found.append(Prompt(prompt, answer))
    return found
