"""The model of a page without a server: adapters, tasks of lm-eval, prompts from files."""

from __future__ import annotations

import pytest
from merging import save_adapter
from play_pages import DEFAULT, open_lab_pair

import layerswap as ls
from layerswap.errors import EvaluationError, RecipeError
from layerswap.lab.assets import shipped
from layerswap.play.open import read_prompts
from layerswap.play.pair import Pair
from layerswap.play.player import OfComposition, Player, Question
from layerswap.search.documents import Answered

PROMPT = "Tom pomi fesi 6. Tom seru fesi 3. deka fesi Tom?"


def opened(plan, documents=None):
    player = Player(plan, documents=documents, device="cpu")
    player.load()
    return player


def asked(player, *compositions, prompt=PROMPT, **settings):
    """The answers of some compositions, by composition."""
    question = Question(page="", prompt=prompt, compositions=[*compositions], **settings)
    *_, answered, _ = player.ask(question)
    return answered["answers"]


def test_adapters_answer_and_are_written_as_an_adapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("peft")
    base = shipped().base
    task, language = (save_adapter(tmp_path / n, base, i) for i, n in enumerate("ab", 1))
    player = opened(ls.swap(task=task, language=language, base=base))
    answers = asked(player, "task", "soup", "swap.2.2.0.0.task", length=4)
    assert {len(one["tokens"]) for one in answers.values()} <= {1, 2, 3, 4}
    *_, merged, _ = player.merge(OfComposition(page="", composition="swap.2.2.0.0.task", out="out"))
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    assert merged["bytes"] > 0


def test_the_change_beside_each_layer_is_that_of_the_map():
    player = Player(open_lab_pair()[0], device="cpu")
    player.measure()
    shares = player.change
    assert {name: len(own) for name, own in shares.items()} == {"task": 8, "language": 8}
    for own in shares.values():
        assert sum(own) / 8 == pytest.approx(0.15, abs=0.02)


@pytest.mark.slow
def test_tasks_of_lm_eval_fill_the_map_and_offer_their_prompts(tmp_path):
    pytest.importorskip("lm_eval")
    from layerswap.lab.exports import export_tasks
    from layerswap.search.documents import Tasks

    export_tasks(tmp_path / "tasks", n=12)
    plan, _ = open_lab_pair()
    player = opened(plan, Tasks(["lab_problem_furo"], [tmp_path / "tasks"]))
    rows = read_prompts(tmp_path / "tasks" / "lab_problem_furo.jsonl")
    assert len(player.documents.prompts) == 6
    assert all(one in rows for one in player.documents.prompts)
    cells = next(player.map(OfComposition(page="", composition="swap.2.0.0.0.blend")))["cells"]
    assert [(cell["key"], cell["n"]) for cell in cells] == [(DEFAULT, 6)]
    assert player.documents.measure == "exact_match of lab_problem_furo"


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == [("one", None), ("two", None)]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"text": "c"}\n')
    found = read_prompts(tmp_path / "p.jsonl")
    assert found == [("a", "b"), ("c", None)]
    with pytest.raises(RecipeError, match=r"p.jsonl: every document needs a `prompt`"):
        Answered.split("p.jsonl", found)
    with pytest.raises(EvaluationError, match="needs two documents"):
        Answered.split("p.jsonl", found[:1])
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(RecipeError, match="line 2: needs a `text`, or a `prompt`"):
        read_prompts(tmp_path / "p.jsonl")


def test_gguf_files_alone_are_refused_in_one_line(tmp_path):
    pytest.importorskip("gguf")
    from gguf_files import write_gguf

    task, language = (write_gguf(tmp_path / f"{i}.gguf", seed=i) for i in (1, 2))
    with pytest.raises(RecipeError, match="give --base as safetensors"):
        Pair(ls.swap(task=task, language=language))
