"""The model of a page without a server: adapters, tasks of lm-eval, prompts from files."""

import pytest
import yaml
from merging import copied, save_adapter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import layerswap as ls
from layerswap.ground.errors import RecipeError, StudyError
from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import lab_plan
from layerswap.play.pair import Pair
from layerswap.play.player import Player, Question, read_prompts
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.journal import StudyJournal
from layerswap.study.report import selected_recipe
from layerswap.study.spec import Benchmarks
from layerswap.study.steps import Graph

PROMPT = "Tom pomi fesi 6. Tom seru fesi 3. deka fesi Tom?"


def opened(plan):
    player = Player(plan, device="cpu")
    player.load()
    return player


def asked(player, *compositions, prompt=PROMPT, **settings):
    """The answers of some compositions, by composition."""
    question = Question(prompt=prompt, compositions=[*compositions], **settings)
    *_, answered = player.ask(question)
    return answered["answers"]


def test_adapters_answer(tmp_path):
    pytest.importorskip("peft")
    base = shipped().base
    task, language = (save_adapter(tmp_path / n, base, i) for i, n in enumerate("ab", 1))
    player = opened(ls.swap(task=task, language=language, base=base))
    answers = asked(player, "task", "soup", "swap.2.2.0.0.task", length=4)
    assert {len(one["tokens"]) for one in answers.values()} <= {1, 2, 3, 4}


def test_the_change_beside_each_layer_is_that_of_the_map():
    player = Player(lab_plan(shipped(), "furo"), device="cpu")
    player.measure()
    shares = player.change
    assert {name: len(own) for name, own in shares.items()} == {"task": 8, "language": 8}
    for own in shares.values():
        assert sum(own) / 8 == pytest.approx(0.15, abs=0.02)


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == [("one", None), ("two", None)]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"text": "c"}\n')
    found = read_prompts(tmp_path / "p.jsonl")
    assert found == [("a", "b"), ("c", None)]
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


def test_a_study_opens_on_its_composition(tmp_path):
    root = tmp_path / "study"
    asked = Benchmarks(tasks=["lab_problem_{language}"])
    step = EvaluateStep(language="furo", base=str(shipped().base), kinds=[], evaluate=asked)
    StudyJournal(root, Graph([step.plan("evaluate/furo")])).open()
    with pytest.raises(StudyError, match="has no 'elvish'; its languages are furo"):
        selected_recipe(root, "elvish")
    recipe = lab_plan(shipped(), "furo").recipe.model_dump(mode="json", exclude_defaults=True)
    (root / "best").mkdir()
    best = yaml.safe_dump({**recipe, "swap": {"bottom": 3, "top": 0}})
    (root / "best" / "furo.yaml").write_text(best)
    assert Pair(ls.make_plan(selected_recipe(root))).start == "swap.3.0.0.0.blend"
