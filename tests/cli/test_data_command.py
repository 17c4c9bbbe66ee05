"""`layerswap data`: a mix built, the ready recipes listed, and what a person can get wrong."""

import json

import pytest


@pytest.fixture
def mix(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"q": f"Swali la {i}?", "a": f"Jibu la {i}"} for i in range(20)]
    rows += [{"q": "Juma ana maembe 12 na anakula 5. Ana maembe mangapi?", "a": "7"}, rows[0]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mix.yaml").write_text(
        'name: small\nvalidation: 2\nsources:\n  rows: {path: rows.jsonl, prompt: "{q}", '
        'completion: "{a}"}\nfilters: {math: true}\n'
    )
    return tmp_path / "mix.yaml"


def test_a_mix_is_built_with_its_card(layerswap, mix, tmp_path):
    result = layerswap.done("data", mix, "--out", tmp_path / "out")
    assert result.out.splitlines()[-1] == f"wrote {tmp_path / 'out'}: 18 rows, 2 held out"
    assert "exact duplicates" in result.out
    shown = [line for line in result.out.splitlines() if line.startswith("  user 'Swali la ")]
    assert len(shown) == 3
    assert all("', assistant 'Jibu la " in line for line in shown)
    card = json.loads((tmp_path / "out" / "data_card.json").read_text())
    assert card["sources"]["rows"]["dropped"] == {"exact_duplicates": 1, "math": 1}
    assert (tmp_path / "out" / "mix.yaml").read_text() == mix.read_text()


def test_a_trial_reads_a_few_rows(layerswap, mix, tmp_path):
    result = layerswap("data", mix, "--out", tmp_path / "out", "--limit", 5)
    assert "wrote" in result.out
    assert json.loads((tmp_path / "out/data_card.json").read_text())["rows"]["train"] == 3


def test_too_few_rows_are_said_and_no_error(layerswap, mix, tmp_path):
    mix.write_text(mix.read_text() + "total: 100\n")
    result = layerswap.done("data", mix, "--out", tmp_path / "out")
    assert result.out.splitlines()[-1] == (
        "the sources hold 20 of the 100 examples in `total`; write total: all"
    )
    trial = layerswap("data", mix, "--out", tmp_path / "trial", "--limit", 5)
    assert "the sources hold" not in trial.out
    mix.write_text(mix.read_text().replace("total: 100", "total: all"))
    result = layerswap("data", mix, "--out", tmp_path / "all")
    assert result.out.splitlines()[-1] == f"wrote {tmp_path / 'all'}: 18 rows, 2 held out"


def test_another_language_than_the_source_names_is_said(layerswap, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"The committee will meet again in the town hall on day {i}.\n" for i in range(20)]
    (tmp_path / "text.txt").write_text("".join(lines))
    said = {"ug": "finds little ug", "nus": "does not know nus", "en": None}
    for code, words in said.items():
        result = layerswap("data", "text", "--set", f"language={code}", "--set", "path=text.txt",
                           "--out", f"out/{code}")  # fmt: skip
        assert result.code == 0, result.err
        wanted = f"text: py3langid {words}; it identifies 20 of these texts as en 100%; if they are"
        wanted += f" in English, give en instead of {code}"
        assert (wanted in result.out.splitlines()) == (words is not None)
        assert ("py3langid" in result.out) == (words is not None)


def test_the_ready_recipes_are_listed_and_shown(layerswap):
    listed = layerswap("data", "--list").out
    assert "swahili: Generic Swahili instructions" in listed
    assert "    orca-math: microsoft/orca-math-word-problems-200k, MIT" in listed
    assert "    inkuba: lelapa/Inkuba-instruct, licence not stated" in listed
    assert "news: a template; give --set language=... --set code=..." in listed
    assert layerswap("data", "orca-math", "--show").out.startswith("name: orca-math\n")


def test_parameters_are_set_on_the_command_line(layerswap, mix, tmp_path):
    text = mix.read_text().replace("name: small", "parameters: {name: null}\nname: ${name}-mix")
    mix.write_text(text)
    assert "name: a=b-mix\n" in layerswap("data", mix, "--set", "name=a=b", "--show").out
    layerswap("data", mix, "--set", "name=x", "--out", tmp_path / "out")
    assert "name: x-mix" in (tmp_path / "out" / "mix.yaml").read_text()
    assert layerswap("data", mix, "--set", "name", "--show").err == (
        "error: --set: 'name' is not NAME=VALUE\n"
    )
    assert layerswap("data", mix, "--show").err.endswith("give --set name=VALUE\n")


def test_a_language_of_ones_own_is_one_command(layerswap, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, word in (("ig", "Ahịrị"), ("en", "Line")):
        lines = [f"{word} {i} of a longer text, about {i * i}.\n" for i in range(40)]
        (tmp_path / f"news.{code}").write_text("".join(lines), "utf-8")
    names = ("language=ig", "name=Igbo", "path=news.ig", "english=news.en")
    settings = [part for name in names for part in ("--set", name)]
    result = layerswap.done("data", "parallel", *settings, "--out", "data/new/ig")
    assert result.out.splitlines()[-2:] == [
        f"wrote {tmp_path}/data/new/ig: 108 rows, 12 held out",
        "the sources hold 120 of the 1,400 examples in `total`; write total: all",
    ]
    result = layerswap("data", "text", *settings[:2], *settings[4:6], "--out", "data/text")
    assert result.out.splitlines()[-1] == f"wrote {tmp_path}/data/text: 36 rows, 4 held out"
    (tmp_path / "news.en").write_text("Only one line\n")
    result = layerswap.refused("data", "parallel", *settings, "--out", "data/other")
    assert result.err == (
        f"error: source 'text' (news.ig, news.en): {tmp_path}/news.ig, line 2: has no partner in "
        f"{tmp_path}/news.en (1 of 40 lines); parallel files are aligned by line\n"
    )
    assert not (tmp_path / "data/other").exists()


def test_what_a_person_can_get_wrong(layerswap, mix, tmp_path):
    assert layerswap("data").err == "error: give a mix, or --list for the ready recipes\n"
    assert layerswap("data", mix).err == "error: give --out, the folder to create\n"
    result = layerswap.refused("data", "swahilli", "--out", tmp_path / "out")
    assert result.err.endswith("no such ready recipe; did you mean 'swahili'?\n")
    result = layerswap("data", mix, "--out", tmp_path / "out", "--local", tmp_path / "no")
    assert result.err.endswith(f"error: --local {tmp_path}/no: no such folder\n")
    layerswap("data", mix, "--out", tmp_path / "out")
    result = layerswap("data", mix, "--out", tmp_path / "out")
    assert result.err == (
        f"error: {tmp_path}/out: exists already; choose another output or pass --overwrite\n"
    )
