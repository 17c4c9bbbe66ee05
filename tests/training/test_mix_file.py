"""The YAML of mixes: what it may say, and one clear line per mistake."""

from __future__ import annotations

import re

import pytest

from layerswap.errors import RecipeError
from layerswap.training.mix.schema import mix_text, parse_mix, read_mix, ready_recipes

GOOD = """\
name: mine
sources:
  aya:
    id: owner/name
    prompt: "{q}"
    completion: "{a}"
  notes:
    path: notes.jsonl
    messages: {column: turns, layout: pairs}
filters:
  math: true
  language: false
  near_duplicates: {threshold: 0.7}
"""


def lines_of(text):
    with pytest.raises(RecipeError) as caught:
        parse_mix(text, where="m.yaml")
    return str(caught.value).splitlines()


def test_a_small_mix_has_sensible_defaults():
    mix = parse_mix(GOOD)
    assert mix.kind == "chat"
    assert mix.sources["aya"].split == "train"
    assert mix.sources["notes"].messages.layout == "pairs"
    assert mix.filters.math.threshold == 0.5
    assert mix.filters.language is None
    assert mix.filters.exact_duplicates
    assert mix.filters.near_duplicates.threshold == 0.7
    assert mix.filters.near_duplicates.permutations == 128


def test_where_takes_a_value_or_several():
    mix = parse_mix(GOOD.replace("    prompt", "    where: {lang: sw, n: [1, 2]}\n    prompt"))
    assert mix.sources["aya"].where == {"lang": ["sw"], "n": [1, 2]}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("prompt:", "promt:"), "m.yaml, line 5: sources.aya.promt: unknown key; did you mean "
         "'prompt'?"),
        (("name: mine", "nam: mine"), "m.yaml: name: is missing"),
        (("id: owner/name", "id: owner/name/more"), "m.yaml, line 4: sources.aya.id: "
         "'owner/name/more' is not a Hub id like 'owner/name'; for a file give path"),
        (("id: owner/name", "split: train"), "m.yaml, line 3: sources.aya: give one of id (a Hub "
         "data set) and path (a local file)"),
        (("path: notes.jsonl", "path: notes.jsonl\n    config: x"), "m.yaml, line 9: "
         "sources.notes.config: belongs to a Hub data set; a path takes none"),
        (('    completion: "{a}"\n', ""), "m.yaml, line 3: sources.aya: prompt and completion go "
         "together"),
        (('"{q}"', '"{q:>3}"'), "m.yaml, line 5: sources.aya.prompt: {q:>3} is not {column} or "
         "{column[key]}; for more write template: jinja"),
        (('prompt: "{q}"', 'text: "{q}"'), "m.yaml, line 5: sources.aya.text: a text has no "
         "prompt, as kind: chat needs; give kind: text"),
        (("layout: pairs", "layout: pears"), "m.yaml, line 9: sources.notes.messages.layout: "
         "'pears' is not allowed; did you mean 'pairs'?"),
        (("id: owner/name", "id: owner/name\n    weight: 2.0"), "m.yaml, line 5: "
         "sources.aya.weight: a weight shares out `total`; give `total`"),
        (("id: owner/name", "id: owner/name\n    where: {a: [{}]}"), "m.yaml, line 5: "
         "sources.aya.where: a: write a value, or a list of values, to keep"),
        (("id: owner/name", "id: owner/name\n    without: [x]"), "m.yaml, line 5: "
         "sources.aya.without: takes away from `files`; give `files`"),
        (("id: owner/name", "id: owner/name\n    skip: [maths]"), "m.yaml, line 5: "
         "sources.aya.skip[0]: 'maths' is not allowed; did you mean 'math'?"),
        (("threshold: 0.7", "treshold: 0.7"), "m.yaml, line 13: "
         "filters.near_duplicates.treshold: unknown key; did you mean 'threshold'?"),
        (("  math: true", "  maths: true"), "m.yaml, line 11: filters.maths: unknown key; did you "
         "mean 'math'?"),
        (("name: mine", "name: mine\ntotal: 5\nvalidation: 5"), "m.yaml, line 3: validation: 5 of "
         "5 examples leaves none to train on"),
        (("name: mine", "name: mine\nchat_template: x.jinja"), "m.yaml, line 2: chat_template: "
         "makes text; give kind: prompt-completion or kind: text"),
        (("name: mine", "name: mine\nname: yours"), "m.yaml: line 2: key 'name' is given twice"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_its_key_path(change, line):
    assert change[0] in GOOD
    assert line in lines_of(GOOD.replace(*change, 1))


def test_all_mistakes_are_told_at_once():
    text = GOOD.replace("id: owner/name", "id: a b").replace("layout: pairs", "layout: 3")
    text = text.replace("math: true", "maths: true")
    assert len(lines_of(text)) == 3


def test_evaluation_sets_are_checked_like_sources():
    text = (
        GOOD + "  evaluation: {against: {mgsm: {columns: [q]}, flores: {id: a/b, colums: [x]}}}\n"
    )
    found = lines_of(text)
    assert any("against.mgsm: give one of id" in line for line in found)
    assert any("flores.colums: unknown key; did you mean 'columns'?" in line for line in found)
    assert any("flores.columns: is missing" in line for line in found)


def test_what_is_no_mapping_and_what_is_no_file():
    assert lines_of("- a") == ["m.yaml: a mix is a mapping with `name` and `sources`"]
    with pytest.raises(RecipeError, match=r"^no/such\.yaml: cannot be read \(No such file"):
        read_mix("no/such.yaml")
    with pytest.raises(RecipeError, match="no such ready recipe; did you mean 'swahili'"):
        read_mix("swahilli")


def test_a_file_is_read_and_its_text_kept(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert read_mix(tmp_path / "mine.yaml") == parse_mix(GOOD)
    assert mix_text(tmp_path / "mine.yaml") == GOOD


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
LANGUAGE_NEWS = {"swahili-news", "hausa-news", "yoruba-news"}
TRANSFER = {"sib200-english", "masakhanews-english", "tweeteval-english", *LANGUAGE_NEWS}
"""The mixes of the studies of a real model."""


def test_the_ready_recipes_are_the_papers_mixes():
    assert set(PAPERS) == set(ready_recipes()) - TRANSFER
    for name, ids in PAPERS.items():
        mix = read_mix(name)
        assert mix.name == name
        assert set(ids) <= {source.id for source in mix.sources.values()}
        assert re.search(r"\(paper [12]", mix.description)
        assert mix.filters.evaluation is not None
        text = mix.kind == "text"
        assert (mix.total, mix.validation) == ((None, 0) if text else (80_000, 2_000))


@pytest.mark.parametrize("name", sorted(LANGUAGE_NEWS))
def test_news_recipes_are_text_and_translation(name):
    mix = read_mix(name)
    (code,) = {code for code in mix.languages if code != "en"}
    plain, *translations = mix.sources.values()
    assert (plain.language, plain.weight) == (code, 3)
    assert [one.weight for one in translations] == [1, 1]
    assert {one.licence for one in mix.sources.values()} == {"CC-BY-NC-4.0"}


@pytest.mark.parametrize("name", ["swahili", "bengali", "telugu", "japanese"])
def test_language_recipes_keep_mathematics_and_test_items_out(name):
    mix = read_mix(name)
    assert mix.filters.math is not None
    assert mix.filters.language is not None
    assert set(mix.filters.evaluation.against) == {"mgsm", "belebele", "flores"}
    for source in mix.sources.values():
        assert source.language == mix.languages[0]
        assert source.licence or any("licence" in text for text in source.unverified)
    if name == "swahili":
        assert mix.sources["xp3mt"].without == ["*flores*"]
