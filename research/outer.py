"""What carries the language in the outer layers: attention, feed-forward, or both?

    python -m research.outer evaluate TRAINED --data PUBLISHED --out OUT    # the test documents
    python -m research.outer                                                # tables and figure
    python -m research.outer lab                                            # the same on the lab

Fixed before anything was evaluated: task experts of headlines and sentences (three seeds each, two
of which are recorded), one language expert each of Swahili, Hausa and Yoruba (73,000 tokens), and
the compositions of `recipes`. Nothing is chosen, so development documents are not asked. TRAINED
holds the experts that `research.languages` trains (`task-1`, `sentences-1`, `sw-73k-1`, ...). The
answers are recorded in `research/outer`, one character a document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import layerswap as ls
from layerswap.compose.presets import Zones, default_zones
from layerswap.evaluation.statistics import (
    Values,
    mean_over_groups,
    paired_difference,
    paired_over_groups,
)
from layerswap.report.charts import draw_intervals
from layerswap.report.drawing import Drawing
from research.markdown import Table, per_cent, points, table

RECORDED = Path(__file__).parent / "outer"
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "outer"
LANGUAGES = {"sw": "Swahili", "ha": "Hausa", "yo": "Yoruba"}
TASKS = {"task": ("headlines", "masakhanews"), "sentences": ("sentences", "sib200")}
SEEDS = (1, 2, 3)
LAYERS = 18
Groups = Mapping[str, Sequence[Values]]
"""Scores by model, of each language's documents."""
BOTH, ATTENTION, FEED_FORWARD = "default: attention and feed-forward", "attention", "feed-forward"
SOUP, TASK, LANGUAGE = "plain average", "task expert", "language expert"
PARTITION, EVEN = "partition C", "even split"
SAME = (f"bottom {default_zones(LAYERS).bottom}", PARTITION)
"""Compositions of Gemma 3 270M that are the default by another name, which no table has."""


def recipes(layers: int) -> dict[str, dict[str, Any]]:
    """The compositions by name, as recipes without their experts."""
    zones = default_zones(layers)
    outer = [f"0-{zones.bottom - 1}", f"{layers - zones.top}-{layers - 1}"]
    half, outside = layers // 2, {"outside": "task"}
    bottoms = sorted({1, 2, *range(3, half + 1, 2), half})

    def swap(found: Zones) -> dict[str, Any]:
        return {"swap": {"bottom": found.bottom, "top": found.top, **outside}}

    def one_role(role: str) -> dict[str, Any]:
        places = [{"layers": where, "roles": [role], "take": "language"} for where in outer]
        return {**swap(Zones(0, 0)), "places": places}

    return {
        BOTH: swap(zones),
        ATTENTION: one_role("attention"),
        FEED_FORWARD: one_role("mlp"),
        **{f"bottom {bottom}": swap(Zones(bottom, zones.top)) for bottom in bottoms},
        PARTITION: {"partition": {"name": "C", **outside}},
        EVEN: swap(Zones((half + 1) // 2, half // 2)),
        SOUP: {"soup": {"experts": ["task", "language"]}},
        TASK: swap(Zones(0, 0)),
        LANGUAGE: swap(Zones(layers, 0)),
    }


def with_experts(recipe: Mapping[str, Any], task: Path, language: Path) -> dict[str, Any]:
    return {"experts": {"task": str(task), "language": str(language)}, **recipe}


def evaluate(trained: Path, published: Path, out: Path) -> None:
    """Record every composition's answers to the test documents.

    Pairs whose experts are not trained yet are left out, and named.
    """
    record: dict[str, dict[str, list[str]]] = {}
    for seed, code, (task, (name, suite)) in product(SEEDS, LANGUAGES, TASKS.items()):
        language, expert = trained / f"{code}-73k-1", trained / f"{task}-{seed}"
        if not all((folder / "config.json").is_file() for folder in (expert, language)):
            print(f"{name}, {code}, seed {seed}: not trained yet")
            continue
        cell = out / f"{name}-{code}-{seed}"
        scores = asked(expert, language, suite, code, published, cell)
        runs = record.setdefault(f"{name}-{code}", {})
        for model, right in scores.items():
            runs.setdefault(model, []).append("".join("01"[int(one)] for one in right))
        RECORDED.mkdir(exist_ok=True)
        target = RECORDED / f"{name}-{code}.json"
        target.write_text(json.dumps(runs, indent=1) + "\n", "utf-8", newline="\n")


def asked(
    task: Path,
    language: Path,
    suite: str,
    code: str,
    published: Path,
    out: Path,
    layers: int = LAYERS,
) -> dict[str, Values]:
    """The right answers of every composition of a pair, by test document."""
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for number, (name, recipe) in enumerate(recipes(layers).items()):
            path = Path(folder) / f"{number:02}.yaml"
            path.write_text(yaml.safe_dump(with_experts(recipe, task, language)), "utf-8")
            files[path] = name
        ls.evaluate([*files], suite=suite, language=code, data=published, out=out, log=print,
                    dtype="float32", device="cpu")  # fmt: skip
        import pandas as pd

        rows = pd.read_parquet(out / "answers.parquet")
    rows = rows[rows.main]
    # A model is called after its file, without the suffix.
    names = {path.stem: name for path, name in files.items()}
    return {names[model]: by.sort_values("document").score.to_numpy()
            for model, by in rows.groupby("model") if model in names}  # fmt: skip


def recorded() -> Iterator[tuple[str, str, int, dict[str, Values]]]:
    """Yield task, language, number of task experts, and every model's scores by document.

    A score is the share of the task experts' answers that are right.
    """
    for path in sorted(RECORDED.glob("*.json")):
        name, _, code = path.stem.rpartition("-")
        read = json.loads(path.read_text("utf-8"))
        yield (
            name,
            code,
            len(next(iter(read.values()))),
            {
                model: np.mean([[int(one) for one in right] for right in runs], axis=0)
                for model, runs in read.items()
            },
        )


def compared(found: Groups) -> list[list[str]]:
    """Every model's score, and its difference to the default: means over languages."""
    return [
        [name, per_cent(mean_over_groups(values)),
         "" if name == BOTH else points(paired_over_groups(values, found[BOTH]))]
        for name, values in found.items()
    ]  # fmt: skip


def over_languages(task: str) -> dict[str, list[Values]]:
    """Every model's scores on the test documents of a task, by language."""
    every: dict[str, list[Values]] = {}
    for name, _, _, scores in recorded():
        if name == task:
            for model, values in scores.items():
                every.setdefault(model, []).append(values)
    return every


def page_table() -> Table:
    """Tabulate both tasks beside each other, means over the languages."""
    tasks = [name for name, _ in TASKS.values()]
    rows = [[row for row in compared(over_languages(task)) if row[0] not in SAME] for task in tasks]
    columns = [name for task in tasks for name in (f"{task}, % correct", "minus the default")]
    return table(
        ["from the language expert, of 18 layers", *columns],
        [[first[0], *first[1:], *second[1:]] for first, second in zip(*rows, strict=True)],
    )


def languages_table() -> Table:
    """Tabulate every model by task and language, with the number of task experts."""
    rows = [
        [name, LANGUAGES[code], str(experts), *row]
        for name, code, experts, scores in recorded()
        for row in compared({model: [values] for model, values in scores.items()})
        if row[0] not in SAME
    ]
    head = ["task", "language", "task experts", "model", "% correct", "minus the default"]
    return table(head, rows, words=4)


def chosen_elsewhere() -> Table:
    """Tabulate the composition that is best in the other languages, minus the default.

    The choice is the composition of layers with the highest mean of both tasks' scores in the
    other languages, so a language's own documents did not choose it.
    """
    every: dict[str, dict[str, dict[str, Values]]] = {}
    for task, code, _, scores in recorded():
        every.setdefault(code, {})[task] = scores
    swaps = [name for name in recipes(LAYERS) if name not in (SOUP, TASK, LANGUAGE)]
    rows: list[list[str]] = []
    chosen: dict[str, list[tuple[Values, Values]]] = {}
    for code, own in every.items():
        others = [scores for other in every.keys() - {code} for scores in every[other].values()]
        best = max(swaps, key=lambda name: sum(float(scores[name].mean()) for scores in others))
        for task, scores in own.items():
            chosen.setdefault(task, []).append((scores[best], scores[BOTH]))
        differences = [points(paired_difference(*chosen[task][-1])) for task in own]
        rows.append([LANGUAGES[code], best, *differences])
    over = [points(paired_over_groups(*zip(*pairs, strict=True))) for pairs in chosen.values()]
    head = [
        "language",
        "best in the other languages",
        *(f"{task}, minus the default" for task in chosen),
    ]
    return table(head, [*rows, ["mean", "", *over]], words=2)


def tables() -> dict[str, Table]:
    """The tables by name."""
    return {
        "outer": page_table(),
        "outer by language": languages_table(),
        "outer chosen elsewhere": chosen_elsewhere(),
    }


def draw() -> Drawing:
    """Draw the parts, the even split, the average and the task expert, minus the default."""
    rows = []
    for task, _ in TASKS.values():
        scores = over_languages(task)
        for model in (ATTENTION, FEED_FORWARD, EVEN, SOUP, TASK):
            rows.append((f"{task}: {model}", paired_over_groups(scores[model], scores[BOTH])))
    return draw_intervals(rows, measure="composition minus the default swap", differences=True)


def lab(problems: int = 1000) -> Table:
    """The compositions on every pair of the lab, with test problems of both languages."""
    from layerswap.checkpoint.loading import load_tokenizer
    from layerswap.compose.recipe import check_recipe
    from layerswap.lab.assets import shipped
    from layerswap.lab.scoring import sweep_correct
    from layerswap.merge.api import make_plan
    from research.lab.scoring import questions

    world_lab = shipped()
    tokenizer = load_tokenizer(world_lab.base)
    every: dict[str, list[Values]] = {}
    for code in world_lab.languages:
        documents = questions("task_target", code, "test", problems)
        pairs = zip(world_lab.task_experts, world_lab.language_experts[code], strict=True)
        for task, language in pairs:
            layers = ls.swap(task=task, language=language).composition.layers
            plans = [
                make_plan(check_recipe(with_experts(recipe, task, language), where=name))
                for name, recipe in recipes(layers).items()
            ]
            right = sweep_correct(ls.Sweep(plans), tokenizer, documents).astype(float)
            for name, values in zip(recipes(layers), right, strict=True):
                every.setdefault(name, []).append(values)
    head = ["language expert in the outer layers", "% correct", "minus the default"]
    return table(head, compared({name: [np.concatenate(of)] for name, of in every.items()}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_subparsers(dest="asked")
    of_gemma = asked.add_parser("evaluate")
    of_gemma.add_argument("trained", type=Path, help="folder of the experts")
    of_gemma.add_argument("--data", type=Path, required=True, help="folder of the published files")
    of_gemma.add_argument("--out", type=Path, required=True, help="folder of the evaluations")
    asked.add_parser("lab")
    given = parser.parse_args(arguments)
    if given.asked == "evaluate":
        for folder in (given.trained, given.data):
            if not folder.is_dir():
                parser.error(f"{folder}: no such folder")
        evaluate(given.trained, given.data, given.out)
    elif given.asked == "lab":
        print(lab())
    elif not RECORDED.is_dir():
        parser.error("no answers of Gemma 3 270M are recorded yet; give `evaluate` first")
    else:
        from research.figures import save_svg

        print(*tables().values(), sep="\n\n")
        save_svg(draw(), FIGURE)


if __name__ == "__main__":
    main()
