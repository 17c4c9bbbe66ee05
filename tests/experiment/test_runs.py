"""Models of several runs are compared on equal documents, whatever their order in a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

import layerswap as ls
from layerswap.experiment.answers import Answer, write_answers
from layerswap.experiment.conditions import CHANCE, TRANSLATE_TEST
from layerswap.ground.errors import EvaluationError

LABELS = ("yes", "no", "maybe")


def answers(model, scores, **fields):
    """Answers to as many documents as scores; document 1 repeats the text of 0."""
    return [
        Answer(model, "t", i, "acc", "none", score, main=True, benchmark="t", weights=model,
               target=LABELS[i % 3], question=f"question {max(i, 1)}",
               **{"document_hash": f"hash {max(i, 1)}", "prompts": "num_fewshot=0"} | fields)
        for i, score in enumerate(scores)
    ]  # fmt: skip


def compared(folder, *runs):
    for number, rows in enumerate(runs):
        (folder / str(number)).mkdir(exist_ok=True)
        write_answers(folder / str(number) / "answers.parquet", rows)
    found = ls.compare([folder / str(number) for number in range(len(runs))])
    (by,) = found.results
    return found, [by.against(by.selected).get(model) for model in found.models]


def reordered(rows):
    return [replace(row, document=len(rows) - 1 - row.document) for row in rows]


FIRST = answers("a", [1, 0, 0, 1, 0, 1])
SECOND = answers("b", [1, 1, 0, 1, 1, 1])


def test_documents_pair_by_what_they_ask(tmp_path):
    found, differences = compared(tmp_path, FIRST, SECOND)
    again, equal = compared(tmp_path, FIRST, reordered(SECOND))
    assert ([*again.records()], equal) == ([*found.records()], differences)
    assert not found.notes
    kept = reordered(SECOND)[:4]
    found, _ = compared(tmp_path, FIRST, kept)
    assert [interval.mean for interval in found.results[0].intervals.values()] == [0.5, 0.75]
    assert "compared on the 4 documents that all models have; a 6, b 4" in found.notes[0]
    free = [replace(row, model="chance", condition=CHANCE) for row in FIRST]
    found, _ = compared(tmp_path, [*FIRST, *free], kept)
    assert found.notes[0].endswith("that all models have; a 6, b 4")


@pytest.mark.parametrize(
    ("fields", "why"),
    [({}, "share no document; their labels or choices differ"),
     ({"text": "Say:"}, "share no document; their prompts differ: '' and 'Say:'"),
     ({"text": "Say:", "target": "other"}, "share no document; their test files differ"),
     ({"benchmark": "u"}, "have no task in common .a: t; b: u.; evaluate them on the same task")],
)  # fmt: skip
def test_runs_without_a_common_document_name_what_differs(tmp_path, fields, why):
    other = [replace(row, document_hash=f"other {row.document}", **fields) for row in SECOND]
    with pytest.raises(EvaluationError, match=f"the models {why}"):
        compared(tmp_path, FIRST, other)


def test_documents_with_other_right_answers_are_refused(tmp_path):
    changed = [replace(row, target="no") if row.document < 2 else row
               for row in answers("b", [1] * 6)]  # fmt: skip
    with pytest.raises(EvaluationError, match=r"^t: the right answers to \d of 6 documents differ"):
        compared(tmp_path, FIRST, changed)
    several = [
        [replace(row, target=str(names)) for row in answers(model, [1] * 6)]
        for model, *names in (("a", "yes", "aye"), ("b", "aye", "yes"), ("c", "aye", "no"))
    ]
    assert compared(tmp_path, *several[:2])[0].notes == []
    with pytest.raises(EvaluationError, match="the right answers to 6 of 6 documents differ"):
        compared(tmp_path, *several[1:])


@pytest.mark.parametrize(
    ("fields", "note"),
    [({"prompts": "num_fewshot=0, apply_chat_template='5a2b'"},
      "t: the models were asked differently: a by num_fewshot=0, filter='none'; "
      "b by num_fewshot=0, apply_chat_template='5a2b', filter='none'"),
     ({"filter": "strict"}, "b by num_fewshot=0, filter='strict'")],
)  # fmt: skip
def test_answers_to_other_prompts_have_a_note(tmp_path, fields, note):
    found, differences = compared(tmp_path, FIRST, [replace(row, **fields) for row in SECOND])
    assert [note in one for one in found.notes] == [True] * bool(note)
    assert differences[1].mean == pytest.approx(1 / 3)
    long, short = ([replace(row, prompts="p", generation=most) for row in rows]
                   for rows, most in ((FIRST, "32"), (SECOND, "8")))  # fmt: skip
    assert compared(tmp_path, long, short)[0].notes[0].endswith("b by p, filter='none', 8")
    assert not compared(tmp_path, long, [replace(row, generation="") for row in short])[0].notes


def test_runs_in_folders_of_one_name_are_told_apart_and_development_documents_left_out(tmp_path):
    chose = [replace(row, task="t_dev", document_hash=f"dev {row.document}") for row in FIRST]
    other = [replace(row, weights="other") for row in answers("a", [1] * 6)]
    for name, rows in (("p", FIRST + chose), ("q", other)):
        (tmp_path / name / "results").mkdir(parents=True)
        write_answers(tmp_path / name / "results" / "answers.parquet", rows)
    found = ls.compare([tmp_path / "p" / "results", tmp_path / "q" / "results"])
    assert found.models == ["p/results/a", "q/results/a"]
    (by,) = found.results
    assert [interval.mean for interval in by.intervals.values()] == [0.5, 1]
    assert [*by.counts.values()] == [6, 6]


def test_a_translation_is_the_document_at_its_position(tmp_path):
    made = [replace(row, condition=TRANSLATE_TEST, document_hash=f"english {row.document}",
                    target=row.target.upper()) for row in SECOND]  # fmt: skip
    found, differences = compared(tmp_path, [*FIRST, *made])
    assert (found.notes, differences[1].mean) == ([], pytest.approx(1 / 3))


def test_one_model_asked_in_two_ways_is_two_models(tmp_path):
    chat = [replace(row, prompts="apply_chat_template='5a2b', num_fewshot=0") for row in FIRST]
    assert compared(tmp_path, FIRST, chat)[0].models == ["0/a", "1/a"]
    assert compared(tmp_path, FIRST, FIRST, SECOND)[0].models == ["a", "b"]
