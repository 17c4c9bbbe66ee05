"""The rows of docs/papers.md that the lab can show, by the settings in `lab-rows/settings.yaml`.

    python -m research.rows                         # prints the tables, writes their CSV files
    python -m research.lab build --out LAB                   # the experts, 26 minutes
    python -m research.rows train LAB OUT NAME...   # a model of `trained_names()`, or all of them
    python -m research.rows score LAB OUT           # records the scores of the models there are

The scores of a model are bits, one for each document, as hexadecimal digits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from layerswap.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    Interval,
    Predictor,
    mean_interval,
    paired_difference,
    predictors,
)
from layerswap.ground.commit import write_json
from research.lab.datasets import language_stream, task_stream
from research.lab.tasks import LabExample, comprehension, examples
from research.lab.train import OUTSIDE, PARTITION, Trainings, train
from research.lab.world import world_of
from research.markdown import Table, per_cent, points, table

if TYPE_CHECKING:
    from layerswap.lab.assets import Lab
    from layerswap.merge.plan import Plan
    from research.lab.world import World

HERE = Path(__file__).parent / "lab-rows"
SETTINGS: Mapping[str, Any] = yaml.safe_load((HERE / "settings.yaml").read_text("utf-8"))
SCORES, LOSSES = HERE / "scores.json", HERE / "losses.json"
SOURCE, SCARCE = "basu", ("nela", "furo")
SKILLS = ("problem", "comprehension")
CSV = HERE.parents[1] / "docs" / "tables"
HELD_OUT = 256
"""Validation rows of each data set of a training in turns."""
Bits = npt.NDArray[np.float64]


# --- the models ---


def trained_names() -> list[str]:
    """The trainings beside the lab's own experts."""
    texts = [
        f"text-{name}-{seed}" for name in SETTINGS["text"]["languages"]
        for seed in SETTINGS["seeds"]
    ]  # fmt: skip
    turns = SETTINGS["turns"]
    return [
        *texts,
        *(f"turns-{every}-{seed}" for seed in turns["seeds"] for every in turns["every"]),
    ]  # fmt: skip


def train_model(lab: Lab, out: Path, name: str) -> None:
    """Train a model and save it in the folder of its name."""
    if name.startswith("turns"):
        _train_in_turns(lab, out, name)
        return
    from layerswap.checkpoint.loading import without_progress_bars
    from research.lab.scoring import load

    _, language, seed = name.split("-")
    model, tokenizer = load(lab.base)
    stream = text_stream(world_of(lab), language, seed=int(seed))
    train(model, tokenizer, stream, Trainings().language, seed=int(seed))  # type: ignore[arg-type]
    with without_progress_bars():
        model.save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)


def text_stream(world: World, language: str, *, seed: int) -> Iterator[LabExample]:
    """Draw stories in a language, without a question, as completions of nothing."""
    import random

    rng = random.Random(f"text/{language}/{seed}")
    spoken = world.language(language)
    words, biggest = spoken.vocabulary(common_only=False), world.settings.biggest
    while True:
        told = comprehension(spoken, spoken, words, "train", rng, biggest=biggest)
        story = told.prompt.rpartition(".")[0]
        yield replace(told, prompt="", completion=f" {story}.")


def _train_in_turns(lab: Lab, out: Path, name: str) -> None:
    """Simultaneous partition SFT of an equal number of rows of both data sets."""
    from layerswap.training.expert.trainer import train as train_expert
    from research.lab.study import training_run, write_examples

    turns = SETTINGS["turns"]
    _, every, seed = name.split("-")
    rows = turns["steps"] * turns["batch"] // 2
    streams = {
        "task": task_stream(world_of(lab), seed=int(seed)),
        "language": language_stream(world_of(lab), turns["language"], seed=int(seed)),
    }
    files = {}
    for kind, stream in streams.items():
        files[kind] = {part: str(out / f"{name}-{kind}-{part}.jsonl")
                       for part in ("train", "validation")}  # fmt: skip
        write_examples(Path(files[kind]["train"]), stream, rows)
        write_examples(Path(files[kind]["validation"]), stream, HELD_OUT)
    training = replace(
        Trainings().task, part=None,
        **{name: turns[name] for name in ("steps", "batch", "learning_rate")},
    )  # fmt: skip
    spec = {
        "base": str(lab.base),
        "simultaneous": {**files, "every": int(every)},
        "train": {"partition": PARTITION, "outside": OUTSIDE},
        **training_run(training),
        "save_every": turns["steps"] * turns["batch"],
        "seed": int(seed),
    }
    train_expert(spec, out / name)


# --- their scores ---


def score(lab: Lab, out: Path) -> None:
    """Score the models there are on what they have not answered yet."""
    from layerswap.checkpoint.loading import load_tokenizer
    from layerswap.engine.sweep import Sweep
    from layerswap.lab.scoring import sweep_correct

    recorded = json.loads(SCORES.read_text("utf-8")) if SCORES.is_file() else {}
    tokenizer = load_tokenizer(lab.base)
    for name, (plan, asked) in _evaluations(lab, out).items():
        missing = [one for one in asked if one not in recorded.get(name, {})]
        if missing:
            sweep = Sweep([plan()], dtype="float32")
        for one in missing:
            skill, language, split = one.split()
            documents = examples(world_of(lab), language, skill, split, SETTINGS["documents"])  # type: ignore[arg-type]
            right = sweep_correct(sweep, tokenizer, documents)[0]
            recorded.setdefault(name, {})[one] = np.packbits(right).tobytes().hex()
        _write_scores(recorded)
    losses = {
        folder.name: json.loads((folder / "layerswap-training.json").read_text("utf-8"))["losses"]
        for folder in sorted(out.glob("turns-*-*/"))
        if (folder / "model.safetensors").is_file()
    }
    write_json(LOSSES, losses)


def _write_scores(recorded: Mapping[str, Mapping[str, str]]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)]
    SCORES.write_bytes(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _evaluations(lab: Lab, out: Path) -> dict[str, tuple[Callable[[], Plan], list[str]]]:
    """The plan of every model by name, and what it is asked: `SKILL LANGUAGE SPLIT`."""
    import layerswap as ls

    def folder(name: str) -> Path:
        return (lab.base.parent if (lab.base.parent / name).is_dir() else out) / name

    def alone(name: str) -> Callable[[], Plan]:
        return lambda: ls.soup({"model": folder(name)})

    def tests(*languages: str, skills: tuple[str, ...] = SKILLS) -> list[str]:
        return [f"{skill} {language} test" for skill in skills for language in languages]

    found: dict[str, tuple[Callable[[], Plan], list[str]]] = {}
    found["base"] = alone("base"), tests(*(one.name for one in world_of(lab).languages.values()))
    for name in experts("task", folder):
        signals = [f"{skill} {language} development" for skill, language in TASK_SIGNALS]
        found[name] = alone(name), signals + tests(SOURCE, *SCARCE)
    for language in SCARCE:
        for kind in (f"language-{language}", f"text-{language}"):
            for name in experts(kind, folder):
                signals = [f"{skill} {language} development" for skill in SKILLS]
                signals.append(f"problem {SOURCE} development")
                found[name] = alone(name), signals + tests(SOURCE, language)
                for task in experts("task", folder):
                    found[f"{task} + {name}"] = (
                        lambda task=task, name=name: ls.swap(
                            task=folder(task), language=folder(name)
                        ),
                        tests(SOURCE, language, skills=("problem",)),
                    )
    for seed in SETTINGS["seeds"]:
        for name, asked in (
            (f"task-{seed}", tests(SOURCE, skills=("problem",))),
            *((f"language-{one}-{seed}", tests(one, skills=("comprehension",))) for one in SCARCE),
        ):
            for keep in SETTINGS["keep"]:
                found[f"{name} keeps {keep}"] = (
                    lambda name=name, keep=keep: ls.revert(lab.base, folder(name), keep=keep),
                    asked,
                )
    turns = SETTINGS["turns"]
    for name in (f"turns-{every}-{seed}" for seed in turns["seeds"] for every in turns["every"]):
        if (out / name / "model.safetensors").is_file():
            found[name] = alone(name), tests(SOURCE, turns["language"])
    return found


TASK_SIGNALS = [("problem", SOURCE), *((skill, name) for skill in SKILLS for name in SCARCE)]


def experts(kind: str, folder: Callable[[str], Path]) -> list[str]:
    """The experts of a kind that there are, by seed."""
    names = (f"{kind}-{seed}" for seed in SETTINGS["seeds"])
    return [name for name in names if folder(name).is_dir()]


# --- what they say ---


@cache
def recorded() -> Mapping[str, Mapping[str, str]]:
    """The recorded scores by model and question."""
    found: Mapping[str, Mapping[str, str]] = json.loads(SCORES.read_text("utf-8"))
    return found


def bits(model: str, asked: str) -> Bits:
    """1 for every document that a model answers right: `(documents,)`."""
    packed = np.frombuffer(bytes.fromhex(recorded()[model][asked]), dtype=np.uint8)
    return np.unpackbits(packed, count=SETTINGS["documents"]).astype(np.float64)


def seeds_of(model: str) -> list[list[int]]:
    """The recorded seeds in place of every `#` of a model's name."""
    like = re.compile(re.escape(model).replace(r"\#", r"(\d+)"))
    found = [match.groups() for name in recorded() if (match := like.fullmatch(name))]
    return [sorted({int(seeds[i]) for seeds in found}) for i in range(model.count("#"))]


def answers(model: str, asked: str, seeds: Sequence[Sequence[int]] | None = None) -> Bits:
    """The bits of every seed of a model, all pairs of two experts: `(seeds..., documents)`."""
    of = seeds_of(model) if seeds is None else seeds
    names = [reduce(lambda name, seed: name.replace("#", str(seed), 1), picked, model)
             for picked in product(*of)]  # fmt: skip
    return np.array([bits(name, asked) for name in names]).reshape(*map(len, of), -1)


@cache
def draws(shape: tuple[int, ...]) -> list[Bits]:
    """The weights of every bootstrap sample along each axis: `(resamples, size)`."""
    rng = np.random.default_rng(0)
    return [rng.multinomial(size, np.full(size, 1 / size), size=RESAMPLES) / size for size in shape]


def crossed(values: Bits) -> Interval:
    """The mean, with an interval over every axis at once: seeds, if several, and documents."""
    values = values.squeeze(tuple(i for i in range(values.ndim - 1) if values.shape[i] == 1))
    if values.ndim == 1 and values.any():
        return mean_interval(values)
    if not values.any():
        return paired_difference(values.reshape(-1), values.reshape(-1))
    *seeds, documents = draws(values.shape)
    drawn = np.tensordot(documents, values, axes=(1, -1))  # (resamples, seeds...)
    for weights in seeds:
        drawn = np.einsum("rs,rs...->r...", weights, drawn)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high), values.shape[-1])


def mean(model: str, asked: str) -> Interval:
    return crossed(answers(model, asked))


def gain(model: str, other: str, asked: str) -> Interval:
    """A model minus another one, paired by document and by the seeds that both have.

    A base has no seed, and a task expert alone has that of the task in a swap.
    """
    both = list(zip_longest(seeds_of(model), seeds_of(other)))
    shared = [[one for one in a if b is None or one in b] for a, b in both if a is not None]
    first = answers(model, asked, shared)
    second = answers(other, asked, shared[: model.count("#")][: other.count("#")])
    return crossed(
        first - second.reshape(*second.shape[:-1], *(1,) * (first.ndim - second.ndim), -1)
    )


REVERTED = {
    f"task-# on problems in {SOURCE}": ("task-#", f"problem {SOURCE} test"),
    **{
        f"language-{one}-# on comprehension in {one}": (
            f"language-{one}-#",
            f"comprehension {one} test",
        )
        for one in SCARCE
    },
}


def reverted(name: str, asked: str) -> dict[float, Interval]:
    """By share of rows that keep their change, the expert minus the whole one."""
    return {keep: gain(f"{name} keeps {keep}", name, asked) for keep in SETTINGS["keep"]}


def needed(name: str, asked: str) -> float:
    """The least share from which on no share is below the whole expert."""
    below = [keep for keep, found in reverted(name, asked).items() if found.high < 0]
    return min([*(keep for keep in SETTINGS["keep"] if keep > max(below, default=0)), 1.0])


def reverted_table() -> Table:
    """Scores by share kept, and minus the whole expert's."""
    rows = [["0", *(cell for _, asked in REVERTED.values()
                    for cell in (per_cent(mean("base", asked)), ""))]]  # fmt: skip
    for keep in [*SETTINGS["keep"], 1.0]:
        cells = []
        for name, asked in REVERTED.values():
            model = name if keep == 1 else f"{name} keeps {keep}"
            cells.append(per_cent(mean(model, asked)))
            cells.append("" if keep == 1 else points(gain(model, name, asked)))
        rows.append([f"{keep:g}", *cells])
    head = [part for name in REVERTED for part in (name.replace("-#", ""), "minus the whole")]
    return table(["share of rows kept", *head], rows)


def models_table() -> Table:
    """The base and the experts as they are, by skill and language."""
    models = {"base": "base", "task expert": "task-#",
              **{f"language expert, {one}": f"language-{one}-#" for one in SCARCE}}  # fmt: skip
    languages = world_languages()
    rows = []
    for words, model in models.items():
        known = recorded()[model.replace("#", str(SETTINGS["seeds"][0]))]
        rows.append([words, *(per_cent(mean(model, asked)) if asked in known else ""
                              for asked in (f"{skill} {one} test" for skill in SKILLS
                                            for one in languages))])  # fmt: skip
    head = [f"{skill}, {one}" for skill in ("problems", "comprehension") for one in languages]
    return table(["model", *head], rows)


def text_table() -> Table:
    """Language experts by training data, alone and swapped with the task expert."""
    rows = []
    for one in SETTINGS["text"]["languages"]:
        if not seeds_of(f"text-{one}-#")[0]:
            continue
        models = {
            "base": "base",
            "task expert": "task-#",
            "language expert": f"language-{one}-#",
            "the same, from raw text": f"text-{one}-#",
            "swap": f"task-# + language-{one}-#",
            "the same, from raw text ": f"task-# + text-{one}-#",
        }
        for words, model in models.items():
            cells = [per_cent(mean(model, f"problem {name} test")) for name in (one, SOURCE)]
            alone = "" if "+" in model else per_cent(mean(model, f"comprehension {one} test"))
            rows.append([one, words.strip(), *cells, alone])
    head = ["language", "model", "problems", f"problems in {SOURCE}", "comprehension"]
    return table(head, rows, words=2)


def turns_table() -> Table:
    """Simultaneous training by the steps of a turn."""
    turns = SETTINGS["turns"]
    asked = f"problem {turns['language']} test"
    losses = json.loads(LOSSES.read_text("utf-8"))
    rows = []
    for every in turns["every"]:
        name = f"turns-{every}-#"
        of = [found["validation"] for one, found in losses.items()
              if one.startswith(f"turns-{every}-") and one in recorded()]  # fmt: skip
        rows.append([
            str(every), per_cent(mean(name, asked)),
            points(gain(name, "turns-1-#", asked)) if every > 1 else "",
            per_cent(mean(name, f"problem {SOURCE} test")), f"{np.mean(of):.4f}",
        ])  # fmt: skip
    head = ["steps in a turn", f"problems, {turns['language']}", "minus one step",
            f"problems, {SOURCE}", "validation loss"]  # fmt: skip
    return table(head, rows)


def signal_correlations(language: str, kind: str) -> list[Predictor]:
    """Rank correlations of experts' development scores with their merges' mean test score.

    A merge counts for both of its experts, which are correlated one kind at a time.
    """
    own = [f"language-{language}-{one}" for one in SETTINGS["seeds"]]
    raw = [f"text-{language}-{one}" for one in SETTINGS["seeds"]]
    tasks = [f"task-{one}" for one in SETTINGS["seeds"]]
    pairs = [(task, other) for task in tasks for other in (*own, *raw)
             if f"{task} + {other}" in recorded()]  # fmt: skip
    merged = [float(bits(f"{a} + {b}", f"problem {language} test").mean()) for a, b in pairs]
    of = 0 if kind == "task" else 1
    asked = {
        f"problems, {language}": f"problem {language} development",
        f"problems, {SOURCE}": f"problem {SOURCE} development",
        f"comprehension, {language}": f"comprehension {language} development",
    }
    signals = {words: [float(bits(pair[of], one).mean()) for pair in pairs]
               for words, one in asked.items()}  # fmt: skip
    return predictors(signals, merged)


def signals_table() -> Table:
    """Which scores of experts go with their merges', on the lab and over ten languages."""
    from research.ten_languages import merge_predictors

    found = {
        f"{language}, {kind} expert": signal_correlations(language, kind)
        for language in SCARCE
        for kind in ("task", "language")
    }
    rows = []
    for words, of in {**found, "ten languages": merge_predictors()}.items():
        for one in of:
            rho = one.spearman
            between = f"{rho.mean:+.2f} [{rho.low:+.2f}, {rho.high:+.2f}]"
            rows.append([words, one.signal, between, f"{one.p_spearman:.3f}", str(rho.n)])
    return table(["merges of", "score alone", "Spearman", "p", "merges"], rows, words=2)


TABLES: Mapping[str, Callable[[], Table]] = {
    "lab-reverted": reverted_table,
    "lab-models": models_table,
    "lab-raw-text": text_table,
    "lab-turns": turns_table,
    "lab-signals": signals_table,
}
"""The tables by the name of their CSV file in docs/tables."""


def numbers() -> list[str]:
    """The words with numbers that docs/lab.md takes from the scores."""
    task, *language = REVERTED.values()
    asked = [f"problem {one} test" for one in world_languages()]
    most = [f"{100 * bits('base', one).mean():.1f}" for one in asked]
    lost = [reverted(*one)[0.9] for one in (task, *language)]
    half = reverted(*task)[0.5]
    lab = [
        f"all of its change: with nine tenths of the rows it loses {loss(lost[0])} points",
        f"with half {loss(half)}",
        f"nine tenths cost {loss(lost[1])} points in `nela` and {loss(lost[2])} in `furo`",
        f"between {min(map(float, most)):.1f} and {max(map(float, most)):.1f}% of the problems",
    ]
    kinds = {"base": "base", "task expert": "task-#", "language expert": "language-{}-#"}
    for words, model in kinds.items():
        shown = [per_cent(mean(model.format(one), f"comprehension {one} test")) for one in SCARCE]
        lab.append(f"{words} {shown[0]} and {shown[1]}")
    own, raw = "task-# + language-furo-#", "task-# + text-furo-#"
    asked_furo, read = "problem furo test", "comprehension furo test"
    lab += [
        f"from {per_cent(mean('base', read))} to {per_cent(mean('text-furo-#', read))}",
        f"swap answers {per_cent(mean(raw, asked_furo))} of the problems",
        f"{loss(gain(raw, own, asked_furo))} below",
    ]
    for every in SETTINGS["turns"]["every"]:
        lab.append(per_cent(mean(f"turns-{every}-#", asked_furo)))
    return lab


def world_languages() -> list[str]:
    """The languages in which the base was asked."""
    return [one.split()[1] for one in recorded()["base"] if one.startswith("problem")]


def loss(found: Interval) -> str:
    """A difference as points that are lost."""
    less = [f"{100 * one:+.1f}" for one in (found.mean, found.high, found.low)]
    cells = [("-" if one > "+0.0" and one[0] == "+" else "") + one[1:] for one in less]
    return "{} [{}, {}]".format(*cells)


def main() -> None:
    from layerswap.lab.assets import open_lab

    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_subparsers(dest="asked")
    for name in ("train", "score"):
        given = asked.add_parser(name)
        given.add_argument(
            "lab", type=Path, help="folder that `python -m research.lab build` wrote"
        )
        given.add_argument("out", type=Path, help="folder of the models that are trained")
        if name == "train":
            given.add_argument("names", nargs="*", help="models to train; all by default")
    arguments = parser.parse_args()
    if arguments.asked is None:
        for name, make in TABLES.items():
            made = make()
            print(f"{name}\n\n{made}\n")
            (CSV / f"{name}.csv").write_text(made.csv(), "utf-8", newline="\n")
        print("\n".join(numbers()))
        return
    lab = open_lab(arguments.lab)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.asked == "score":
        score(lab, arguments.out)
        return
    for name in arguments.names or trained_names():
        if not (arguments.out / name).is_dir():
            train_model(lab, arguments.out, name)


if __name__ == "__main__":
    main()
