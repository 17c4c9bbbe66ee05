"""Reading the excerpts of public data sets in `data/`."""

import csv
import json
from pathlib import Path

DATA = Path(__file__).parent / "data"


def read_jsonl(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def read_mgsm(language):
    text = (DATA / f"mgsm_{language}.tsv").read_text("utf-8")
    return [tuple(row) for row in csv.reader(text.splitlines(), delimiter="\t", quoting=3)]


def read_lines(name):
    return (DATA / name).read_text("utf-8").splitlines()
