"""The YAML of mixes: keys, parameters, and one clear line per mistake."""

import pytest
from refusals import refused

from layerswap.ground.errors import RecipeError
from layerswap.training.mix.schema import mix_text, parse_mix, read_mix

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


def mistakes(text, **options):
    return refused(RecipeError, parse_mix, text, where="m.yaml", **options).splitlines()


def test_a_small_mix_has_sensible_defaults():
    mix = parse_mix(GOOD)
    assert mix.kind == "chat"
    assert mix.sources["aya"].split == "train"
    assert mix.sources["notes"].messages.layout == "pairs"
    assert mix.filters.math
    assert mix.filters.language is None
    assert mix.filters.exact_duplicates
    assert mix.filters.near_duplicates.threshold == 0.7


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("prompt:", "promt:"), "m.yaml, line 5: sources.aya.promt: unknown key; did you mean "
         "'prompt'?"),
        (("name: mine", "nam: mine"), "m.yaml: name: is missing"),
        (("id: owner/name", "id: owner/name/more"), "m.yaml, line 4: sources.aya.id: "
         "'owner/name/more' is not a Hub id like 'owner/name'; for a file give path"),
        (("id: owner/name", "split: train"), "m.yaml, line 3: sources.aya: give one of id (a Hub "
         "data set), path (a local file) and parallel (files)"),
        (("path: notes.jsonl", "path: notes.jsonl\n    config: x"), "m.yaml, line 9: "
         "sources.notes.config: is for a Hub data set; remove it, or give id in place of path"),
        (('    completion: "{a}"\n', ""), "m.yaml, line 3: sources.aya: prompt and completion go "
         "together"),
        (('"{q}"', '"{q:>3}"'), "m.yaml, line 5: sources.aya.prompt: {q:>3} is not {column} or "
         "{column[key]}; for more write template: jinja"),
        (('prompt: "{q}"', 'text: "{q}"'), "m.yaml, line 5: sources.aya.text: a text has no "
         "prompt, but kind: chat needs one; give kind: text"),
        (("layout: pairs", "layout: pears"), "m.yaml, line 9: sources.notes.messages.layout: "
         "'pears' is not allowed; did you mean 'pairs'?"),
        (("id: owner/name", "id: owner/name\n    weight: 2.0"), "m.yaml, line 5: "
         "sources.aya.weight: a weight divides `total`; give `total`"),
        (("id: owner/name", "id: owner/name\n    where: {a: [{}]}"), "m.yaml, line 5: "
         "sources.aya.where: a: write a value, or a list of values, to keep"),
        (("id: owner/name", "id: owner/name\n    without: [x]"), "m.yaml, line 5: "
         "sources.aya.without: excludes files from `files`; give `files`"),
        (("name: mine", "name: mine\ntotal: 5\nvalidation: 5"), "m.yaml, line 3: validation: 5 of "
         "5 examples leaves none for training"),
        (("path: notes.jsonl", "parallel: {ig: news.ig}"), "m.yaml, line 8: "
         "sources.notes.parallel: give two or more files; for a single one give path"),
        (("path: notes.jsonl", "parallel: {a: b, c: d}\n    format: text"), "m.yaml, line 9: "
         "sources.notes.format: parallel files have a row in each line; remove it"),
        (("path: notes.jsonl", "parallel: {a: b, c: d}\n    split: x\n    config: x"), "m.yaml, "
         "line 10: sources.notes.config: is for a Hub data set; remove it, or give id in place of "
         "parallel"),
        (("name: mine", "name: mine\nvalidation: 2.5"), "m.yaml, line 2: validation: write a "
         "number of examples such as 200, or a share such as 0.1"),
        (("name: mine", f"name: mine\ntotal: {2**64}"), "m.yaml, line 2: total: input should be "
         f"less than or equal to 1000000000000000; found {2**64}"),
        (("name: mine", "name: mine\ntotal: al"), "m.yaml, line 2: total: write a whole number or "
         "all; found 'al'"),
        (("name: mine", "name: mine\nname: yours"), "m.yaml: line 2: key 'name' is given twice"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_its_key_path(change, line):
    assert change[0] in GOOD
    assert line in mistakes(GOOD.replace(*change, 1))


def test_all_mistakes_are_reported_at_once():
    text = GOOD.replace("prompt:", "promt:").replace("layout: pairs", "layout: 3")
    assert len(mistakes(text.replace("math: true", "maths: true"))) == 3
    text = GOOD.replace("id: owner/name", "id: a b").replace('"{q}"', '"{q:>3}"')
    assert len(mistakes(text.replace("path: notes.jsonl", ""))) == 3


def test_evaluation_sets_are_checked_like_sources():
    against = GOOD + "  evaluation: {against: {mgsm: {columns: [q]}}}\n"
    assert "against.mgsm: give one of id" in mistakes(against)[0]
    lines = mistakes(against.replace("mgsm: {columns: [q]}", "flores: {id: a/b, colums: [x]}"))
    assert any("flores.colums: unknown key; did you mean 'columns'?" in line for line in lines)
    assert any("flores.columns: is missing" in line for line in lines)


def test_a_file_is_read_and_its_text_kept(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert read_mix(tmp_path / "mine.yaml") == parse_mix(GOOD)
    assert mix_text(tmp_path / "mine.yaml") == GOOD
    assert mistakes("- a") == ["m.yaml: a mix is a mapping with `name` and `sources`"]
    with pytest.raises(RecipeError, match=r"^no/such\.yaml: cannot be read \(No such file"):
        read_mix("no/such.yaml")
    with pytest.raises(RecipeError, match="no such ready recipe; did you mean 'swahili'"):
        read_mix("swahilli")


TEMPLATE = """\
parameters: {language: null, path: rows.jsonl, total: 5, shuffled: true}
name: ${language}-mix
total: ${total}
sources:
  from-${language}:
    path: ${path}
    prompt: "$${q} in ${language}: {q}"
    completion: "{a}"
filters: {exact_duplicates: "${shuffled}"}
"""


def test_parameters_fill_keys_and_values_of_a_mix(tmp_path):
    settings = {"language": "no", "total": "7", "shuffled": "false"}
    mix = parse_mix(TEMPLATE, settings=settings)
    assert (mix.name, mix.total, mix.filters.exact_duplicates) == ("no-mix", 7, False)
    assert mix.sources["from-no"].path == "rows.jsonl"
    assert mix.sources["from-no"].prompt == "${q} in no: {q}"
    (tmp_path / "mix.yaml").write_text(TEMPLATE)
    assert parse_mix(mix_text(tmp_path / "mix.yaml", settings)).sources == mix.sources


@pytest.mark.parametrize(
    ("change", "settings", "line"),
    [
        (("", ""), {}, "m.yaml: parameters: a value is missing; give --set language=VALUE"),
        (("", ""), {"langage": "x"}, "m.yaml: parameters: no parameter 'langage'; did you mean "
         "'language'?"),
        (("${path}", "${pth}"), {"language": "x"}, "m.yaml: ${pth}: no parameter 'pth'; did you "
         "mean 'path'?"),
        (("{language: null", "[language] # "), {"language": "x"},
         "m.yaml: parameters: write a mapping of names to defaults"),
        (("prompt:", "promt:"), {"language": "x"}, "m.yaml, line 7: sources.from-x.promt: unknown "
         "key; did you mean 'prompt'?"),
        (("", ""), {"language": "x", "total": "many"}, "m.yaml, line 3: total: write a whole "
         "number or all; found 'many'"),
    ],
)  # fmt: skip
def test_a_mistake_with_parameters_is_one_line(change, settings, line):
    assert line in mistakes(TEMPLATE.replace(*change, 1), settings=settings)


def test_a_mix_without_parameters_takes_no_settings_and_has_no_placeholders():
    assert mistakes(GOOD, settings={"x": "1"}) == ["m.yaml: parameters: no parameter 'x'; the mix "
                                                   "has none"]  # fmt: skip
    assert parse_mix(GOOD.replace('"{q}"', '"costs ${q}"')).sources["aya"].prompt == "costs ${q}"
