"""The tables of a real model are those of the recorded scores, and its inputs can be made again."""

import json
import re

import pytest
from lab_files import write_tsv
from research.rows import TABLES
from research.tables import MEASURED, PROSE

from layerswap.study.spec import read_study
from layerswap.training.mix.schema import read_mix
from research import inputs, transfer

LINK = re.compile(r"\(tables/([\w-]+\.csv)\)")


@pytest.fixture(scope="module")
def tables():
    return transfer.tables()


@pytest.mark.slow
@pytest.mark.parametrize("page", transfer.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_recorded_scores(page, tables):
    text = page.read_text("utf-8")
    assert transfer.MARK.search(text)
    assert transfer.filled(text, tables) == text


@pytest.mark.slow
def test_whole_tables_are_files_beside_the_pages(tables):
    files = {path.name: path.read_text("utf-8") for path in transfer.CSV.glob("*.csv")}
    recorded = {transfer.csv_name(name): whole.csv() for name, whole in tables.items()}
    assert files.items() >= recorded.items()
    others = {*TABLES, "methods", *MEASURED, *PROSE}
    assert files.keys() - recorded.keys() == {f"{name}.csv" for name in others}
    linked = {name for page in transfer.PAGES for name in LINK.findall(page.read_text("utf-8"))}
    assert linked <= files.keys()
    assert {"means.csv", "dose-task.csv", "balanced.csv"} <= linked


@pytest.mark.slow
def test_the_readme_has_the_numbers_of_its_chart():
    readme = (transfer.HERE.parent / "README.md").read_text("utf-8")
    assert f"]({transfer.CHART.relative_to(transfer.HERE.parent)}.svg)" in readme
    shown = {name: f"{100 * interval.mean:.1f}" for name, interval in transfer.summary()}
    for task in ("headlines", "sentences"):
        numbers = ", ".join(f"{road} {shown[f'{task}: {road}']}" for road in transfer.ROADS)
        assert f"{task.capitalize()}: {numbers}" in readme


@pytest.fixture
def published(tmp_path):
    root = tmp_path / "published"
    news = [["sports", f"Match {i}", "text"] for i in range(99)]
    for code in ("eng", "swa", "hau", "yor"):
        for split in ("dev", "test", *(["fewshot50"] if code == "eng" else [])):
            file = root / "masakhanews" / f"{code}.{split}.tsv"
            write_tsv(file, ("category", "headline", "text"), news)
    for code, splits in (("eng_Latn", ["train"]), ("swh_Latn", ["dev", "test"])):
        for split in splits:
            trips = [(i, "travel", f"Trip {i}") for i in range(9)]
            file = root / "sib200" / f"{code}.{split}.tsv"
            write_tsv(file, ("index_id", "category", "text"), trips)
    (root / "lafand_mt").mkdir()
    for code in ("swa", "hau", "yor"):
        for side in ("en", code):
            for split in ("train", "dev"):
                (root / "lafand_mt" / f"en-{code}.{split}.{side}").write_text("One\nTwo\n")
        for split in ("dev", "test", "train"):
            tweets = [(f"{split} {one} {i}", one) for one in inputs.SENTIMENTS for i in range(400)]
            write_tsv(root / "afrisenti" / f"{code}.{split}.tsv", ("tweet", "label"), tweets)
    (root / "tweeteval").mkdir()
    (root / "tweeteval" / "val_text.txt").write_text("".join(f"T {i}\n" for i in range(1200)))
    (root / "tweeteval" / "val_labels.txt").write_text("".join(f"{i % 3}\n" for i in range(1200)))
    return root


def test_the_inputs_of_the_studies_as_they_were_run(published, tmp_path):
    out = tmp_path / "inputs"
    inputs.write_inputs(published, out, "/models/gemma")
    for name in inputs.STUDIES:
        study = read_study(out / f"{name}.yaml")
        assert (study.name, study.base) == (name, "/models/gemma")
        for kind in study.kinds.values():
            mix = read_mix(out / kind.data)
            assert all((out / source.path).is_file() for source in mix.sources.values())
    prompts = (out / "swa.prompts.jsonl").read_text().splitlines()
    assert len(prompts) == inputs.PROMPTS
    assert json.loads(prompts[0]) == {"text": "Text: One\nTopic:"}
    assert len((out / "news.jsonl").read_text().splitlines()) == 99  # each headline once
    english = [json.loads(line) for line in (out / "tweets.jsonl").read_text().splitlines()]
    asked = inputs.table(out / "published" / "afrisenti" / "swa.test.tsv")
    for rows, each in ((english, 312), (asked, 150)):
        counts = [sum(row["label"] == one for row in rows) for one in inputs.SENTIMENTS]
        assert counts == [each] * 3
