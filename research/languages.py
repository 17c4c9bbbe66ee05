"""The inputs of the studies of ten languages and of the dose of text, from published files.

    python -m research.languages PUBLISHED OUT --base GEMMA
    LAYERSWAP_DATA=PUBLISHED layerswap study run OUT/ten-languages.yaml --out ten

`PUBLISHED` is as in `research.inputs`, with the training splits of MasakhaNEWS. Rows are plain text
of a language: articles of the training split, without headline and topic, cut at sentence ends into
pieces of at most 400 characters. Swahili and Hausa take the sentences of MAFAND's training split.

`OUT/experts/*.yaml` are the trainings of the dose, one file an expert (`layerswap train`):

    sw-73k-1, sw-290k-2, so-all-1     a language expert of that dose and seed
    task-1, middle-1                  headlines, trained in full or in layers 3 to 16 alone
    sentences-1, sentences-middle-1   the same for sentences
    after-task-1, after-outer-task-1  the language learned on top of task-1, everything or the outer
                                      layers alone; nothing is merged

`OUT/dose-*.yaml` are the studies that evaluate them, once they are trained into `OUT/trained/NAME`;
`--trained` leaves out of them what is not yet there:

    layerswap data OUT/masakhanews-english.yaml --out OUT/news
    layerswap data OUT/sib200-english.yaml --out OUT/sib
    for one in OUT/experts/*.yaml; do
        layerswap train $one --out OUT/trained/$(basename $one .yaml)
    done
    for one in OUT/dose-*.yaml; do layerswap study run $one --out $(basename $one .yaml); done
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tokenizers import Tokenizer

from research.inputs import headlines, local_mix, table, write_jsonl

HERE = Path(__file__).parent
STUDIES = ("ten-languages/study", "ten-languages/middle")
LANGUAGES = ("swa", "hau", "yor", "pcm", "sna", "som", "run", "orm", "xho", "lin")
MAFAND = ("swa", "hau")
DOSES = {"73k": 80_000, "290k": 310_000, "all": None}
"""Tokens of the training rows; the steps of the smaller doses read a little less."""
STEPS = {"73k": 142, "290k": 568, "all": None}
"""Steps of 512 tokens; one epoch, which holds no row twice, for all text."""
TRAINED: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "sw": ("swa", {"73k": (1, 2, 3), "290k": (1, 2, 3), "all": (1,)}),
    "sn": ("sna", {"73k": (1,), "290k": (1,), "all": (1,)}),
    "so": ("som", {"73k": (1,), "290k": (1,), "all": (1,)}),
}
"""Language experts of the dose: the code of their text, and the seeds of each dose."""


class Task(NamedTuple):
    """A task of the dose."""

    rows: str  # folder of its English rows
    epochs: int
    suite: str


TASKS = {"task": Task("news", 2, "masakhanews"),
         "sentences": Task("sib", 3, "sib200")}  # fmt: skip
MIDDLE = {"task": "middle", "sentences": "sentences-middle"}
"""The names of task experts that train in their middle layers alone."""
ALL_LAYERS = [{"layers": "0-17"}]
SCHEDULE = {"lr_scheduler_type": "linear", "weight_decay": 0.01, "max_length": 256, "bf16": True}
LONGEST = 400
"""Characters of a row, unless one sentence is longer."""
SEED = 20261123
SEEDS = (1, 2, 3)
"""Of task experts."""
VALIDATION = 64


def pieces(text: str) -> list[str]:
    """A text cut at sentence ends."""
    found = [""]
    for sentence in re.split(r"(?<=[.!?])\s+|\s{3,}|\n+", text.strip()):
        joined = f"{found[-1]} {sentence}".strip()
        found[-1:] = [joined] if len(joined) <= LONGEST else [found[-1], sentence]
    return found


def texts(published: Path, code: str) -> list[str]:
    """All rows of a language, once each, in a random order."""
    if code in MAFAND:
        return sentences(published, code)
    articles = table(published / "masakhanews" / f"{code}.train.tsv")
    return _shuffled(piece for article in articles for piece in pieces(article["text"]))


def sentences(published: Path, code: str) -> list[str]:
    """The sentences of MAFAND's training split, once each, in a random order."""
    path = published / "lafand_mt" / f"en-{code}.train.{code}"
    return _shuffled(line.strip() for line in path.read_text("utf-8").splitlines())


def _shuffled(rows: Iterable[str]) -> list[str]:
    unique = sorted({row for row in rows if len(row) >= 20})
    random.Random(SEED).shuffle(unique)
    return unique


def write_texts(published: Path, out: Path, tokenizer: Tokenizer) -> None:
    """Write the rows of each language and dose; a larger dose holds the rows of the smaller."""
    for code in LANGUAGES:
        rows = texts(published, code)
        validation, rows = rows[:VALIDATION], rows[VALIDATION:]
        write_jsonl(out / f"{code}-validation.jsonl", ({"text": row} for row in validation))
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(rows)]
        for dose, tokens in DOSES.items():
            kept, total = 0, 0
            while kept < len(rows) and (tokens is None or total < tokens):
                total += lengths[kept]
                kept += 1
            if tokens is not None and total < tokens:
                continue
            name = f"{code}-{dose}"
            write_jsonl(out / f"{name}.jsonl", ({"text": row} for row in rows[:kept]))
            print(f"{name}: {kept} rows, {total} tokens")


def language_spec(code: str, dose: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The training of a language expert, as EXPERT.yaml."""
    steps = STEPS[dose]
    return {
        "data": {"train": f"../{code}-{dose}.jsonl", "validation": f"../{code}-validation.jsonl"},
        "train": {"places": ALL_LAYERS},
        "hyperparameters": {
            "learning_rate": 5e-5, "num_train_epochs": 1, "per_device_train_batch_size": 2,
            **SCHEDULE, **({"max_steps": steps} if steps else {}),
        },
        "save_every": 10000 if steps else 200,
        "seed": seed,
        **changes,
    }  # fmt: skip


def specs(base: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every training of the dose, by the name of its expert."""
    for language, (code, doses) in TRAINED.items():
        for dose, seeds in doses.items():
            for seed in seeds:
                yield f"{language}-{dose}-{seed}", language_spec(code, dose, seed, base=base)
    for task, (rows, epochs, _) in TASKS.items():
        for seed in SEEDS:
            spec = {
                "base": base,
                "data": f"../{rows}",
                "train": {"places": ALL_LAYERS},
                "hyperparameters": {
                    "learning_rate": 2e-5, "num_train_epochs": epochs,
                    "per_device_train_batch_size": 16, **SCHEDULE,
                },
                "save_every": 10000,
                "seed": seed,
            }  # fmt: skip
            part = {"partition": "C", "part": "task", "places": ALL_LAYERS}
            yield f"{task}-{seed}", spec
            yield f"{MIDDLE[task]}-{seed}", {**spec, "train": part}
            outer = {"partition": "C", "part": "language", "places": ALL_LAYERS}
            for name, places in (("after", spec["train"]), ("after-outer", outer)):
                yield (
                    f"{name}-{task}-{seed}",
                    language_spec(
                        "swa", "73k", seed, base=f"../trained/{task}-{seed}", train=places
                    ),
                )


def dose_studies(
    base: str, trained: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The studies of the dose: nothing is chosen, and the test documents are asked once.

    A study has all doses of its languages, with all task experts of one kind. If `trained` is
    given, it leaves out other experts, and languages and studies without experts.
    """

    def there(names: Sequence[str]) -> list[str]:
        return [one for one in names if trained is None or one in trained]

    def paths(names: Sequence[str]) -> dict[str, list[str]]:
        return {"experts": [f"trained/{one}" for one in names]}

    texts = {
        language: [f"{language}-{dose}-{seed}" for dose, seeds in doses.items() for seed in seeds]
        for language, (_, doses) in TRAINED.items()
    }
    merges, swahili = ["base", "experts", "soup"], {"sw": texts["sw"]}
    for task, (_, _, suite) in TASKS.items():
        after = [f"{kind}-{task}-{seed}" for kind in ("after", "after-outer") for seed in SEEDS]
        own = texts if task == "task" else swahili
        kinds = {kind: [f"{kind}-{seed}" for seed in SEEDS] for kind in (task, MIDDLE[task])}
        for kind, names, languages, baselines in (
            *((kind, names, own, merges) for kind, names in kinds.items()),
            (f"after-{task}", after, {"sw": there(texts["sw"])[:1]}, ["experts"]),
        ):
            found = {language: there(of) for language, of in languages.items()}
            experts = {language: paths(of) for language, of in found.items() if of}
            if not there(names) or not experts:
                continue
            yield f"dose-{kind}", {
                "name": f"dose-{kind}",
                "description": f"{task} by the dose of text, on Gemma 3 270M",
                "base": base, "device": "cpu", "dtype": "bfloat16",
                "task": paths(there(names)),
                "languages": experts,
                "pairs": "all", "change": False, "baselines": baselines,
                "evaluate": {"suite": suite, "development": "none"},
            }  # fmt: skip


def write_study(name: str, out: Path, base: str) -> None:
    """Write a study's file with the base's folder in place of its name."""
    text = (HERE / f"{name}.yaml").read_text("utf-8")
    target = out / f"{name.removesuffix('/study').replace('/', '-')}.yaml"
    target.write_text(text.replace("base: gemma-3-270m", f"base: {base}"), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path, help="folder of the published files")
    parser.add_argument("out", type=Path, help="folder of the inputs")
    parser.add_argument("--base", required=True, help="folder of Gemma 3 270M")
    parser.add_argument(
        "--trained", action="store_true", help="studies of the experts in OUT/trained alone"
    )
    given = parser.parse_args()
    experts = given.out / "experts"
    experts.mkdir(parents=True, exist_ok=True)
    base = str(Path(given.base).absolute())
    write_texts(given.published, given.out, Tokenizer.from_file(f"{base}/tokenizer.json"))
    english = list(headlines(given.published))
    write_jsonl(given.out / "news.jsonl", english)
    sentences = table(given.published / "sib200" / "eng_Latn.train.tsv")
    write_jsonl(
        given.out / "sib.jsonl", ({k: r[k] for k in ("text", "category")} for r in sentences)
    )
    mixes = {
        "masakhanews-english": local_mix(
            "masakhanews-english", "news.jsonl", total=len(english), validation=VALIDATION
        ),
        "sib200-english": local_mix("sib200-english", "sib.jsonl"),
    }
    for name, mix in mixes.items():
        text = yaml.safe_dump(mix, allow_unicode=True, sort_keys=False)
        (given.out / f"{name}.yaml").write_text(text, "utf-8")
    for name, spec in specs(base):
        (experts / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), "utf-8")
    trained = None
    if given.trained:
        trained = {one.parent.name for one in (given.out / "trained").glob("*/config.json")}
    for name, study in dose_studies(base, trained):
        (given.out / f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False), "utf-8")
    for name in STUDIES:
        write_study(name, given.out, base)


if __name__ == "__main__":
    main()
