"""Questions to speakers: drawn without training text, answered by hand in a browser, checked."""

import csv
import json
import random

import pytest
from accessibility import AXE, found_by_axe
from lab_files import write_jsonl
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.ground.errors import DataError, LayerswapError
from layerswap.new.tables import read_table, recognise
from layerswap.play.questions import page_of, prefer_items, read_questions

EVIL = '</script><img src=x onerror="document.title=1"><b>ሰላም</b>'


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    words = ["ba", "ak", "nit", "ñu", "xam", "naa", "dem", "bu", "ci", "ndax", "waaw", "yow",
             "moom", "jël", "ëpp"]  # fmt: skip
    lines = [" ".join(rng.choices(words, k=9)) + f" {i}" for i in range(60)]
    (tmp_path / "texts.txt").write_text("\n".join([*lines, EVIL]), "utf-8")
    (tmp_path / "train.txt").write_text("\n".join(lines[:20]), "utf-8")
    with (tmp_path / "answers.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(("prompt", "swap", "task"))
        writer.writerows((f"prompt {i}", f"swap {i}", f"task {i}") for i in range(6))
    return tmp_path


def ask(*arguments):
    return CliRunner().invoke(app, ["ask", *map(str, arguments)])


def done(*arguments):
    """The output of `layerswap ask`."""
    result = ask(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def prefer():
    return done("prefer", "answers.tsv", "--models", "swap,task", "--out", "study")


def rows_in(path):
    return list(csv.reader(path.open(encoding="utf-8", newline=""), delimiter="\t"))


def label(count=41, labels="sports,health"):
    return ask("label", "texts.txt", "--labels", labels, "--avoid", "train.txt",
               "--count", count, "--out", "study")  # fmt: skip


def answered(folder, speaker, choose, **changes):
    asked = read_questions(folder)
    return [{"study": asked["study"], "page": 1, "speaker": speaker, "item": item["id"],
             "answer": choose(i, item), "time": f"2026-01-01T00:{i:02}", **changes}
            for i, item in enumerate(asked["items"])]  # fmt: skip


def test_no_text_is_of_the_training_text(texts):
    assert "wrote study, 41 questions: mail study/ask.html" in label().output
    asked = read_questions(texts / "study")
    training = set((texts / "train.txt").read_text("utf-8").splitlines())
    assert len(asked["items"]) == 41
    assert not training & {item["text"] for item in asked["items"]}


@pytest.mark.parametrize(
    ("count", "labels", "said"),
    [(42, "a,b", "texts.txt: has 41 different lines without five words in a row of the "
      "training text; 42 are to be asked: give more text, or --count 41"),
     (5, "a", "--labels: give 2 to 9 different labels, not a"),
     (5, "a,a", "--labels: give 2 to 9 different labels")],
)  # fmt: skip
def test_mistakes_are_one_line_and_nothing_is_written(texts, count, labels, said):
    with pytest.raises(DataError, match=said):
        raise label(count, labels).exception
    assert not (texts / "study").exists()


def test_two_speakers_agree_and_their_majority_is_a_test_that_new_reads(texts):
    label()
    names = ("sports", "health")
    write_jsonl(texts / "a.jsonl", answered(texts / "study", "ada", lambda i, _: names[i % 2]))
    other = answered(texts / "study", "obi", lambda i, _: names[(i % 2) ^ (i == 0)])
    write_jsonl(texts / "b.jsonl", [*other, other[-1]])
    said = done("read", "study", "a.jsonl", "b.jsonl", "--out", "test.tsv")
    assert "ada and obi: kappa 0.95" in said
    assert "1 of them given twice" in said
    rows = list(csv.DictReader((texts / "test.tsv").open(encoding="utf-8"), delimiter="\t"))
    assert len(rows) == 40
    assert {row["label"] for row in rows} == {*names}
    assert recognise(read_table("test.tsv"), {}).kind == "labels"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [({"study": "other"}, "answers the study other, not"),
     ({"item": "none"}, "has no question 'none'"),
     ({"answer": "<b>"}, "'<b>' is no answer to its question"),
     ({"extra": 1}, "extra")],
)  # fmt: skip
def test_a_file_that_came_back_is_checked(texts, changes, said):
    label()
    lines = answered(texts / "study", "ada", lambda i, _: "sports")
    lines[3] |= changes
    write_jsonl(texts / "a.jsonl", lines)
    with pytest.raises(LayerswapError, match=f"a.jsonl, answer 4.*{said}"):
        raise ask("read", "study", "a.jsonl").exception


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda text: text[:-40], "line 41: is not JSON"),  # cut by a mail program
     (lambda text: text.replace('"', "\u201d"), "line 1: is not JSON"),
     (lambda text: "<!doctype html>", "is a web page"),
     (lambda text: "", "is empty")],
)  # fmt: skip
def test_a_damaged_file_names_its_line_and_the_remedy(texts, change, said):
    label()
    write_jsonl(texts / "a.html", answered(texts / "study", "ada", lambda i, _: "sports"))
    (texts / "a.html").write_text(change((texts / "a.html").read_text("utf-8")), "utf-8")
    with pytest.raises(DataError, match=f"a.html.*{said}.*; the file was cut or changed on its"):
        raise ask("read", "study", "a.html").exception


def test_a_speaker_on_two_devices_is_one_speaker(texts):
    label()
    for name in ("Ada", " ada "):
        write_jsonl(texts / f"{name}.jsonl", answered(texts / "study", name, lambda i, _: "sports"))
    facts = json.loads(ask("read", "study", "Ada.jsonl", " ada .jsonl", "--json").stdout)
    assert (facts["answers"], facts["twice"], facts["agreement"]) == (41, 41, [])


FORMULAS = ("=1+1", "+1+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1")


@pytest.mark.parametrize("answer", [*FORMULAS, "-5", "+.5e3"])
def test_no_spreadsheet_runs_what_a_speaker_sent_and_no_text_is_changed(texts, answer):
    (texts / "questions.tsv").write_text("question\nHow cold?\n")
    ask("answer", "questions.tsv", "--out", "study")
    write_jsonl(texts / "a.jsonl", answered(texts / "study", "ada", lambda *_: answer))
    done = ask("read", "study", "a.jsonl", "--out", "test.tsv")
    if answer in FORMULAS:
        assert isinstance(done.exception, DataError)
        assert "test.tsv: a spreadsheet would run cells (1), such as " in str(done.exception)
        assert str(done.exception).endswith("; write test.jsonl")
        assert not (texts / "test.tsv").exists()
    for name in ("test.jsonl", "test.tsv")[: 1 + (answer not in FORMULAS)]:
        ask("read", "study", "a.jsonl", "--out", name)
        assert read_table(name).rows == [{"question": "How cold?", "answer": answer}]


def test_a_file_has_one_speaker_and_no_time_to_come(texts):
    label()
    own = answered(texts / "study", "ada", lambda *_: "sports")
    write_jsonl(texts / "a.jsonl", own)
    other = [line | {"answer": "health", "time": "2026-01-02T00:00Z"} for line in own[:3]]
    for changes, said in (
        ([{"speaker": f"s{i}"} for i in range(3)], "b.jsonl: a file has one speaker, and this one "
         "has 3, s0 and s1; split it"),
        ([{"time": "9999-01-01T00:00:00Z"}] * 3, "b.jsonl, answer 1: time: is in the future"),
        ([{"time": "zzzz"}] * 3, "b.jsonl, answer 1: time: "),
        ([{"time": "9999-12-31T23:59:59-14:00"}] * 3, "b.jsonl, answer 1: time: is in no calendar"),
        ([{"speaker": "  "}] * 3, "b.jsonl, answer 1: speaker: needs 1 to 60 characters"),
    ):  # fmt: skip
        write_jsonl(texts / "b.jsonl", [line | c for line, c in zip(other, changes, strict=True)])
        with pytest.raises(LayerswapError) as caught:
            raise ask("read", "study", "a.jsonl", "b.jsonl").exception
        assert str(caught.value).startswith(said)
    with pytest.raises(
        DataError, match=r"none\.jsonl: cannot be read \(No such file or directory\)$"
    ):
        raise ask("read", "study", "none.jsonl").exception
    for out, said in (
        ("x.json", "a test is one of .tsv, .csv, .jsonl"),
        ("no/x.tsv", "wrote no/x.tsv"),
    ):
        done = ask("read", "study", "a.jsonl", "--out", out)
        assert said in f"{done.output}{done.exception}"
    write_jsonl(texts / "b.jsonl", other)
    done = ask("read", "study", "a.jsonl", "b.jsonl")
    assert "41 answers, 0 of them given twice (speakers: 1, files: 2)\n" in done.output
    assert "ada: a.jsonl, b.jsonl differ on 3 questions; the latest answers count" in done.output
    facts = json.loads(ask("read", "study", "a.jsonl", "b.jsonl", "--json").stdout)
    assert facts["files"] == {"ada": ["a.jsonl", "b.jsonl"]}
    assert facts["differ"] == {"ada": 3}


@pytest.mark.slow
def test_votes_name_the_models_whatever_the_sides(texts):
    prefer()
    page = (texts / "study" / "ask.html").read_text("utf-8")
    assert '"models"' not in page
    lines = answered(texts / "study", "ada",
                     lambda i, item: int(item["answers"][1].startswith("swap")))  # fmt: skip
    write_jsonl(texts / "a.jsonl", lines)
    facts = json.loads(ask("read", "study", "a.jsonl", "--json").stdout)
    (pair,) = facts["pairs"]
    assert (pair["first"], pair["wins"], pair["losses"]) == ("swap", 6, 0)
    assert facts["pairs"][0]["share"] == {"mean": 1.0, "low": pytest.approx(0.5407, abs=1e-4),
                                          "high": 1.0, "n": 6}  # fmt: skip
    said = done("read", "study", "a.jsonl", "--out", "preferences.json")
    assert "wrote preferences.json" in said
    judged = json.loads((texts / "preferences.json").read_text())
    assert (judged["title"], judged["votes"], judged["pairs"][0]["wins"]) == ("answers", 6, 6)
    with pytest.raises(DataError, match=r"preferences\.json: exists already"):
        raise ask("read", "study", "a.jsonl", "--out", "preferences.json").exception
    write_jsonl(texts / "skips.jsonl", [line | {"answer": "", "skipped": True} for line in lines])
    with pytest.raises(DataError, match="answers: no vote; every question was skipped"):
        raise ask("read", "study", "skips.jsonl").exception
    firsts = [prefer_items("answers.tsv", ["swap", "task"], 6, seed)[1] for seed in range(20)]
    share = sum(one[0] == "swap" for key in firsts for one in key.values()) / 120
    assert 0.35 < share < 0.65


def test_markup_ends_no_block_of_the_page(texts):
    label()
    page = (texts / "study" / "ask.html").read_text("utf-8")
    assert page.count("</script>") == 2
    assert 'onerror=\\"' in page
    assert "default-src 'none'" in page
    assert "onerror" not in page_of({"title": "x"})


def begin(browser, url, said):
    """Open a page on a phone, and give a name by the keyboard."""
    from playwright.sync_api import expect

    context = browser.new_context(viewport={"width": 390, "height": 800}, accept_downloads=True)
    context.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    expect(page.locator("#speaker")).to_be_focused()
    page.keyboard.type("Ada")
    page.keyboard.press("Enter")
    return page


def wait_until_kept(page):
    """Wait until a second page of the phone reads the answers: Chromium hands them over late."""
    names = [""]
    while not names[-1] and len(names) < 100:
        second = page.context.new_page()
        second.goto(page.url)
        names.append(second.locator("#speaker").input_value())
        second.close()
    assert names[-1] == "Ada"


def saved(page, folder):
    """Save the answers by the keyboard: the focus is on the button."""
    page.locator("#done").wait_for()
    with page.expect_download() as loaded:
        page.keyboard.press("Enter")
    loaded.value.save_as(folder / "back.jsonl")
    return folder / "back.jsonl"


def save(page, folder, said):
    """Save the answers, and close the page, which had nothing to say."""
    saved(page, folder)
    page.context.close()
    assert said == []


@pytest.mark.slow
def test_a_speaker_answers_on_a_phone_by_keyboard_alone(texts, browser):
    from playwright.sync_api import expect

    label(5)
    study, said = texts / "study", []
    asked = read_questions(study)
    asked["items"][0]["text"] = EVIL
    (study / "ask.json").write_text(json.dumps(asked), "utf-8")
    (study / "ask.html").write_text(page_of(asked), "utf-8")
    page = begin(browser, (study / "ask.html").as_uri(), said)

    def press(key, count):
        page.keyboard.press(key)
        expect(page.locator("#progress")).to_have_text(f"{count} of 5")

    expect(page.locator("#ask")).to_be_visible()
    assert page.locator("#text").inner_text() == EVIL  # markup is text
    assert page.locator("#text *").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    press("2", 1)
    press("u", 0)
    press("1", 1)
    press("s", 2)
    wait_until_kept(page)
    page.reload()  # nothing is lost
    expect(page.locator("#speaker")).to_have_value("Ada")
    page.keyboard.press("Enter")
    expect(page.locator("#progress")).to_have_text("2 of 5")
    press("2", 3)
    press("1", 4)
    press("1", 5)
    save(page, texts, said)
    done("read", "study", "back.jsonl", "--out", "test.tsv")
    rows = rows_in(texts / "test.tsv")
    assert rows[0] == ["text", "label"]
    assert rows[1] == [EVIL, "sports"]
    assert [label for _, label in rows[2:]] == ["health", "sports", "sports"]


@pytest.mark.slow
def test_two_speakers_of_one_phone_save_a_file_each(texts, browser):
    label(2)
    page = begin(browser, (texts / "study" / "ask.html").as_uri(), [])
    for speaker in ("Ada", "Obi"):
        if speaker == "Obi":
            page.reload()
            page.locator("#speaker").fill(speaker)
            page.keyboard.press("Enter")
        for key in "12":
            page.keyboard.press(key)
        lines = [json.loads(line) for line in saved(page, texts).read_text().splitlines()]
        assert [line["speaker"] for line in lines] == [speaker] * 2
    page.context.close()


@pytest.mark.slow
def test_answers_are_written_and_corrected_by_keyboard_alone(texts, browser):
    from playwright.sync_api import expect

    rows = [("How many?", "Fiire"), (EVIL, ""), ("Where?", "Ndakaaru")]
    with (texts / "questions.tsv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("question", "answer"), *rows])
    done("answer", "questions.tsv", "--out", "study")
    order = [item["text"] for item in read_questions(texts / "study")["items"]]
    said, wanted = [], {"How many?": "Fiire la.", EVIL: "ሁለት\nsaar", "Where?": "Ndakaaru"}
    page = begin(browser, (texts / "study" / "ask.html").as_uri(), said)
    written = page.locator("#written")
    for count, text in enumerate(order):
        expect(page.locator("#progress")).to_have_text(f"{count} of 3")
        expect(written).to_be_focused()
        expect(written).to_have_value(dict(rows)[text])
        assert page.locator("#text").inner_text() == text
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        if not dict(rows)[text]:
            page.keyboard.press("Control+Enter")  # nothing is written yet
            expect(page.locator("#fault")).to_have_text("Write an answer, or skip.")
        if wanted[text] != dict(rows)[text]:
            page.keyboard.press("Control+a")
            page.keyboard.insert_text(wanted[text])
        page.keyboard.press("Control+Enter")
    save(page, texts, said)
    done("read", "study", "back.jsonl", "--out", "test.tsv")
    assert rows_in(texts / "test.tsv") == [
        ["question", "answer"],
        *([text, wanted[text]] for text in order),
    ]


@pytest.mark.slow
def test_votes_by_keyboard_are_for_the_answer_that_was_seen(texts, browser):
    from playwright.sync_api import expect

    prefer()
    said = []
    page = begin(browser, (texts / "study" / "ask.html").as_uri(), said)
    firsts = 0
    for count in range(6):
        expect(page.locator("#progress")).to_have_text(f"{count} of 6")
        shown = page.locator("#answers .card").all_inner_texts()
        assert sorted(one.split()[0] for one in shown) == ["swap", "task"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        firsts += shown[0].startswith("swap")
        page.keyboard.press("12"[shown.index(next(one for one in shown if "swap" in one))]
                            if count < 4 else "34"[count - 4])  # fmt: skip
    save(page, texts, said)
    assert 0 < firsts < 6  # sides are random
    facts = json.loads(ask("read", "study", "back.jsonl", "--json").stdout)
    (pair,) = facts["pairs"]
    assert (pair["wins"], pair["losses"], pair["ties"], pair["both_bad"]) == (4, 0, 2, 1)


@pytest.mark.slow
@pytest.mark.skipif(AXE is None, reason="LAYERSWAP_AXE names no axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_mailed_page(texts, browser, scheme):
    prefer()
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    page.goto((texts / "study" / "ask.html").as_uri())
    for shown in ("#begin", "#ask"):
        assert page.locator(shown).is_visible()
        assert found_by_axe(page) == []
        if shown == "#begin":
            page.locator("#speaker").fill("Ada")
            page.locator("#speaker").press("Enter")
    context.close()
