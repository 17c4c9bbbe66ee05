"""Written headlines: who is asked, what is measured, and that its page is that of the answers."""

import json
import re
import shutil

import pytest
from lab_files import write_tsv

from layerswap.evaluation.statistics import paired_over_groups
from layerswap.lab.assets import shipped
from layerswap.training.expert.spec import check_expert
from research import answers

ARTICLE = answers.Article(
    "Bei ya mafuta imepanda leo.Serikali ya Kenya imesema hayo jana", "Mafuta yapanda bei"
)


@pytest.mark.parametrize(
    ("answer", "chrf", "rouge", "copied", "words"),
    [
        ("Mafuta yapanda bei", 1, 1, 0, 3),
        ("mafuta imepanda leo", None, 1 / 3, 1, 3),
        ("bei ya", None, 2 / 5, 0, 2),  # too short to be a copy
        ("imepanda Leo! Serikali ya", None, 0, 1, 4),
        ("", 0, 0, 0, 0),
    ],
)
def test_an_answer_is_measured(answer, chrf, rouge, copied, words):
    found = answers.measure(answer, ARTICLE, "sw", "sw")
    assert found.rouge == pytest.approx(rouge)
    assert (found.copied, found.words) == (copied, words)
    assert chrf is None or found.chrf == pytest.approx(chrf)
    assert (found.language, found.english) == (1, 0)


def test_letters_beyond_english_count_in_words():
    article = answers.Article("An kai hari a Borno.", "'Yan ƙungiya sun kai ɗauki")
    assert answers.measure("ƙungiya sun ɗauki", article, "ha", "en").rouge == pytest.approx(6 / 8)


def test_the_lead_ends_where_a_sentence_ends():
    assert answers.first_sentence(ARTICLE.text) == "Bei ya mafuta imepanda leo."
    assert answers.first_sentence("Dk. Ali wa Kenya amesema leo. Wengi") == (
        "Dk. Ali wa Kenya amesema leo."
    )
    assert answers.first_sentence("na bado") == "na bado"


def test_every_expert_is_a_training():
    for name in answers.ORDER:
        spec = check_expert(answers.spec(name, "/models/gemma"))
        stems = [data.train for data in spec.data_sets]
        assert stems == {"joint-sw-1": ["task.jsonl", "sw.jsonl"], "ha-1": ["ha.jsonl"]}.get(
            name, stems
        )
        assert (spec.train.part == "task") == name.startswith("middle")


def words(start, number):
    return " ".join(f"habari{(start + i) % 9} ya siku" for i in range(number))


@pytest.mark.slow
def test_models_are_asked_once_and_measured(tmp_path, monkeypatch):
    """Real models of the lab stand for the experts, the first two being trained so far."""
    published, out = tmp_path / "published", tmp_path / "out"
    monkeypatch.setattr(answers, "RECORDED", tmp_path / "recorded")
    for name, value in {
        "ROWS": 4,
        "HELD_OUT": 2,
        "TESTS": 3,
        "WRITTEN": 6,
        "CHUNK": 2,
        "SHOWN": 10,
    }.items():
        monkeypatch.setattr(answers, name, value)
    monkeypatch.setattr(answers, "DTYPE", "float32")
    for code in ("eng", "swa"):
        for split in ("dev", "test", "fewshot50"):
            news = [("sports", f"{code} kichwa cha {i}", words(i, 40)) for i in range(6)]
            file = published / "masakhanews" / f"{code}.{split}.tsv"
            write_tsv(file, ("category", "headline", "text"), news)
    (published / "lafand_mt").mkdir()
    for long in ("en", "swa", "hau", "yor"):
        lines = [f"{long}na {long}a {long}moja {i} {long}ccc nenoneno" for i in range(300)]
        for pair in {"en": ["swa"]}.get(long, [long]):
            (published / "lafand_mt" / f"en-{pair}.train.{long}").write_text("\n".join(lines))
    lab = shipped()
    for name, expert in (
        ("task-1", lab.task_experts[0]),
        ("sw-1", lab.language_experts["furo"][0]),
    ):
        shutil.copytree(expert, out / name)
        (out / name / "layerswap-training.json").write_text(json.dumps({"finished": True}))
    answers.ask(published, out, lab.base, "sw")
    before = (out / "answers-sw.jsonl").read_text("utf-8")
    answers.ask(published, out, lab.base, "sw")
    assert (out / "answers-sw.jsonl").read_text("utf-8") == before
    rows = [json.loads(line) for line in before.splitlines()]
    trained = {answers.BASE, answers.BASE_SHOTS, answers.LANGUAGE, answers.LANGUAGE_SHOTS,
               answers.TASK, answers.SWAP, answers.SOUP, answers.TIES}  # fmt: skip
    assert sorted((row["model"], row["document"]) for row in rows) == sorted(
        (model, document) for model in trained for document in range(3)
    )
    # As transformers writes with the expert alone.
    from transformers import AutoModelForCausalLM

    own = answers.tokenizer(lab.base)
    article = answers.articles(published, "sw", lab.base)[1][1]
    for name, folder in ((answers.TASK, "task-1"), (answers.LANGUAGE, "sw-1"), (answers.BASE, "")):
        model = AutoModelForCausalLM.from_pretrained(out / folder if folder else lab.base)
        ids = own(article.prompt, return_tensors="pt")["input_ids"]
        text = own.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :],
                          skip_special_tokens=True)  # fmt: skip
        (found,) = [r["answer"] for r in rows if (r["model"], r["document"]) == (name, 1)]
        assert found == text.partition("\n")[0].strip()
    answers.record(published, out, lab.base)
    monkeypatch.setattr(answers, "LANGUAGES", {"sw": "Swahili"})
    answers.recorded.cache_clear()
    (true, *others) = answers.rows_of(["sw"])
    assert true[:4] == [answers.TRUE, "", "", ""]
    assert {row[0] for row in others} == trained | {answers.LEAD}
    answers.recorded.cache_clear()


@pytest.mark.slow
def test_words_are_those_of_the_recorded_measures():
    answers.recorded.cache_clear()
    page = " ".join(answers.FIGURE.parents[1].joinpath("answers.md").read_text("utf-8").split())
    codes = answers.asked_languages()
    task, swap = answers.TASK, answers.SWAP
    said = (
        (task, swap, "english", codes, "7.9 points less often in English than the expert [3.3, "
                                       "12.5]"),
        (answers.SECOND, answers.SECOND_SWAP, "english", codes, "another 4.2 points [0.8, 7.5]"),
        (answers.MIDDLE, answers.MIDDLE_SWAP, "english", codes, "2.9 points [-1.2, +6.7] is not"),
        (answers.SECOND, swap, "chrf", codes, "1.8 chrF++ above that swap [0.6, 3.0]"),
        (task, swap, "english", ["ha"], "7.5 points less [-1.2, +17.5]"),
        (task, swap, "english", ["yo"], "16.2 less [+6.2, +26.2]"),
        (swap, task, "chrf", ["en"], "level with the task expert, +2.5 chrF++ [-0.3, +5.9],"),
        (swap, answers.JOINT, "chrf", codes, "3.3 chrF++ below the swap [2.0, 4.7]"),
        (swap, answers.JOINT, "copied", codes, "copies 25 points less"),
        (task, answers.MIDDLE, "english", codes, "5.4 points less often in English than the whole "
                                                 "one [1.7, 8.8]"),
        (answers.LEAD, swap, "rouge", codes, "1.8 points above the swap [0.4, 3.2]"),
    )  # fmt: skip
    for first, second, measure, of, sentence in said:
        apart = paired_over_groups(*(answers.values(of, one, measure) for one in (first, second)))
        in_page = re.findall(r"-?\d+\.?\d*", sentence)
        every = [f"{100 * value:.1f}" for value in (apart.mean, apart.low, apart.high)]
        assert in_page == (every if len(in_page) > 1 else [f"{100 * apart.mean:.0f}"])
        assert sentence in page
