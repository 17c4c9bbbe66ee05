"""Does a merge still help where there are labels in the language?

    python -m research.labels train PUBLISHED OUT --base GEMMA   # experts, rivals and starts
    python -m research.labels finish PUBLISHED OUT --base GEMMA  # trainings on labels, and answers
    python -m research.labels                                    # tables and figure

Fixed before anything ran: the topic of a sentence (SIB-200) in Swahili, Hausa and Yoruba; the
starts and sizes below; three replicates with other labels, the second with another task expert. A
start is trained on the labels for three epochs with the settings of the task expert, and the last
step is taken, so that nothing is chosen and the development documents are free to be the labels.
The labels of a replicate are the draw of the linear classifier in `research.baselines` of the same
number, so that both learn from the same rows. Runs are made in the order of `runs`; what is not
reached by the end of the time is left out of the tables as a whole block and named on the page.
PUBLISHED is as in `research.inputs`. All commands go on where they were stopped.

Two rivals cost as much and merge nothing: the task learned on top of the language expert, and
English rows and labels learned together from the base.

A second task was added while the runs of sentences went on, before any of its own: the headlines
of MasakhaNEWS in the same languages, with all starts, a hundred labels, and one task expert.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import layerswap as ls
from layerswap.evaluation.statistics import (
    Classified,
    Interval,
    mean_interval,
    mean_over_groups,
    paired_over_groups,
)
from layerswap.report.charts import draw_intervals
from layerswap.report.drawing import Drawing
from research import answers, baselines
from research import languages as design
from research.answers import BASE, LANGUAGE, SOUP, SWAP, TASK
from research.inputs import write_jsonl
from research.markdown import Table, per_cent, points, table
from research.ten_languages import mean_recall

HERE = Path(__file__).parent
RECORDED = HERE / "labels"
FIGURE = HERE.parent / "docs" / "images" / "labels"
TASK_NAME, SECOND = "sentences", "headlines"
LANGUAGES = {code: answers.LANGUAGES[code] for code in answers.OTHERS}
HEADLINES = {f"{SECOND}-{code}": name for code, name in LANGUAGES.items()}
"""The languages of the second task."""
ENGLISH = "en"
"""The same test sentences in English, for which nothing is trained."""
TOPICS = ("science/technology", "travel", "politics", "sports", "health", "entertainment",
          "geography")  # fmt: skip
HEADLINE_TOPICS = ("sports", "politics", "business", "entertainment", "health", "technology")
SEQUENCE, JOINT = "language, then task", "English rows and labels together"
CLASSIFIER = "characters"
STARTS = (BASE, TASK, SWAP, SOUP)
"""Starts of every size, in the order of their trainings on labels."""
RIVALS = (SEQUENCE, LANGUAGE)
"""Starts that are trained on all labels alone."""
PAIRS = ((1, 1), (2, 1), (1, 1))
"""Seeds of the task expert and the language expert, by replicate."""
ALL = 99
"""Labels of a language."""
HUNDRED = 100
"""Labels of a language of the second task."""
SIZES = (10, 25, 50, ALL, HUNDRED)
EPOCHS = 3
TASK_EPOCHS = 2
LONGER = 6
"""Epochs of a second setting, with all labels, of the starts in `AGAIN`."""
AGAIN = (TASK, SWAP, SOUP)
BATCH = 16
HYPERPARAMETERS = {"learning_rate": 2e-5, "per_device_train_batch_size": BATCH, **design.SCHEDULE}
DTYPE = "bfloat16"
"""Of the models that are asked."""


class Run(NamedTuple):
    """A training of a start on labels; with 0 labels, the start itself."""

    code: str
    start: str
    size: int
    replicate: int
    epochs: int = EPOCHS

    @property
    def name(self) -> str:
        """File name of the run in OUT."""
        words = self.start.replace(",", "").replace(" ", "-")
        return f"{self.code}-{words}-{self.size}-{self.replicate}-{self.epochs}"


def words(run: Run) -> str:
    """Name of a run in the records."""
    return f"{run.start}, {run.size} labels, {run.epochs} epochs, {run.replicate}"


def runs() -> Iterator[Run]:
    """Yield every run, in the order of the trainings."""

    def block(starts: Sequence[str], size: int, *replicates: int, epochs: int = EPOCHS) -> Any:
        return (Run(code, start, size, replicate, epochs)
                for replicate in replicates for code in LANGUAGES for start in starts)  # fmt: skip

    first, second, third = range(len(PAIRS))
    yield from block(STARTS, 0, first)
    yield from block(STARTS, ALL, first)
    yield from block(STARTS, 25, first)
    yield from block((TASK, SWAP, SOUP), 0, second)
    yield from block(STARTS, ALL, second)
    yield from block((SEQUENCE,), ALL, first, second)
    yield from block(STARTS, 25, second)
    yield from block(AGAIN, ALL, first, second, epochs=LONGER)
    yield from block(STARTS, ALL, third)
    yield from block(STARTS, 25, third)
    yield from block(RIVALS, 0, first)
    yield from block((SEQUENCE,), ALL, third)
    yield from block((LANGUAGE,), ALL, first, second, third)
    yield from block((JOINT,), ALL, first)
    for size in (0, HUNDRED):
        yield from (Run(code, start, size, first) for code in HEADLINES for start in STARTS)
    yield from (Run(code, start, HUNDRED, third) for code in HEADLINES for start in STARTS)
    for size in (50, 10):
        yield from block(STARTS, size, first, second, third)
    yield from (Run(ENGLISH, TASK, 0, replicate) for replicate in (first, second))


# --- trainings ---


def row(text: str, topic: str) -> dict[str, str]:
    """Prompt and completion of a labelled sentence, as in `eval --suite sib200`."""
    return {"prompt": f"Text: {text}\nTopic:", "completion": f" {topic}"}


def labelled(published: Path, code: str, size: int, draw: int) -> list[dict[str, str]]:
    """A draw of the labels of a language."""
    known = documents(published, code, "dev")
    drawn = np.random.default_rng(draw).permutation(len(known))[:size]
    return [row(*known[i]) for i in drawn]


def task_and_language(code: str) -> tuple[str, str]:
    """The task of a code, and the code of its language alone."""
    return (SECOND if code in HEADLINES else TASK_NAME), code.removeprefix(f"{SECOND}-")


def choices(code: str) -> Sequence[str]:
    """The topics among which a model chooses."""
    return HEADLINE_TOPICS if code in HEADLINES else TOPICS


def documents(published: Path, code: str, split: str) -> list[tuple[str, str]]:
    """Texts and topics of a split."""
    task, language = task_and_language(code)
    file = "eng_Latn" if code == ENGLISH else baselines.TASKS[task][2][language]
    return baselines.documents(published, task, file, split)


def english(published: Path, task: str = TASK_NAME) -> list[dict[str, str]]:
    return [row(*one) for one in baselines.english(published, task)]


def spec(base: Path, train: str, seed: int, epochs: int) -> dict[str, Any]:
    """A training on rows of the task, as EXPERT.yaml."""
    return {
        "base": str(base), "data": {"train": train}, "train": {"places": design.ALL_LAYERS},
        "hyperparameters": {**HYPERPARAMETERS, "num_train_epochs": epochs},
        "save_every": 10_000, "seed": seed,
    }  # fmt: skip


def train(published: Path, out: Path, base: Path, names: Sequence[str]) -> None:
    """Train the experts and the sequences; a language expert is that of `research.answers`."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "yo-validation.jsonl").is_file():
        answers.write_inputs(published, out, base)
    rows = {"topic": "english.jsonl", "sequence": "english.jsonl", SECOND: f"{SECOND}.jsonl"}
    write_jsonl(out / rows["topic"], english(published))
    write_jsonl(out / rows[SECOND], english(published, SECOND))
    for name in names:
        kind, seed = name.rsplit("-", 1)
        kind, _, code = kind.partition("-")
        if kind in LANGUAGES:
            answers.fit(out, name, answers.spec(name, str(base)))
        else:
            start = out / f"{code}-{seed}" if kind == "sequence" else base
            answers.fit(out, name, spec(start, rows[kind], int(seed), TASK_EPOCHS))


TRAINED = ("topic-1", "sw-1", "ha-1", "yo-1", "sequence-sw-1", "sequence-ha-1", "sequence-yo-1",
           "topic-2", f"{SECOND}-1")  # fmt: skip
"""Experts in the order of their training; a sequence has one seed."""


def start_of(run: Run, out: Path, base: Path) -> Path | None:
    """Folder of the start of a run, written here for a merge; None before its experts exist."""
    task, language = PAIRS[run.replicate]
    kind = SECOND if run.code in HEADLINES else "topic"
    code = task_and_language(run.code)[1]
    experts = {"task": f"{kind}-{task}", "language": f"{code}-{language}"}
    alone = {TASK: experts["task"], LANGUAGE: experts["language"],
             SEQUENCE: f"sequence-{run.code}-1"}  # fmt: skip
    if run.start in (BASE, JOINT):
        return base
    if run.start in alone:
        return out / alone[run.start] if answers.is_trained(out, alone[run.start]) else None
    if not all(answers.is_trained(out, one) for one in experts.values()):
        return None
    folder = out / "starts" / "-".join([*experts.values(), run.start.split()[-1]])
    if not folder.is_dir():
        recipe = {"base": str(base), "experts": {k: str(out / v) for k, v in experts.items()}}
        answers.plan({**recipe, **answers.HOW[run.start]}, run.start).save(folder)
    return folder


def finish(published: Path, out: Path, base: Path, codes: Sequence[str]) -> None:
    """Train every start of some languages that exists, and keep the answers in OUT."""
    (out / "runs").mkdir(exist_ok=True)
    (out / "starts").mkdir(exist_ok=True)
    for run in runs():
        target = out / "runs" / f"{run.name}.json"
        if run.code not in codes or target.is_file():
            continue
        start = start_of(run, out, base)
        if start is None:
            continue
        model = start
        if run.size:
            rows, epochs = labelled(published, run.code, run.size, run.replicate), run.epochs
            if run.start == JOINT:
                rows, epochs = [*rows, *english(published)], TASK_EPOCHS
            write_jsonl(out / "runs" / f"{run.name}.jsonl", rows)
            training = spec(start, f"runs/{run.name}.jsonl", run.replicate, epochs)
            model = answers.fit(out, f"finished-{run.name}", training)
        found = ask(published, model, base, run.code)
        target.write_text(json.dumps(found), "utf-8")
        if run.size:
            shutil.rmtree(model)
        print(f"{run.name}: {right_share(published, run.code, found):.1%}", flush=True)


def ask(published: Path, model: Path, base: Path, code: str) -> str:
    """Answers of a model to the test sentences, as numbers of topics."""
    texts = [text for text, _ in documents(published, code, "test")]
    return "".join(map(str, scores(texts, model, base, choices(code)).argmax(axis=1)))


def scores(
    texts: Sequence[str], model: Path, base: Path, topics: Sequence[str] = TOPICS
) -> npt.NDArray[np.float64]:
    """Log-probability of every topic after every text: `(texts, topics)`."""
    read = answers.tokenizer(base)
    experts = {"task": str(model), "language": str(model)}
    recipe = {"base": str(base), "experts": experts, **answers.ALONE}
    sweep = ls.Sweep([answers.plan(recipe, "run")], dtype=DTYPE)
    requests = []
    for text in texts:
        prompt = read(row(text, topics[0])["prompt"])["input_ids"]
        requests += [(prompt, read(f" {one}", add_special_tokens=False)["input_ids"])
                     for one in topics]  # fmt: skip
    found = sweep.loglikelihood(requests, batch_size=28).logprob[0]
    return np.asarray(found, np.float64).reshape(-1, len(topics))


def topics(published: Path, code: str) -> str:
    """The right topics of the test sentences, as numbers."""
    test = documents(published, code, "test")
    return "".join(str(choices(code).index(topic)) for _, topic in test)


def right_share(published: Path, code: str, found: str) -> float:
    return float(np.mean([a == b for a, b in zip(found, topics(published, code), strict=True)]))


def record(published: Path, out: Path) -> None:
    """Write the answers in OUT to one file for each language."""
    RECORDED.mkdir(exist_ok=True)
    for code in (*LANGUAGES, *HEADLINES, ENGLISH):
        found: dict[str, Any] = {"right": topics(published, code), "runs": {}}
        for run in runs():
            path = out / "runs" / f"{run.name}.json"
            if run.code == code and path.is_file():
                found["runs"][words(run)] = json.loads(path.read_text("utf-8"))
        text = json.dumps(found, indent=1)
        (RECORDED / f"{code}.json").write_text(f"{text}\n", "utf-8", newline="\n")


# --- tables ---


@cache
def recorded(code: str) -> tuple[str, dict[str, str]]:
    """The right answers of a language, and those of every run, by its words."""
    read = json.loads((RECORDED / f"{code}.json").read_text("utf-8"))
    return read["right"], read["runs"]


def replicates(start: str, size: int, epochs: int = EPOCHS, codes: Sequence[str] = ()) -> list[int]:
    """The replicates in which a start was asked in every language of the task."""
    first = {one.replicate for one in runs() if one[1:3] == (start, size) and one.epochs == epochs}
    every = HEADLINES if HEADLINES.keys() & {*codes} else LANGUAGES
    return [
        number for number in sorted(first)
        if all(words(Run(code, start, size, number, epochs)) in recorded(code)[1]
               for code in every)
    ]  # fmt: skip


def classified(
    code: str, start: str, size: int, epochs: int = EPOCHS, of: Sequence[int] | None = None
) -> Classified:
    """A start's answers in some replicates, all by default."""
    right, found = recorded(code)
    if start == CLASSIFIER:
        name = f"{baselines.LINEAR}, {baselines.ALL if size == ALL else size}"
        every = baselines.recorded()[task_and_language(code)][name]
        # Its draws are the labels of the replicates; of all labels there is one draw.
        drawn = [0] if size == ALL else replicates(TASK, size, codes=[code])
        return Classified(every.labels, every.predicted[drawn])
    chosen = replicates(start, size, epochs, [code]) if of is None else of
    rows = [found[words(Run(code, start, size, number, epochs))] for number in chosen]
    names = choices(code)
    given = np.array([[names[int(one)] for one in row] for row in rows])
    return Classified(np.array([names[int(one)] for one in right]), given)


def score(start: str, size: int, epochs: int = EPOCHS, codes: Sequence[str] = ()) -> str:
    """Accuracy with its interval over documents, and balanced accuracy; nothing if not asked."""
    if not asked(start, size, epochs, codes):
        return ""
    found = [classified(code, start, size, epochs) for code in codes or LANGUAGES]
    balanced = np.mean([mean_recall(one) for one in found])
    return f"{per_cent(mean_over_groups([one.right for one in found]))} ({100 * balanced:.1f})"


def gain(
    start: str, other: str, size: int, epochs: int = EPOCHS, codes: Sequence[str] = ()
) -> Interval | None:
    """Accuracy of a start minus another's, paired, over the replicates of both."""
    of = sorted({*replicates(start, size, epochs, codes)}
                & {*replicates(other, size, epochs, codes)})  # fmt: skip
    if not of:
        return None
    first, second = (
        [classified(code, one, size, epochs, of).right for code in codes or LANGUAGES]
        for one in (start, other)
    )
    return paired_over_groups(first, second)


def gain_of_labels(start: str, size: int) -> Interval:
    """Accuracy of a start with labels minus without, paired.

    A start without labels is asked once for each pair of experts, and is compared with every
    replicate of its pair.
    """
    without = {pair_of(start, number): number for number in reversed(replicates(start, 0))}
    of = [number for number in replicates(start, size) if pair_of(start, number) in without]
    before = [without[pair_of(start, number)] for number in of]
    first = [classified(code, start, size, of=of).right for code in LANGUAGES]
    second = [classified(code, start, 0, of=before).right for code in LANGUAGES]
    return paired_over_groups(first, second)


def pair_of(start: str, replicate: int) -> tuple[int, int] | None:
    """The pair of experts of a replicate; None for the base, which has no experts."""
    return None if start == BASE else PAIRS[replicate]


def asked(start: str, size: int, epochs: int = EPOCHS, codes: Sequence[str] = ()) -> bool:
    if start == CLASSIFIER:
        return size > 0
    return bool(replicates(start, size, epochs, codes))


def sizes(codes: Sequence[str] = ()) -> list[int]:
    """Numbers of labels with answers of every start."""
    return [size for size in (0, *SIZES)
            if all(asked(start, size, codes=codes) for start in STARTS)]  # fmt: skip


def rows_of(codes: Sequence[str] = ()) -> list[list[str]]:
    """Every start: its score by number of labels, then its lead over the task expert."""
    rows = []
    for start in (CLASSIFIER, *STARTS, *RIVALS, JOINT):
        scores = [score(start, size, codes=codes) for size in sizes(codes)]
        gaps = [gain(start, TASK, size, codes=codes) if start not in (TASK, CLASSIFIER) else None
                for size in sizes(codes)]  # fmt: skip
        if any(scores):
            rows.append([start, *scores, *(points(one) if one else "" for one in gaps)])
    return rows


def in_english() -> Interval:
    """Accuracy of the task experts on the test sentences in English, the mean over experts."""
    right, found = recorded(ENGLISH)
    return mean_interval(np.mean([[a == b for a, b in zip(given, right, strict=True)]
                                  for given in found.values()], axis=0))  # fmt: skip


def starts_table(first: str, codes: Sequence[str] = ()) -> Table:
    """Every start by number of labels, the mean of some languages of one task."""
    columns = [f"{size or 'no'} labels" for size in sizes(codes)]
    return table([first, *columns, *(f"minus the task expert, {one}" for one in columns)],
                 rows_of(codes))  # fmt: skip


def longer_table() -> Table:
    """Starts with all labels after three and after six epochs, in the replicates of the latter."""
    both = (EPOCHS, LONGER)
    of = sorted(set.intersection(*({*replicates(one, ALL, LONGER)} for one in AGAIN)))

    def right(start: str, epochs: int) -> list[npt.NDArray[np.float64]]:
        return [classified(code, start, ALL, epochs, of).right for code in LANGUAGES]

    rows = []
    for start in AGAIN:
        scores = [per_cent(mean_over_groups(right(start, number))) for number in both]
        gaps = [paired_over_groups(right(start, number), right(TASK, number)) for number in both]
        rows.append([start, *scores, *("" if start == TASK else points(gap) for gap in gaps)])
    columns = [f"{number} epochs" for number in both]
    head = [*columns, *(f"minus the task expert, {one}" for one in columns)]
    return table([f"{ALL} labels", *head], rows)


def tables() -> dict[str, Table]:
    """The tables by name."""
    found = {f"finished in {name}": starts_table(name, [code]) for code, name in LANGUAGES.items()}
    found |= {f"headlines in {name}": starts_table(name, [code])
              for code, name in HEADLINES.items()}  # fmt: skip
    more = [[start, *(points(gain_of_labels(start, size)) for size in sizes()[1:])]
            for start in STARTS]  # fmt: skip
    columns = [f"{size} labels" for size in sizes()[1:]]
    names = ", ".join(LANGUAGES.values())
    return {
        "finished": starts_table(f"mean of {names}"),
        "finished headlines": starts_table(f"headlines, mean of {names}", [*HEADLINES]),
        "six epochs": longer_table(),
        "gains by labels": table(["minus no labels", *columns], more),
        **found,
    }


def draw() -> Drawing:
    """Draw the lead of every start over the task expert, by number of labels."""
    rows = [(f"{task}{size or 'no'} labels: {start}", apart)
            for task, codes in (("", [*LANGUAGES]), ("headlines, ", [*HEADLINES]))
            for size in sizes(codes) for start in (*STARTS, SEQUENCE, JOINT) if start != TASK
            if (apart := gain(start, TASK, size, codes=codes))]  # fmt: skip
    return draw_intervals(rows, measure="right answers minus the task expert's", differences=True)


def main(arguments: Sequence[str] | None = None) -> None:
    from research.figures import save_svg

    codes = [*LANGUAGES, *HEADLINES, ENGLISH]
    given = answers.command_line(__doc__, {"train": TRAINED, "finish": codes}, arguments)
    if given.command is None:
        print(*tables().values(), sep="\n\n")
        save_svg(draw(), FIGURE)
        return
    base = given.base.absolute()
    if given.command == "train":
        train(given.published, given.out, base, given.names)
    else:
        finish(given.published, given.out, base, given.names)
        record(given.published, given.out)


if __name__ == "__main__":
    main()
