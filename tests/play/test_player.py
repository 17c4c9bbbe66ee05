"""The model of a page without a server: adapters, tasks of lm-eval, prompts from files."""

from __future__ import annotations

import pytest
import yaml
from merging import copied, save_adapter
from play_pages import DEFAULT, open_lab_pair
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import layerswap as ls
from layerswap.experiment.documents import Answered, Tasks
from layerswap.ground.errors import EvaluationError, RecipeError, StudyError
from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import lab_plan
from layerswap.merge import make_plan
from layerswap.play.open import open_study, open_suite, read_prompts
from layerswap.play.pair import Pair
from layerswap.play.player import OfComposition, Player, Question
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.journal import StudyJournal
from layerswap.study.spec import Benchmarks
from layerswap.study.steps import Graph

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
def test_tasks_of_lm_eval_fill_the_map_and_offer_their_prompts(tasks):
    plan, _ = open_lab_pair()
    player = opened(plan, Tasks(["lab_problem_furo"], [tasks]))
    rows = read_prompts(tasks / "lab_problem_furo.jsonl")
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
    with pytest.raises(RecipeError, match="row 2: needs a `text`, or a `prompt`"):
        read_prompts(tmp_path / "p.jsonl")


def test_gguf_files_alone_are_refused_in_one_line(tmp_path):
    pytest.importorskip("gguf")
    from gguf_files import write_gguf

    task, language = (write_gguf(tmp_path / f"{i}.gguf", seed=i) for i in (1, 2))
    with pytest.raises(RecipeError, match="give --base as safetensors"):
        Pair(ls.swap(task=task, language=language))


def test_gguf_beside_a_base_of_safetensors_answers_as_its_weights_do(tmp_path):
    pytest.importorskip("gguf")
    from gguf_conversion import convert, save_model
    from gguf_files import TOKENS

    level = WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(level), unk_token="<unk>")
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    base, task, language = (save_model(tmp_path / n, "llama", i) for i, n in enumerate("btl"))
    for folder in (base, task, language):
        words.save_pretrained(folder)
    file = convert(task, tmp_path / "task.gguf", "llama")
    keys = ("task", "language", "swap.1.1.0.0.blend")
    answers = [
        asked(opened(ls.swap(task=one, language=language, base=base)), *keys,
              prompt="a b c", length=4)
        for one in (file, task)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert len({str(one["tokens"]) for one in answers[0].values()}) == 3


def test_the_chat_template_of_the_tokenizer_is_applied(tmp_path):
    task = copied(shipped().task_experts[0], tmp_path / "task")
    template = (
        "{{ bos_token }}{% for one in messages %}Eva pomi foku 5. {{ one.content }}{% endfor %}"
    )
    (task / "chat_template.jinja").write_text(template)
    player = opened(ls.swap(task=task, language=shipped().language_experts["furo"][0]))
    assert player.facts()["chats"]
    said = asked(player, "soup", length=6, chat=True)
    assert said == asked(player, "soup", prompt=f"Eva pomi foku 5. {PROMPT}", length=6)


@pytest.fixture
def tasks(tmp_path):
    """The problems of the lab as tasks of lm-eval."""
    pytest.importorskip("lm_eval")
    from layerswap.lab.questions import write_tasks

    write_tasks(tmp_path / "tasks", 12)
    return tmp_path / "tasks"


@pytest.mark.slow
def test_a_study_opens_on_its_composition_and_its_tasks(tmp_path, tasks):
    root = tmp_path / "study"
    asked = Benchmarks(tasks=["lab_problem_{language}"], include=[str(tasks)], num_fewshot=0)
    step = EvaluateStep(language="furo", base=str(shipped().base), kinds=[], evaluate=asked)
    StudyJournal(root, Graph([step.plan("evaluate/furo")])).open()
    with pytest.raises(StudyError, match="has no 'elvish'; its languages are furo"):
        open_study(root, "elvish")
    recipe = lab_plan(shipped(), "furo").recipe.model_dump(mode="json", exclude_defaults=True)
    (root / "best").mkdir()
    best = yaml.safe_dump({**recipe, "swap": {"bottom": 3, "top": 0}})
    (root / "best" / "furo.yaml").write_text(best)
    recipe, documents = open_study(root, None)
    player = opened(make_plan(recipe), documents)
    assert player.pair.start == "swap.3.0.0.0.blend"
    assert len(player.documents.prompts) == 6
    assert next(player.test(OfComposition(page="", composition=player.pair.start)))["n"] == 6


BENCHMARK = """
title: Moods
source: https://example.org/moods
licence: CC0
languages: [swa]
metric: [acc, none]
size: {documents: 12, read: 12}
task_name: moods_${code}
splits: [test]
labels: [fesi, foku]
data:
  files: ["{code}.{split}.tsv"]
  columns: {text: text, label: mood}
task:
  dataset_path: json
  dataset_kwargs: {data_files: "{files}"}
  output_type: multiple_choice
  test_split: test
  num_fewshot: "{shots}"
  doc_to_text: "{{text}}"
  doc_to_target: "{{label}}"
  doc_to_choice: "{labels}"
  metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_a_benchmark_of_a_suite_fills_the_map(tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "moods.yaml").write_text(BENCHMARK)
    rows = [f"Tom pomi {i} deka\t{('fesi', 'foku')[i % 2]}" for i in range(12)]
    (tmp_path / "swa.test.tsv").write_text("\n".join(["text\tmood", *rows]) + "\n")
    player = opened(open_lab_pair()[0], open_suite(str(tmp_path / "moods.yaml"), "sw"))
    (cell,) = next(player.map(OfComposition(page="", composition=DEFAULT)))["cells"]
    assert (cell["key"], cell["n"], player.documents.measure) == (DEFAULT, 6, "acc of moods_swa")
    assert len(player.documents.prompts) == 6
