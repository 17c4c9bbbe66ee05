"""Do labels of a task that a teacher reads in English help a model that reads the language?

    python -m research.distilled finish PUBLISHED OUT --base GEMMA   # OUT of research.labels
    python -m research.distilled                                     # the table

Fixed before anything ran. Of 3,000 pairs of a sentence in English and in Swahili or Yoruba (MAFAND,
for Swahili TICO-19 and Tatoeba too), the task expert reads the English side. For each topic one
hundred pairs are drawn without replacement, in proportion to the softened probability that it gives
the topic: the labels are balanced, and as uncertain as the teacher. A student reads the other side
with the drawn topic, once; its last step is taken. Students start as the task expert and as its
swap. The control is as many steps on the English rows of the task. No pair shares five words in a
row with a test sentence. The rule: distillation stays if a student is above its start and above
its control, both clearly, from both starts in both languages. Swahili did not meet it, so
the models in Yoruba were not trained to the end. The command goes on where it was stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.statistics import Interval, Values, mean_interval, paired_difference
from layerswap.training.mix.filters import overlap
from research import answers, labels
from research.answers import SWAP, TASK
from research.inputs import write_jsonl
from research.labels import TOPICS
from research.markdown import Table, per_cent, points, table

RECORDED = Path(__file__).parent / "labels" / "distilled.json"
LANGUAGES = {"sw": "Swahili", "yo": "Yoruba"}
FILES = {
    "sw": (("tatoeba_v20210807/eng-swa", "eng", "swa", 400),
           ("tico19/tico19-test.eng-swa", "eng", "swa", 1000),
           ("lafand_mt/en-swa.train", "en", "swa", 3000)),
    "yo": (("lafand_mt/en-yor.train", "en", "yor", 3000),),
}  # fmt: skip
"""Files of pairs, the endings of both sides, and the most pairs that are taken of each."""
PAIRS, TO_A_TOPIC = 3000, 100
SOFTENED = 2.0
"""Temperature of the teacher's probabilities."""
STARTS = (TASK, SWAP)
START, STUDENT, CONTROL = "start", "pairs", "English rows"
SHORTEST, LONGEST = 30, 300
"""Characters of a sentence."""


def pairs(published: Path, code: str) -> list[tuple[str, str]]:
    """Pairs of English and the language, those of small files first, drawn with one seed."""
    rng = np.random.default_rng(answers.SEED)
    tests = [text for text, _ in labels.documents(published, code, "test")]
    found: dict[tuple[str, str], None] = {}
    for stem, english, other, most in FILES[code]:
        sides = [
            Path(f"{published / stem}.{one}").read_text("utf-8").splitlines()
            for one in (english, other)
        ]
        both = [(" ".join(one.split()), " ".join(two.split()))
                for one, two in zip(*sides, strict=True)]  # fmt: skip
        both = [one for one in dict.fromkeys(both)
                if all(SHORTEST <= len(side) <= LONGEST for side in one)]  # fmt: skip
        taken = [both[i] for i in rng.permutation(len(both))[:most]]
        shared = {*overlap(tests, [other for _, other in taken])}
        found |= dict.fromkeys(one for i, one in enumerate(taken) if i not in shared)
    return list(found)[:PAIRS]


def drawn(teacher: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pairs and their topics, a hundred to a topic where there are as many, in random order."""
    rng = np.random.default_rng(answers.SEED)
    soft = np.exp((teacher - teacher.max(1, keepdims=True)) / SOFTENED)
    soft /= soft.sum(1, keepdims=True)
    free, found = np.ones(len(soft), bool), []
    # The topic that the teacher names least draws first.
    for topic in np.argsort(soft.sum(0)):
        left = np.flatnonzero(free)
        weights = soft[left, topic] / soft[left, topic].sum()
        taken = rng.choice(left, min(TO_A_TOPIC, len(left)), replace=False, p=weights)
        free[taken] = False
        found += [(int(i), int(topic)) for i in taken]
    return [found[i] for i in rng.permutation(len(found))]


def finish(published: Path, out: Path, base: Path, codes: Sequence[str]) -> None:
    """Train the students and their controls, and keep their answers in OUT."""
    folder = out / "distilled"
    folder.mkdir(exist_ok=True)
    for code in codes:
        rows = out / f"distilled-{code}.jsonl"
        if not rows.is_file():
            both = pairs(published, code)
            teacher = labels.scores([english for english, _ in both], out / "topic-1", base)
            chosen = drawn(teacher)
            write_jsonl(rows, [labels.row(both[i][1], TOPICS[topic]) for i, topic in chosen])
            agreed = np.mean([teacher[i].argmax() == topic for i, topic in chosen])
            named = np.bincount(teacher.argmax(1), minlength=len(TOPICS))
            print(f"{code}: {len(both)} pairs, named {named}, {agreed:.1%} as named", flush=True)
        for start in STARTS:
            begin = labels.start_of(labels.Run(code, start, 0, 0), out, base)
            if begin is None:
                raise SystemExit(f"{start}: research.labels has not trained its experts")
            length = len(rows.read_text("utf-8").splitlines())
            english = labels.english(published)
            write_jsonl(
                out / "distilled-en.jsonl", [english[i % len(english)] for i in range(length)]
            )
            for kind, file in ((STUDENT, rows.name), (CONTROL, "distilled-en.jsonl")):
                name = f"distilled-{code}-{start.split()[0].strip(',')}-{kind.split()[0]}"
                target = folder / f"{name}.json"
                if target.is_file():
                    continue
                model = answers.fit(out, name, labels.spec(begin, file, 1, 1))
                found = labels.ask(published, model, base, code)
                entry = {"code": code, "start": start, "kind": kind, "answers": found}
                target.write_text(json.dumps(entry), "utf-8")
                shutil.rmtree(model)
                right = labels.right_share(published, code, found)
                print(f"{name}: {right:.1%}", flush=True)


def record(out: Path) -> None:
    """Write the answers in OUT to one file."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(out.glob("distilled/*.json"))]
    RECORDED.write_text(f"{json.dumps(found, indent=1)}\n", "utf-8", newline="\n")


# --- table ---


@cache
def right(code: str, start: str, kind: str) -> Values:
    """1.0 for every right answer of a model."""
    truth, runs = labels.recorded(code)
    if kind == START:
        given = runs[labels.words(labels.Run(code, start, 0, 0))]
    else:
        every = json.loads(RECORDED.read_text("utf-8"))
        (given,) = (one["answers"] for one in every
                    if (one["code"], one["start"], one["kind"]) == (code, start, kind))  # fmt: skip
    return np.array([float(a == b) for a, b in zip(given, truth, strict=True)])


def gain(code: str, start: str, over: str) -> Interval:
    """Accuracy of a student minus its start's or its control's, paired by sentence."""
    return paired_difference(right(code, start, STUDENT), right(code, start, over))


def tables() -> dict[str, Table]:
    """The table by name."""
    rows: list[list[Any]] = []
    known = {one["code"] for one in json.loads(RECORDED.read_text("utf-8"))}
    for code, name in LANGUAGES.items():
        for start in STARTS if code in known else ():
            own = [per_cent(mean_interval(right(code, start, kind)))
                   for kind in (START, CONTROL, STUDENT)]  # fmt: skip
            gaps = [points(gain(code, start, over)) for over in (START, CONTROL)]
            rows.append([f"{name}: {start}", *own, *gaps])
    head = ["start", START, CONTROL, STUDENT, "pairs minus start", "pairs minus English rows"]
    return {"distilled": table(head, rows)}


def main(arguments: Sequence[str] | None = None) -> None:
    given = answers.command_line(__doc__, {"finish": [*LANGUAGES]}, arguments)
    if given.command is None:
        print(*tables().values(), sep="\n\n")
        return
    finish(given.published, given.out, given.base.absolute(), given.names)
    record(given.out)


if __name__ == "__main__":
    main()
