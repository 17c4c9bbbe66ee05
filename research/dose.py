"""Tables and figure of the dose of text, from the recorded answers.

    python -m research.dose duplicates PUBLISHED INPUTS
    python -m research.dose figure

The tables are among those of `python -m research.transfer`. `duplicates` lists the test texts that
share five words in a row with the training text of each dose. `research/dose-*` holds the results:
answers, and the experts of each kind in the order of their numbers.

Intervals are over documents. They cover other documents of the same languages and experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from layerswap.evaluation.statistics import (
    Classified,
    Interval,
    Values,
    mean_over_groups,
    paired_over_groups,
)
from layerswap.experiment.answers import read_answers
from layerswap.experiment.benchmarks import RESULTS, condition_scores
from layerswap.ground.commit import write_json
from layerswap.report.drawing import EXPERTS, INK, Drawing, settings
from layerswap.training.mix.filters import overlap
from research import inputs
from research import languages as design
from research.markdown import Table, points, table
from research.ten_languages import LANGUAGE, SOUP, SWAP, TASK, mean_recall
from research.ten_languages import LANGUAGES as NAMES

HERE = Path(__file__).parent
AVERAGE = "plain average"
FIGURE = HERE.parent / "docs" / "images" / "dose"
EXPERTS_FILE, DUPLICATES, LOSSES = "experts.json", "duplicates.json", "losses.json"
STEP = 512
"""Tokens of a training step."""
STUDIES = {
    "dose-task": "headlines",
    "dose-middle": "headlines, task expert trained in layers 3 to 16 alone",
    "dose-sentences": "sentences",
    "dose-sentences-middle": "sentences, task expert trained in layers 3 to 16 alone",
}
TEXT_OF = {"73k": "73,000 tokens", "290k": "291,000 tokens", "all": "all text"}
AFTER = {"after": "everything trained", "after-outer": "layers 0 to 2 and 17 alone"}


def recorded(study: str) -> list[str]:
    """Languages with recorded answers in a study."""
    return [code for code in design.TRAINED if (HERE / study / code).is_dir()]


@cache
def experts(study: str) -> dict[str, list[str]]:
    """The names of experts by kind, in the order of their numbers in a pair."""
    return _json(HERE / study / EXPERTS_FILE)


def doses(study: str, code: str) -> list[str]:
    """The evaluated doses of a language."""
    names = [one.split("-")[1] for one in experts(study)[code]]
    return [dose for dose in design.DOSES if dose in names]


@cache
def answers(study: str, code: str) -> dict[tuple[str, str, str], tuple[Values, Values]]:
    """The right labels and answers, by model, task expert and language expert."""
    ((_, found),) = condition_scores(read_answers(HERE / study / code / RESULTS)).items()
    assert found.labels is not None
    assert found.published == 0
    of_task, of_language = experts(study)["task"], experts(study)[code]
    kept = {}
    for condition, given in found.answers.items():
        first, _, second = condition.pair.partition("-")
        pair = (of_task[int(first)], of_language[int(second)]) if first else ("", "")
        kept[str(condition.treatment), *pair] = (found.labels, given)
    return kept


def classified(
    study: str, code: str, model: str, dose: str = "", tasks: Collection[str] = ()
) -> Classified:
    """A model's answers over pairs of experts, of one dose and of the given task experts."""
    kept = [
        one for (name, first, second), one in answers(study, code).items()
        if name == model and f"-{dose}" in second and (not tasks or first in tasks)
    ]  # fmt: skip
    return Classified(kept[0][0], np.array([given for _, given in kept]))


def gain(first: Sequence[Classified], second: Sequence[Classified]) -> Interval:
    """The first minus the second, the mean over languages."""
    return paired_over_groups([one.right for one in first], [one.right for one in second])


def balanced(found: Sequence[Classified]) -> float:
    """Balanced accuracy, the mean over languages."""
    return float(np.mean([mean_recall(one) for one in found]))


def gains(first: Sequence[Classified], second: Sequence[Classified]) -> str:
    """The first minus the second: accuracy with its interval, and balanced accuracy."""
    return f"{points(gain(first, second))} ({100 * (balanced(first) - balanced(second)):+.1f})"


def score(found: Sequence[Classified]) -> str:
    """Accuracy and balanced accuracy, the mean over languages."""
    right = mean_over_groups([one.right for one in found]).mean
    return f"{100 * right:.1f} ({100 * balanced(found):.1f})"


def groups(study: str) -> dict[str, list[str]]:
    """Maps row names to languages: each one alone, and several that were given the same dose."""
    codes = recorded(study)
    by_dose = [[code for code in codes if dose in doses(study, code)] for dose in design.DOSES]
    means = {f"mean of {', '.join(NAMES[c] for c in of)}": of for of in by_dose if len(of) > 1}
    return {NAMES[code]: [code] for code in codes} | means


def doses_of(study: str, codes: Sequence[str]) -> list[str]:
    """The doses common to all these languages."""
    return [one for one in doses(study, codes[0]) if all(one in doses(study, c) for c in codes)]


@cache
def losses() -> dict[str, dict[str, float]]:
    """Steps and validation loss of each language expert."""
    return _json(HERE / "dose-task" / LOSSES)


def tokens(codes: Sequence[str], dose: str) -> str:
    """Training tokens of a dose, in thousands."""
    steps = [one["steps"] for name, one in losses().items()
             if any(name.startswith(f"{code}-{dose}-") for code in codes)]  # fmt: skip
    least, most = (f"{round(of * STEP / 1000):,}" for of in (min(steps), max(steps)))
    return least if least == most else f"{least} to {most}"


def _by_dose(study: str) -> Iterator[tuple[list[str], dict[str, list[Classified]]]]:
    """The first cells of each row, and the answers of each model over its languages."""
    for name, codes in groups(study).items():
        for dose in doses_of(study, codes):
            found = {
                model: [classified(study, code, model, dose) for code in codes]
                for model in (LANGUAGE, TASK, SOUP, SWAP)
            }
            yield [name, tokens(codes, dose)], found


def scores_table(study: str) -> Table:
    """Each model by language and dose, and the gain of the merges on the smallest dose."""
    rows, small = [], dict[str, list[Classified]]()
    for start, found in _by_dose(study):
        first = not rows or start[0] != rows[-1][0]
        small = found if first else small
        more = ["", ""] if first else [gains(found[one], small[one]) for one in (SOUP, SWAP)]
        rows.append([*start, *map(score, found.values()), *more])
    head = [LANGUAGE, TASK, AVERAGE, "swap", f"{AVERAGE}, gain by text", "swap, gain by text"]
    return table([STUDIES[study], "thousand tokens", *head], rows)


def differences_table(study: str) -> Table:
    """The merges minus the experts and each other, by language and dose."""
    pairs = [(SWAP, TASK), (SOUP, TASK), (SWAP, SOUP), (SWAP, LANGUAGE), (SOUP, LANGUAGE)]
    rows = [
        [*start, *(gains(found[first], found[second]) for first, second in pairs)]
        for start, found in _by_dose(study)
    ]
    names = {SWAP: "swap", SOUP: AVERAGE}
    head = [f"{names[first]} minus {names.get(second, second)}" for first, second in pairs]
    return table([STUDIES[study], "thousand tokens", *head], rows)


def seeds_table() -> Table:
    """Swahili: each language expert of the middle dose."""
    rows = []
    for study, words in STUDIES.items():
        if "sw" not in recorded(study):
            continue
        for seed in sorted(one[-1] for one in experts(study)["sw"] if "-290k-" in one):
            language, task, soup, swap = (
                classified(study, "sw", model, f"290k-{seed}")
                for model in (LANGUAGE, TASK, SOUP, SWAP)
            )
            differences = [(swap, task), (soup, task), (swap, soup)]
            rows.append([
                words, seed, *(score([one]) for one in (language, soup, swap)),
                *(gains([first], [second]) for first, second in differences),
            ])  # fmt: skip
    head = ["seed", LANGUAGE, AVERAGE, "swap", "swap minus task expert",
            f"{AVERAGE} minus task expert", f"swap minus {AVERAGE}"]  # fmt: skip
    return table(["Swahili, 291 thousand tokens", *head], rows)


def after_table() -> Table:
    """Swahili: merges, and task experts that learned the language afterwards."""
    head, columns = ["Swahili, 73,000 tokens"], []
    for task in design.TASKS:
        study, after = f"dose-{task}", f"dose-after-{task}"
        if not recorded(study) or not recorded(after):
            continue
        names = experts(after)["task"]
        seeds = [f"{task}-{seed}" for seed in sorted({one[-1] for one in names})]
        swap, soup, expert = (
            classified(study, "sw", model, "73k", seeds) for model in (SWAP, SOUP, TASK)
        )
        models = {
            "swap": swap,
            AVERAGE: soup,
            **{f"the language after the task, {words}":
               classified(after, "sw", TASK, tasks=[f"{kind}-{one}" for one in seeds])
               for kind, words in AFTER.items()},
            TASK: expert,
        }  # fmt: skip
        head += [STUDIES[study], "minus the task expert", "the swap minus it"]
        columns.append([
            [name, score([own]), gains([own], [models[TASK]]) if name != TASK else "",
             gains([swap], [own]) if own is not swap else ""]
            for name, own in models.items()
        ])  # fmt: skip
    rows = [[own[0][0], *(cell for one in own for cell in one[1:])]
            for own in zip(*columns, strict=True)]  # fmt: skip
    return table(head, rows)


def duplicates_table() -> Table:
    """Test texts that share five words in a row with the training text, and gains without them."""
    rows = []
    for task, by_language in _json(HERE / "dose-task" / DUPLICATES).items():
        for code, shared in by_language.items():
            study = next(one for one, words in STUDIES.items() if words == task)
            cells = []
            for model in (SOUP, SWAP):
                both = [classified(study, code, model, one) for one in ("all", "73k")]
                others = [_without(one, shared["all"]) for one in both]
                cells += [points(gain(of[:1], of[1:])) for of in (both, others)]
            counts = [len(both[0].labels), *(len(shared[one]) for one in design.DOSES)]
            rows.append([f"{NAMES[code]}, {task}", *map(str, counts), *cells])
    head = [words for name in (AVERAGE, "swap")
            for words in (f"{name}, gain by text", "without the shared")]  # fmt: skip
    return table(["test texts that share five words", "n", *TEXT_OF.values(), *head], rows)


def _without(found: Classified, documents: Sequence[int]) -> Classified:
    """The answers to the other documents."""
    return Classified(
        np.delete(found.labels, documents), np.delete(found.predicted, documents, axis=1)
    )


def tables() -> dict[str, Table]:
    """The tables by name."""
    found = {}
    for study in filter(recorded, STUDIES):
        found |= {study: scores_table(study), f"{study} differences": differences_table(study)}
    if recorded("dose-task"):
        found["dose duplicates"] = duplicates_table()
        found["dose seeds"] = seeds_table()
    if any(recorded(f"dose-after-{task}") for task in design.TASKS):
        found["after"] = after_table()
    return found


@settings()
def draw() -> Drawing:
    """Draw the gain on the task expert by dose, a panel for each language."""
    from matplotlib.figure import Figure

    study, facts = "dose-task", []
    codes = recorded(study)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    every = figure.subplots(1, len(codes), sharey=True, squeeze=False)[0]
    for axes, code in zip(every, codes, strict=True):
        name, known = NAMES[code], doses(study, code)
        read = [losses()[f"{code}-{dose}-1"]["steps"] * STEP for dose in known]
        axes.axhline(0, color=INK, linewidth=1)
        for number, (model, words) in enumerate(
            ((SWAP, "swap"), (SOUP, "soup"), (LANGUAGE, "language expert"))
        ):
            found = [
                gain([classified(study, code, model, dose)], [classified(study, code, TASK, dose)])
                for dose in known
            ]
            means = np.array([100 * one.mean for one in found])
            spans = [[100 * (one.mean - one.low) for one in found],
                     [100 * (one.high - one.mean) for one in found]]  # fmt: skip
            axes.errorbar(
                np.array(read) * (0.96, 1, 1.04)[number], means, spans, marker="o", markersize=4,
                capsize=2, color=EXPERTS[(1, 0, 3)[number]], label=words,
            )  # fmt: skip
            facts.append(f"{name}, {words}: " + ", ".join(f"{one:+.1f}" for one in means))
        axes.set(title=name, xscale="log", xlabel="thousand tokens",
                 xlim=(0.7 * read[0], 1.4 * read[-1]))  # fmt: skip
        axes.set_xticks(read, [f"{one / 1000:,.0f}" for one in read])
        axes.minorticks_off()
        axes.grid(visible=True, axis="y")
    every[0].set_ylabel("points above the task expert")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return Drawing(figure, "Gain on the task expert by dose of text", "; ".join(facts))


def _json(path: Path) -> dict[str, Any]:
    """The content of a file, empty if it does not exist."""
    return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}


def find_duplicates(published: Path, folder: Path) -> None:
    """List the test texts that share a run of words with the training text of each dose."""

    def headlines(code: str) -> list[str]:
        rows = inputs.table(published / "masakhanews" / f"{code}.test.tsv")
        return [row["headline"] for row in rows if row["category"] != "religion"]

    def shared(code: str, asked: Sequence[str]) -> dict[str, list[int]]:
        return {
            dose: overlap(inputs.texts_of(folder / f"{code}-{dose}.jsonl"), asked)
            for dose in design.DOSES
        }

    codes = {language: code for language, (code, _) in design.TRAINED.items()}
    sentences = inputs.table(published / "sib200" / "swh_Latn.test.tsv")
    found = {
        "headlines": {language: shared(code, headlines(code)) for language, code in codes.items()},
        "sentences": {"sw": shared(codes["sw"], [row["text"] for row in sentences])},
    }
    write_json(HERE / "dose-task" / DUPLICATES, found)


def main() -> None:
    from research.figures import save_svg

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser("duplicates", help="list what test and training text share")
    counting.add_argument("published", type=Path, help="folder of the published files")
    counting.add_argument("inputs", type=Path, help="folder of the inputs")
    commands.add_parser("figure", help="draw the curve")
    given = parser.parse_args()
    if given.command == "duplicates":
        find_duplicates(given.published, given.inputs)
    else:
        save_svg(draw(), FIGURE)


if __name__ == "__main__":
    main()
