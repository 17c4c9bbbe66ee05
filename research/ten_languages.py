"""Headlines in ten languages: tables and figures from the recorded answers, and the losses.

    python -m research.ten_languages figures                 # the forest plot of docs/real.md
    python -m research.ten_languages loss INPUTS STUDY --base GEMMA

The tables are among those of `python -m research.transfer`. `loss` measures what the base and the
language experts know of a language: nats per character of the held-out rows that
`research.languages` wrote into INPUTS. Results are recorded in `research/ten-languages`.

Intervals over languages are Student's, of ten means over documents and pairs. They hold for other
languages like these; those over documents hold for other documents of the same languages.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from sklearn.metrics import f1_score

from layerswap.evaluation.statistics import (
    Classified,
    Interval,
    Predictor,
    Values,
    paired_difference,
    predictors,
    student_interval,
)
from layerswap.experiment.answers import read_answers
from layerswap.experiment.benchmarks import RESULTS, condition_scores
from layerswap.experiment.conditions import DEFAULT
from layerswap.report.charts import draw_intervals
from layerswap.study.journal import read_journal
from layerswap.study.trainings import selected
from research.inputs import texts_of
from research.languages import LANGUAGES as CODES
from research.markdown import Table, points, table

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
STUDY, MIDDLE = HERE / "ten-languages", HERE / "ten-languages-middle"
LOSS = STUDY / "loss.json"
ROWS = 32
"""Held-out rows of a language whose loss is measured."""
LANGUAGES = {
    "sw": "Swahili", "ha": "Hausa", "yo": "Yoruba", "pcm": "Pidgin", "sn": "Shona",
    "so": "Somali", "rn": "Rundi", "om": "Oromo", "xh": "Xhosa", "ln": "Lingala",
}  # fmt: skip
CODE_OF = dict(zip(LANGUAGES, CODES, strict=True))
"""The codes of the data's files."""
SWAP, TASK, SOUP, BASE = str(DEFAULT), "task expert", "soup", "base"
LANGUAGE = "language expert"
PARTIAL, PARTIAL_SWAP = "task expert, middle layers alone", "swap, middle layers alone"
MODELS = {
    SWAP: "swap, default",
    PARTIAL_SWAP: "swap, task expert trained in layers 3 to 16 alone",
    "weighted soup, task 0.7": "average, 0.7 of the task expert",
    SOUP: "plain average",
    "task arithmetic, scale 0.3": "task arithmetic, scale 0.3",
    "task arithmetic, scale 1.0": "task arithmetic, scale 1",
    "TIES, density 0.075": "TIES, density 0.075",
    "task expert, reverted C": "task expert, layers 0 to 2 and 17 put back to the base",
    PARTIAL: "task expert trained in layers 3 to 16 alone",
    TASK: "task expert",
    BASE: "base",
    LANGUAGE: "language expert",
}
"""Names of models in the tables, in their order."""
Measure = Callable[[str, str], float]
"""A score by language and model."""


@cache
def answers(code: str) -> dict[str, Classified]:
    """Every model's answers to the test documents of a language, over its pairs."""
    found: dict[str, list[Values]] = defaultdict(list)
    for study, renamed in ((STUDY, {}), (MIDDLE, {TASK: PARTIAL, SWAP: PARTIAL_SWAP})):
        ((_, recorded),) = condition_scores(read_answers(study / code / RESULTS)).items()
        assert recorded.labels is not None
        labels = recorded.labels[recorded.published :]
        for condition, given in recorded.answers.items():
            name = str(condition.treatment)
            if not renamed or name in renamed:
                found[renamed.get(name, name)].append(given[recorded.published :])
    return {name: Classified(labels, np.array(given)) for name, given in found.items()}


def right(code: str, model: str) -> Values:
    """The share of a model's pairs that answer each document right."""
    return answers(code)[model].right


def accuracy(code: str, model: str) -> float:
    return float(right(code, model).mean())


@cache
def recall(code: str, model: str) -> float:
    """Balanced accuracy, the mean over pairs."""
    return mean_recall(answers(code)[model])


def mean_recall(found: Classified) -> float:
    """Balanced accuracy, the mean over models."""
    right = found.labels == found.predicted
    recalls = [right[:, found.labels == label].mean(axis=1) for label in np.unique(found.labels)]
    return float(np.mean(recalls))


@cache
def f1(code: str, model: str) -> float:
    """Macro-F1, the mean over pairs."""
    found = answers(code)[model]
    return float(np.mean([f1_score(found.labels, of, average="macro") for of in found.predicted]))


def gain(measure: Measure, first: str, second: str) -> Interval:
    """The first minus the second."""
    gains = [measure(code, first) - measure(code, second) for code in LANGUAGES]
    return student_interval(np.array(gains))


def means_table() -> Table:
    """Every model's mean over languages, minus the task expert, and the default swap minus it."""
    rows = []
    for name, words in MODELS.items():
        cells = []
        for measure in (accuracy, recall):
            cells += [
                percentage(measure, name),
                "" if name == TASK else points(gain(measure, name, TASK)),
                "" if name == SWAP else points(gain(measure, SWAP, name)),
            ]
        rows.append([words, *cells, percentage(f1, name)])
    head = ["minus the task expert", "the swap minus it"]
    return table(["ten languages", "accuracy", *head, "balanced accuracy", *head, "macro-F1"], rows)


def percentage(measure: Measure, model: str) -> str:
    """The mean over languages."""
    return f"{100 * np.mean([measure(code, model) for code in LANGUAGES]):.1f}"


def languages_table() -> Table:
    """Scores by language, and the swap minus the task expert and the plain average."""
    rows = []
    for code, language in LANGUAGES.items():
        cells = [f"{100 * accuracy(code, name):.1f}" for name in (BASE, TASK, SOUP, SWAP)]
        for other in (TASK, SOUP):
            cells.append(points(paired_difference(right(code, SWAP), right(code, other))))
            cells.append(f"{100 * (recall(code, SWAP) - recall(code, other)):+.1f}")
        rows.append([language, str(len(right(code, SWAP))), *cells])
    head = ["", "n", "base", "task expert", "average", "swap", "swap minus task expert", "balanced"]
    return table([*head, "swap minus average", "balanced"], rows)


def signals() -> dict[str, list[float]]:
    """What may go with the gain, by language."""
    loss = json.loads(LOSS.read_text("utf-8"))
    return {
        "base's accuracy": [accuracy(code, BASE) for code in LANGUAGES],
        "base's loss on the language": [loss[code]["base"] for code in LANGUAGES],
        "fall of the loss by the language expert": [
            loss[code]["base"] - loss[code]["language expert"] for code in LANGUAGES
        ],
        "task expert minus base": [
            accuracy(code, TASK) - accuracy(code, BASE) for code in LANGUAGES
        ],
    }


def signals_table() -> Table:
    """Rank correlations of the swap's gains over languages with each signal."""
    rows = []
    for other in (TASK, SOUP):
        gains = [accuracy(code, SWAP) - accuracy(code, other) for code in LANGUAGES]
        found = {one.signal: one for one in predictors(signals(), gains)}
        rows.append([
            f"swap minus {MODELS[other]}",
            *(f"{one.spearman.mean:+.2f} (p = {one.p_spearman:.2f})"
              for one in (found[name] for name in signals())),
        ])  # fmt: skip
    return table(["Spearman's correlation over ten languages", *signals()], rows)


def merge_predictors() -> list[Predictor]:
    """Rank correlations over languages of models alone with the swap.

    Models are scored on every second document and the swap on the others, so that no document
    makes both high.
    """
    loss = json.loads(LOSS.read_text("utf-8"))
    models = {"task expert": TASK, "base": BASE, "language expert": LANGUAGE}
    signals = {
        f"headlines of the {words}": [float(right(code, name)[::2].mean()) for code in LANGUAGES]
        for words, name in models.items()
    }
    signals["loss of the language expert"] = [loss[code]["language expert"] for code in LANGUAGES]
    return predictors(signals, [float(right(code, SWAP)[1::2].mean()) for code in LANGUAGES])


def tables() -> dict[str, Table]:
    """The tables by name."""
    return {
        "ten languages": means_table(),
        "by language": languages_table(),
        "what the gain goes with": signals_table(),
    }


def draw_figures(out: Path) -> None:
    """Draw the swap minus the task expert, one row a language."""
    from research.figures import save_svg

    gains = {
        language: paired_difference(right(code, SWAP), right(code, TASK))
        for code, language in LANGUAGES.items()
    }
    rows = sorted(gains.items(), key=lambda row: -row[1].mean)
    rows += [("mean over languages", gain(accuracy, SWAP, TASK))]
    rows += [("mean, balanced", gain(recall, SWAP, TASK))]
    measure = f"swap minus {MODELS[TASK]}, headlines"
    save_svg(draw_intervals(rows, measure=measure, differences=True), out / "forest-task")


def measure_losses(inputs: Path, study: Path, base: str) -> None:
    """Record the loss of the base and of each finished language expert on held-out rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    journal = read_journal(study)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def load(folder: str) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.eval()  # type: ignore[no-any-return]

    def loss(model: torch.nn.Module, rows: Sequence[str]) -> float:
        nats = 0.0
        with torch.inference_mode():
            for row in rows:
                ids = tokenizer(row, return_tensors="pt").input_ids
                logs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
                nats -= float(logs.gather(1, ids[0, 1:, None]).sum())
        return nats / sum(map(len, rows))

    ready, whole = journal.finished(), load(base)
    found = json.loads(LOSS.read_text("utf-8")) if LOSS.is_file() else {}
    for code, file in CODE_OF.items():
        select = f"select/{code}"
        if code in found or select not in ready:
            continue
        rows = texts_of(inputs / f"{file}-validation.jsonl")[:ROWS]
        expert = load(selected({select: journal.folder(select)}, code)[0])
        losses = {"base": loss(whole, rows), "language expert": loss(expert, rows)}
        found[code] = {name: round(value, 4) for name, value in losses.items()}
        print(code, found[code], flush=True)
        LOSS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    figures = commands.add_parser("figures", help="draw the forest plot")
    figures.add_argument("--out", type=Path, default=IMAGES)
    loss = commands.add_parser("loss", help="measure what models know of the languages")
    loss.add_argument("inputs", type=Path, help="folder of the inputs")
    loss.add_argument("study", type=Path, help="folder of the study")
    loss.add_argument("--base", required=True, help="folder of Gemma 3 270M")
    given = parser.parse_args()
    if given.command == "figures":
        draw_figures(given.out)
    else:
        measure_losses(given.inputs, given.study, given.base)


if __name__ == "__main__":
    main()
