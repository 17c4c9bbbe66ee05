"""The ready recipes: their definitions, and each built from small downloaded copies."""

import gzip
import re

import pytest
import yaml
from datasets import Dataset
from excerpts import read_lines, read_mgsm
from lab_files import write_jsonl

from layerswap.ground.errors import RecipeError
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import mix_text, parse_mix, read_mix, ready_recipes

PAPERS = {
    "orca-math": ["microsoft/orca-math-word-problems-200k"],
    "telugu": ["CohereForAI/aya_dataset", "allenai/nllb"],
    "bengali": ["CohereForAI/aya_dataset", "allenai/nllb", "ai4bharat/indic-align",
                "lumatic-ai/BongChat-v1-253k"],
    "swahili": ["CohereForAI/aya_dataset", "allenai/nllb", "lelapa/Inkuba-instruct",
                "bigscience/xP3mt"],
    "japanese": ["CohereForAI/aya_dataset", "allenai/nllb", "izumi-lab/llm-japanese-dataset",
                 "kunishou/databricks-dolly-15k-ja"],
    "open-web-math": ["open-web-math/open-web-math"],
    "bengali-text": ["bigscience-data/roots_indic-bn_wikisource"],
}  # fmt: skip
"""Table 3 of the first paper, A.6 and A.7 of the second, as printed."""
NEWS = {"swahili-news": ("sw", "swa"), "hausa-news": ("ha", "hau"), "yoruba-news": ("yo", "yor")}
OWN = {"text", "parallel"}
"""Templates for files of one's own."""
TRANSFER = {"sib200-english", "masakhanews-english", "tweeteval-english", "news", *NEWS}
"""The mixes of the studies of a real model."""
FLORES = {"en": "eng_Latn", "sw": "swh_Latn", "bn": "ben_Beng", "te": "tel_Telu", "ja": "jpn_Jpan"}


def test_the_ready_recipes_are_the_papers_mixes():
    assert set(PAPERS) == set(ready_recipes()) - TRANSFER - OWN
    for name, ids in PAPERS.items():
        mix = read_mix(name)
        assert mix.name == name
        assert set(ids) <= {source.id for source in mix.sources.values()}
        assert re.search(r"\(paper [12]", mix.description)
        assert mix.filters.evaluation is not None
        text = mix.kind == "text"
        assert (mix.total, mix.validation) == ((None, 0) if text else (80_000, 2_000))


@pytest.mark.parametrize("name", ["swahili", "bengali", "telugu", "japanese"])
def test_language_recipes_filter_mathematics_and_test_items(name):
    mix = read_mix(name)
    assert mix.filters.math is not None
    assert mix.filters.language is not None
    assert set(mix.filters.evaluation.against) == {"mgsm", "belebele", "flores"}
    for source in mix.sources.values():
        assert source.language == mix.languages[0]
        assert source.licence or any("licence" in text for text in source.unverified)
    if name == "swahili":
        assert mix.sources["xp3mt"].without == ["*flores*"]


@pytest.mark.parametrize(("name", "codes"), NEWS.items())
def test_news_recipes_are_text_and_translation(name, codes, tmp_path):
    (language, column), mix = codes, read_mix(name)
    assert (mix.name, mix.languages) == (name, [language, "en"])
    plain, *translations = mix.sources.values()
    assert (plain.language, plain.weight) == (language, 3)
    assert [source.weight for source in translations] == [1, 1]
    assert {source.licence for source in mix.sources.values()} == {"CC-BY-NC-4.0"}
    english = read_lines("flores.eng_Latn")
    rows = [{"translation": {"en": line, column: f"{line} ({column})"}} for line in english]
    write_jsonl(tmp_path / f"masakhane/mafand/en-{column}/train.jsonl", rows)
    built = build_mix(mix, local=tmp_path)
    assert [tally.kept for tally in built.tallies.values()] == [len(rows)] * 3
    texts = [*built.train["text"], *(built.validation["text"] if built.validation else [])]
    assert any(text.startswith("English: ") for text in texts)


def test_the_template_of_the_news_takes_another_language():
    settings = {"language": "ig", "code": "ibo", "name": "Igbo", "lower": "igbo"}
    mix = read_mix("news", settings)
    assert list(mix.sources) == ["text", "to-igbo", "to-english"]
    assert mix.sources["to-igbo"].text == "English: {translation[en]}\nIgbo: {translation[ibo]}"
    assert mix.row_tokens == 55
    assert read_mix("yoruba-news", {"row_tokens": "80"}).row_tokens == 80
    assert parse_mix(mix_text("news", settings)) == mix  # what `layerswap data` saves
    with pytest.raises(RecipeError, match="a value is missing; give --set code=VALUE --set name="):
        read_mix("news", {"language": "ig"})


def test_a_file_of_text_is_a_mix(tmp_path):
    lines = read_lines("flores.swh_Latn")
    (tmp_path / "news.lug").write_text("\n\n".join(lines), "utf-8")
    for form, settings in (("text", {}), ("paragraphs", {"format": "paragraphs", "total": "8"})):
        mix = read_mix("text", {"language": "lg", "path": "news.lug", **settings})
        assert (mix.name, mix.languages, mix.row_tokens) == ("lg-text", ["lg"], 55)
        built = build_mix(mix, folder=tmp_path)
        texts = [example.text for example in built.examples]
        assert set(texts) <= set(lines), form
        assert len(texts) == (8 if settings else len(lines))
        assert len(built.validation) == (1 if settings else 2)


def test_parallel_files_are_a_mix_of_text_and_translations(tmp_path):
    english, swahili = read_lines("flores.eng_Latn"), read_lines("flores.swh_Latn")
    (tmp_path / "news.zz").write_text("\n".join(swahili) + "\n", "utf-8")
    (tmp_path / "news.en").write_text("\n".join(english), "utf-8")
    settings = {"language": "zz", "name": "Zed", "path": "news.zz", "english": "news.en"}
    built = build_mix(read_mix("parallel", settings | {"total": "10"}), folder=tmp_path)
    assert [tally.kept for tally in built.tallies.values()] == [6, 2, 2]
    pairs = dict(zip(swahili, english, strict=True))
    for example in built.examples:
        if example.source == "text":
            assert example.text in pairs
        else:
            parts = dict(line.split(": ", 1) for line in example.text.split("\n"))
            assert pairs[parts["Zed"]] == parts["English"]
            first = "English" if example.source == "to-zz" else "Zed"
            assert example.text.startswith(f"{first}: ")
    every = build_mix(read_mix("parallel", settings | {"total": "all"}), folder=tmp_path)
    assert [tally.kept for tally in every.tallies.values()] == [len(english)] * 3
    with pytest.raises(RecipeError, match="give --set path=VALUE --set english=VALUE"):
        read_mix("parallel", {"language": "ig", "name": "Igbo"})


LABELS = ("negative", "neutral", "positive")
TOPICS = ("sports", "health", "politics")
ENGLISH = {
    "sib200-english": ("Davlan/sib200/eng_Latn/train.jsonl", 200, 70, "Text: Row", "Topic"),
    "masakhanews-english": ("masakhane/masakhanews/data/eng/train.tsv", 200, 100, "Text: Row",
                            "Topic"),
    "tweeteval-english": ("cardiffnlp/tweet_eval/sentiment/train-00000-of-00001.parquet", 300, 100,
                          "Tweet: Row", "Sentiment"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGLISH)
def test_english_tasks_have_the_prompts_of_the_suite(name, tmp_path):
    path, count, held_out, before, after = ENGLISH[name]
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    labels = LABELS if after == "Sentiment" else TOPICS
    rows = [{"text": f"Row {i}", "label": i % 3, "category": labels[i % 3]} for i in range(count)]
    if file.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".tsv":
        lines = [f'{row["category"]}\t{row["text"]}\t"A match,\nplayed."\thttps://' for row in rows]
        file.write_text("\n".join(["category\theadline\ttext\turl", *lines]) + "\n")
    else:
        write_jsonl(file, rows)
    built = build_mix(read_mix(name), local=tmp_path)
    assert (len(built.train), len(built.validation)) == (count - held_out, held_out)
    for row in built.train:
        number = int(re.fullmatch(rf"{before} (\d+)\n{after}:", row["prompt"])[1])
        assert row["completion"] == f" {labels[number % 3]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_every_recipe_of_the_papers_builds_from_downloaded_copies(name, tmp_path):
    mix = read_mix(name)
    publish(mix, tmp_path / "downloads")
    built = build_mix(mix, local=tmp_path / "downloads")
    assert set(built.tallies) == set(mix.sources)
    for source, tally in built.tallies.items():
        assert tally.kept > 0, (source, built.filters.counts)
        assert tally.origin == f"{mix.sources[source].id} (local copy)"
    assert built.index.sets
    if name == "swahili":
        assert built.tallies["xp3mt"].rows == 16  # the FLORES file was left out
    assert ("text" if mix.kind == "text" else "completion") in built.train.column_names


def publish(mix, local):
    """Write little copies of a recipe's data sets, with its columns, as `hf download` would."""
    language = mix.languages[0]
    english, target = read_lines("flores.eng_Latn"), read_lines(f"flores.{FLORES[language]}")
    for name, source in mix.sources.items():
        rows = []
        for i, (question, line) in enumerate(zip(english, target, strict=True)):
            answer = f"{i} {name} {line}"
            row = dict.fromkeys(ExampleMaker(source, name).columns, question)
            row |= {column: values[0] for column, values in source.where.items()}
            if source.messages:
                row = {source.messages.column: [[question, answer]]}
            elif source.text:
                row = {"text": f"{answer}\n" * 4}
            else:
                row[source.completion.strip("{}")] = answer
            rows.append(row)
        publish_origin(local / source.id, source, rows)
    for origin in mix.filters.evaluation.against.values():
        row = dict.fromkeys(origin.columns, read_mgsm(language)[0][0])
        publish_origin(local / origin.id, origin, [row])


def publish_origin(folder, origin, rows):
    if origin.header:
        name = origin.files[0].rpartition("/")[2]
        lines = ["\t".join(str(row.get(c, "x")) for c in origin.header) + "\n" for row in rows]
        data = "".join(lines).encode()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    elif origin.files and origin.files[0].endswith(".parquet"):
        (folder / origin.files[0]).parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(folder / origin.files[0])
    elif origin.files:
        write_jsonl(folder / origin.files[0].replace("*", "xp3_tasks"), rows)
        if "*" in origin.files[0]:
            leak = [{key: read_lines("flores.swh_Latn")[0] for key in rows[0]}]
            write_jsonl(folder / origin.files[0].replace("*", "xp3_facebook_flores"), leak)
    else:
        splits = origin.split.split("+")
        for split in splits:
            suffix = "" if split in ("train", "test", "dev", "devtest") else "-00000-of-00001"
            write_jsonl(folder / (origin.config or "data") / f"{split}{suffix}.jsonl", rows)
        if len(splits) > 1:  # the card lays out names that `datasets` would not guess
            files = [{"split": s, "path": f"{origin.config}/{s}.jsonl"} for s in splits]
            card = {"configs": [{"config_name": origin.config, "data_files": files}]}
            (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
