"""The bridge to lm-eval: its own results on the merged checkpoint, task by task."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from lm_eval.models.dummy import DummyLM
from merging import save_adapter
from peft import PeftModel
from refusals import one_line
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerswap as ls
from layerswap.checkpoint.loading import with_thinking
from layerswap.engine.sweep import Sweep
from layerswap.evaluation import harness
from layerswap.evaluation.harness import evaluate, open_models, stratified_order
from layerswap.evaluation.languages import answer_of
from layerswap.evaluation.metrics import ADDED
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.settings import Asked, EvaluationSettings
from layerswap.evaluation.suites.folders import TaskFolder
from layerswap.ground.errors import EvaluationError, LayerswapError

NAMES = ["maembe_generate", "maembe_choose", "maembe_read"]


def sweep_of(world, bottoms=(0, 1, 2), tops=(0, 1)) -> Sweep:
    plan = ls.swap(task=world["task"], language=world["language"])
    return Sweep(plan.grid(bottom=bottoms, top=tops))


def evaluated(world, sweep=None, names=NAMES, tokenizer=None, **options):
    sweep = sweep or sweep_of(world, bottoms=(1,), tops=(1,))
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(world["task"])
    return evaluate(sweep, tokenizer, names, include=[world["tasks"]], **options)


def texts_of(world, folders, settings, **options):
    """What each of these models writes."""
    results = harness.evaluate_models(
        open_models(folders), ["maembe_generate"], [world["tasks"]], settings=settings, **options
    )
    return [
        [sample["resps"] for sample in result["samples"]["maembe_generate"]]
        for result in results.values()
    ]


def with_lm_eval(world, model, names=NAMES, tokenizer=None, **settings) -> dict:
    """lm-eval as its users run it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=16, device="cpu", dtype="float32"
        ),
        tasks=names, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(world["tasks"]), include_defaults=False),
        **settings,
    )  # fmt: skip


def comparable(results: dict) -> dict:
    return {
        task: {key: value for key, value in found.items()
               if "stderr" not in key and key.partition(",")[0] not in ADDED}
        for task, found in results["results"].items()
    }  # fmt: skip


def assert_same(found: dict, expected: dict) -> None:
    """The same scores, prompts and texts."""
    ours, theirs = comparable(found), comparable(expected)
    assert ours.keys() == theirs.keys()
    for task, scores in theirs.items():
        assert ours[task].keys() == scores.keys()
        for key, value in scores.items():
            if isinstance(value, float):
                assert ours[task][key] == pytest.approx(value, rel=1e-4), (task, key)
        pairs = zip(found["samples"][task], expected["samples"][task], strict=True)
        for mine, other in pairs:
            assert mine["doc_id"] == other["doc_id"]
            assert mine["prompt_hash"] == other["prompt_hash"]
            if task == "maembe_generate":
                assert mine["resps"] == other["resps"]


def test_every_composition_scores_as_its_checkpoint_in_lm_eval(world, tmp_path, capfd):
    sweep = sweep_of(world)
    found = evaluated(world, sweep)
    assert "Tokenizing" not in capfd.readouterr().err  # no bar of lm-eval's for each composition
    assert len({json.dumps(comparable(one), default=float) for one in found}) > 1
    for index in (0, 5):
        folder = sweep.plans[index].save(tmp_path / str(index))
        assert_same(found[index], with_lm_eval(world, str(folder)))


@pytest.mark.slow
def test_compositions_of_adapters_score_as_with_peft(world, tmp_path):
    base = world["task"]
    for seed, (name, rank) in enumerate({"math": 4, "swahili": 6}.items()):
        places = ["q_proj", "v_proj", "up_proj", "down_proj"]
        settings = {"r": rank, "lora_alpha": 8, "use_rslora": bool(seed), "target_modules": places}
        save_adapter(tmp_path / name, base, seed, **settings)
    start = ls.swap(task=tmp_path / "math", language=tmp_path / "swahili", base=base)
    sweep = Sweep(start.grid(bottom=[0, 1, 2], top=[0, 1]))
    assert sweep.counts().ratio > 1.5, "the adapters share one base in memory"
    found = evaluated(world, sweep)
    tokenizer = AutoTokenizer.from_pretrained(base)
    for index in (0, 3):
        folder = sweep.plans[index].save(tmp_path / f"out-{index}")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        assert_same(found[index], with_lm_eval(world, model, tokenizer=tokenizer))


class Counted(Sweep):
    """A sweep that notes what it is asked."""

    def __init__(self, plans):
        super().__init__(plans)
        self.asked: list[tuple[str, int, int]] = []

    def iter_loglikelihood(self, requests, *, members=None, **settings):
        self.asked.append(("score", len(requests), len(members)))
        yield from super().iter_loglikelihood(requests, members=members, **settings)

    def iter_generate(self, prompts, *, members=None, **settings):
        self.asked.append(("text", len(prompts), len(members)))
        yield from super().iter_generate(prompts, members=members, **settings)


@pytest.mark.slow
def test_nothing_is_computed_twice(world, tmp_path):
    path = tmp_path / "answers.sqlite"
    sweep = Counted(sweep_of(world).plans)
    store = AnswerStore(path)
    first = evaluated(world, sweep, store=store)
    assert {members for _, _, members in sweep.asked} == {6}
    store.close()
    again = Counted(sweep_of(world).plans)
    second = evaluated(world, again, store=AnswerStore(path))
    assert again.asked == []
    assert [comparable(one) for one in first] == [comparable(one) for one in second]
    more = Counted(sweep_of(world, bottoms=(0, 1, 2, 3)).plans)
    evaluated(world, more, store=AnswerStore(path))
    assert {members for _, _, members in more.asked} == {len(more) - 6}


@pytest.mark.slow
def test_a_crash_between_two_batches_keeps_what_was_answered(world, tmp_path):
    path = tmp_path / "answers.sqlite"
    sweep = sweep_of(world)
    original, seen = sweep.iter_loglikelihood, []

    def broken(*args, **settings):
        for part in original(*args, **{**settings, "batch_size": 2}):
            yield part
            seen.extend(part.requests)
            if len(seen) > 3:
                raise KeyboardInterrupt

    sweep.iter_loglikelihood = broken
    with pytest.raises(KeyboardInterrupt):
        evaluated(world, sweep, store=AnswerStore(path))
    again = Counted(sweep_of(world).plans)
    found = evaluated(world, again, store=AnswerStore(path))
    scores = next(count for kind, count, _ in again.asked if kind == "score")
    everything = Counted(sweep_of(world).plans)
    whole = evaluated(world, everything)
    assert scores < next(count for kind, count, _ in everything.asked if kind == "score")
    assert [comparable(one) for one in found] == [comparable(one) for one in whole]


def test_functions_in_task_files_are_reported_before_they_run(world, tmp_path):
    text = (world["tasks"] / "choose.yaml").read_text().replace("maembe_choose", "coded")
    (tmp_path / "coded.yaml").write_text(text.replace("choices", "!function mine.choices", 1))
    (tmp_path / "mine.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).write_text('')\n"
        "def choices(doc): return doc['choices']\n"
    )
    load = partial(harness.load_tasks, ["coded"], include=[tmp_path])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"1 task files name Python functions .* coded.yaml;"):
            load()
        assert not (tmp_path / "ran").exists()
    with pytest.warns(UserWarning, match="outside the sandbox") as caught:
        load()
    assert (tmp_path / "ran").exists()
    load()
    assert len([one for one in caught if "!function" in str(one.message)]) == 1


def test_functions_of_the_suites_are_no_news(tmp_path):
    folder = TaskFolder(tmp_path)
    folder.module("numbers", "def found(doc): return doc\n")
    folder.task("one", {"process_docs": "!function numbers.found"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harness._warn_of_functions(tmp_path)


# --- generation settings and dtype --------------------------------------------------------------


def with_generation(world, root, **settings):
    """A copy of an expert with settings in its generation configuration."""
    shutil.copytree(world["task"], root)
    config = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2, **settings}
    (root / "generation_config.json").write_text(json.dumps(config))
    return str(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.8}, {"suppress_tokens": [*range(40)]}],
    ids="-".join,
)  # fmt: skip
def test_generation_settings_count_in_both_engines(world, settings, tmp_path):
    models = [with_generation(world, tmp_path / "plain"),
              with_generation(world, tmp_path / "own", **settings)]  # fmt: skip
    sweep, (plain, own) = (
        texts_of(world, models, EvaluationSettings(engine=engine, device="cpu", batch_size=1))
        for engine in ("sweep", "hf")
    )
    assert sweep == [plain, own]
    assert plain != own


@pytest.mark.slow
def test_sampling_settings_that_a_task_leaves_out_are_the_models_own(world, tmp_path):
    plain = [with_generation(world, tmp_path / "plain")]
    own = [with_generation(world, tmp_path / "own", top_k=1, do_sample=True)]
    drawn = EvaluationSettings(device="cpu", gen_kwargs="do_sample=true,temperature=1.0")
    greedy = EvaluationSettings(device="cpu")
    texts = [texts_of(world, *given) for given in ((plain, greedy), (plain, drawn), (own, drawn))]
    assert texts[0] == texts[2] != texts[1]


def test_answers_are_kept_for_a_configuration(world, tmp_path):
    store, found = AnswerStore(tmp_path / "answers.sqlite"), []
    for settings in ({}, {"repetition_penalty": 1.8}, {}):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        model = with_generation(world, tmp_path / "model", **settings)
        found += texts_of(world, [model], EvaluationSettings(device="cpu"), store=store)
    assert found[0] == found[2] != found[1]


def test_compositions_with_other_generation_settings_are_reported(world, tmp_path):
    folders = [with_generation(world, tmp_path / "a"),
               with_generation(world, tmp_path / "b", repetition_penalty=1.8)]  # fmt: skip
    sweep = Sweep(list(harness.open_models(folders).values()))
    with pytest.warns(UserWarning, match="composition 1 differs in generation_config.json"):
        sweep.generate([[5, 6]], max_new_tokens=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_counts_for_transformers_too(world, dtype, tmp_path):
    plan = sweep_of(world, bottoms=(1,), tops=(1,)).plans[0]
    settings = EvaluationSettings(engine="hf", dtype=dtype, device="cpu")
    model = harness._transformers(plan, settings).model
    assert model.dtype == getattr(torch, dtype)
    expected = AutoModelForCausalLM.from_pretrained(plan.save(tmp_path / "m"), dtype=dtype)
    ids = torch.tensor([[5, 9, 13, 2]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


# --- chat ---------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer(world):
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"apply_chat_template": True}, marks=pytest.mark.slow),
        {"apply_chat_template": True, "system_instruction": "Jibu.", "fewshot_as_multiturn": False},
        pytest.param({"system_instruction": "Jibu."}, marks=pytest.mark.slow),
        {"apply_chat_template": True, "gen_kwargs": "max_gen_toks=3"},
    ],
)
def test_chats_are_those_of_lm_eval(world, settings, tmp_path):
    sweep = sweep_of(world, bottoms=(1,), tops=(1,))
    names = ["maembe_generate", "maembe_choose"]
    options = EvaluationSettings(**settings)
    [found] = evaluated(world, sweep, names, chat_tokenizer(world), settings=options)
    folder = sweep.plans[0].save(tmp_path / "merged")
    expected = with_lm_eval(world, str(folder), names, chat_tokenizer(world), **settings)
    assert_same(found, expected)


def test_a_template_that_is_not_applied_is_reported_once_for_all_models(world, tmp_path):
    for name in ("task", "language"):
        shutil.copytree(world[name], tmp_path / name)
        chat_tokenizer(world).save_pretrained(tmp_path / name)
    models = open_models([str(tmp_path / name) for name in ("task", "language")])
    lines = []
    harness.evaluate_models(models, ["maembe_choose"], [world["tasks"]], log=lines.append)
    assert sum("chat template" in line for line in lines) == 1


def test_chat_templates_that_fail_are_one_line(world):
    plain = AutoTokenizer.from_pretrained(world["task"])
    with pytest.raises(EvaluationError, match=r"^the tokenizer has no chat template to apply$"):
        Asked(apply_chat_template=True).with_chat_template(plain)
    with pytest.raises(EvaluationError, match=r"^no chat template 'rag'; there are default$"):
        Asked(apply_chat_template="rag").with_chat_template(chat_tokenizer(world))
    raising = chat_tokenizer(world)
    raising.chat_template = "{{ raise_exception('System role not supported') }}"
    options = EvaluationSettings(apply_chat_template=True)
    refused = r"^the chat template cannot be applied \(System role not supported\)$"
    with pytest.raises(EvaluationError, match=refused):
        evaluated(world, None, ["maembe_generate"], raising, settings=options)


HOSTILE = [
    "{{ 'a' * 10**12 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 1 // 0 }}",
    "{{ messages[9].content }}", "{{ messages + 1 }}", "{% for m in messages %}",
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | nothing }}",
]  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE)
@pytest.mark.parametrize("engine", ["sweep", "hf"])
def test_hostile_chat_templates_are_one_line(template, engine, world, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    tokenizer.chat_template = template
    folder = sweep_of(world, bottoms=(1,), tops=(1,)).plans[0].save(tmp_path / "model")
    tokenizer.save_pretrained(folder)
    settings = EvaluationSettings(engine=engine, apply_chat_template=True, device="cpu")
    asked = open_models([str(folder)]), ["maembe_choose"], [world["tasks"]]
    said = one_line(EvaluationError, harness.evaluate_models, *asked, settings=settings)
    assert said.startswith("the chat template cannot be applied")


def test_a_template_that_refuses_the_system_role_is_reported(world):
    tokenizer = chat_tokenizer(world)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}Q"
    )
    settings = EvaluationSettings(apply_chat_template=True, system_instruction="Jibu.")
    with pytest.warns(UserWarning, match=r"\(no system\); prompts omit the system"):
        evaluated(world, None, ["maembe_choose"], tokenizer, settings=settings)


THINKING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}[assistant]{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize("think", ["on", "off", "cut", None])
def test_a_template_is_told_to_think(world, think):
    tokenizer = chat_tokenizer(world)
    tokenizer.chat_template = THINKING
    options = Asked(apply_chat_template=True, think=think)

    def thinks_not():
        turns, chosen = [{"role": "user", "content": "?"}], options.with_chat_template(tokenizer)
        prompt = chosen.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return prompt.endswith("<think></think>")

    assert thinks_not() == (think == "off")
    # An expert that was trained without thoughts has the switch as its default.
    tokenizer.chat_template = with_thinking(THINKING, "off", default=True)
    assert thinks_not() == (think in ("off", None))
    assert ("think" in options.model_dump()) == (think is not None)


def test_where_no_template_can_think(world):
    with pytest.raises(EvaluationError, match="think belongs to a chat template"):
        Asked(think="off").with_chat_template(chat_tokenizer(world))
    options = Asked(apply_chat_template=True, think="off")
    with pytest.raises(LayerswapError, match=r"has no switch \(enable_thinking\)"):
        options.with_chat_template(chat_tokenizer(world))


def test_thoughts_are_cut_from_answers():
    assert answer_of("<think>two and two</think>\n\n4") == "4"
    assert answer_of("two and two</thinking> 4") == "4"
    assert answer_of("<think>without an end") == "<think>without an end"


@pytest.mark.parametrize("think", ["cut", "on"])
def test_only_the_text_after_a_thought_is_scored(world, think):
    class Thinking(DummyLM):
        def generate_until(self, requests, disable_tqdm=False):
            return ["<think>7 or 8</think> 9"] * len(requests)

    model = Thinking()
    loaded = harness.load_tasks(["maembe_generate"], include=[world["tasks"]])
    settings = EvaluationSettings(think=think)
    for _ in range(2):
        samples = harness.run_tasks(model, loaded, settings)["samples"]["maembe_generate"]
        answers = {s["filter"]: s["filtered_resps"] for s in samples}
        assert answers["strict"] == (["9"] if think == "cut" else ["7"])
    assert model.generate_until([None]) == ["<think>7 or 8</think> 9"]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_index")
def test_lm_evals_own_tasks_are_known(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine\noutput_type: generate_until\n")
    assert len(harness.task_names()) > 10_000
    harness.check_task_names(["mine", "hellaswag"], include=[tmp_path])
    with pytest.raises(EvaluationError, match="no task 'helaswag'; did you mean 'hellaswag'"):
        harness.check_task_names(["mine", "helaswag"], include=[tmp_path])
    assert "mine" not in harness.task_names()
    with pytest.raises(EvaluationError, match=r"^no task 'qqqq'; none of [\d,]+ is alike$"):
        harness.check_task_names(["qqqq"])


def test_a_damaged_page_of_answers_is_one_line(tmp_path):
    path = tmp_path / "answers.sqlite"
    store = AnswerStore(path)
    store.keep(("c", f"request {i}", [float(i), True]) for i in range(2000))
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * len(data[4096:])
    path.write_bytes(data)
    damaged = AnswerStore(path)
    message = rf"^{re.escape(str(path))}: cannot be used to keep answers"
    with pytest.raises(EvaluationError, match=message):
        damaged.known("c", ["request 5"])
    with pytest.raises(EvaluationError, match=message):
        damaged.keep([("c", "request 5", [1.0, True])])


def test_answers_on_a_full_disk_are_not_to_be_deleted(tmp_path):
    store = AnswerStore(tmp_path / "answers.sqlite")
    store._database.execute("PRAGMA max_page_count = 4")
    with pytest.raises(EvaluationError, match=r"disk is full\); make room and run it again$"):
        store.keep(("c", f"request {i}", [float(i), True]) for i in range(2000))


@pytest.mark.parametrize("answer", ["5", "{", '"text"'])
def test_a_damaged_answer_is_one_line(tmp_path, answer):
    path = tmp_path / "answers.sqlite"
    store = AnswerStore(path)
    store.keep([("c", "request", [1.0, True])])
    store._database.execute("UPDATE answers SET answer = ?", (answer,))
    with pytest.raises(EvaluationError, match="cannot be used to keep answers"):
        store.known("c", ["request"])


def test_a_drawn_limit_has_the_labels_in_proportion_and_grows():
    labels = ["a"] * 60 + ["b"] * 30 + ["c"] * 10
    order = stratified_order(labels, 0)
    assert sorted(order) == list(range(100))
    for limit in (10, 20, 50):
        drawn = Counter(labels[position] for position in order[:limit])
        assert all(abs(drawn[one] - limit * labels.count(one) / 100) <= 1 for one in "abc")
    assert order[:10] != sorted(order[:10])
    assert stratified_order(labels, 1) != order == stratified_order(labels, 0)


def test_a_limit_draws_by_label(world):
    def documents(**limits):
        options = {"members": [0], "settings": EvaluationSettings(**limits)}
        (found,) = evaluated(world, sweep_of(world), ["maembe_label"], **options)
        samples = found["samples"]["maembe_label"]
        return [row["doc_id"] for row in samples], [row["target"] for row in samples]

    places, targets = documents(limit=3)
    assert len(set(map(str, targets))) == 3
    assert places != [0, 1, 2]


def test_a_model_is_called_what_the_user_called_it(world, tmp_path):
    link = tmp_path / "igbo-base"
    link.symlink_to(world["task"])
    assert list(open_models([str(link)])) == ["igbo-base"]
    ls.swap(task=link, language=world["language"]).save(tmp_path / "merged")
    assert "igbo-base" in (tmp_path / "merged" / "README.md").read_text()


class Reader:
    """A model of lm-eval that reads ten words, and writes four if not told."""

    max_length, max_gen_toks = 10, 4

    def tok_encode(self, text):
        return text.split()


def test_prompts_that_lose_their_beginning_are_counted():
    words = " ".join("abcdefghij")
    choices = [[("a b", " c"), ("a b", f" {words}")], [(words, " k"), (f"{words} k", " l")]]
    written = [[("a b c d e f", {})], [("a b c d e f g", {})], [(words, {"max_gen_toks": 1})]]
    samples = {
        "choose": [{"arguments": requests} for requests in choices],
        "write": [{"arguments": requests} for requests in written],
        "roll": [{"arguments": [(words * 9,)]}],
    }
    notes = list(harness.cut_prompts(Reader(), {"samples": samples}))
    assert [note.partition(" tokens")[0] for note in notes] == [
        "warning: choose: 2 of 2 prompts are longer than the 10",
        "warning: write: 2 of 3 prompts are longer than the 10",
    ]


@pytest.mark.parametrize(
    ("renamed", "task"),
    [("_loglikelihood_tokens", "maembe_choose"), ("_model_generate", "maembe_generate"),
     ("_loglikelihood_tokens", "maembe_read")],
)  # fmt: skip
def test_another_method_of_lm_eval_is_an_error_and_no_score(world, monkeypatch, renamed, task):
    """A newer lm-eval calls what our model overrides by another name: nothing would be swept."""
    from lm_eval.models.huggingface import HFLM

    original = getattr(HFLM, renamed)
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        method = getattr(HFLM, name)

        def newer(self, *args, method=method, **named):
            monkeypatch.setattr(type(self), renamed, original)
            return method(self, *args, **named)

        newer.__name__ = name
        monkeypatch.setattr(HFLM, name, newer)
    with pytest.raises(EvaluationError, match=r"lm-eval asked \d+ requests .* answered 0"):
        evaluated(world, names=[task])


RUNS_ANSWERS = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{test}"}}}}
test_split: test
unsafe_code: true
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
process_results: !function runs.results
"""


def test_tasks_whose_answers_lm_eval_runs_are_refused_by_name(world, tmp_path):
    """Directly and in a group: lm-eval's own consent is never given."""
    ran = tmp_path / "ran"
    (tmp_path / "runs.py").write_text(
        f"def results(doc, written):\n    open({str(ran)!r}, 'w').close()\n    return {{'a': 1}}\n"
    )
    names = {"test": world["tasks"] / "test.jsonl", "name": "runs_answers"}
    (tmp_path / "runs.yaml").write_text(RUNS_ANSWERS.format(**names))
    (tmp_path / "group.yaml").write_text("group: outer\ntask: [runs_answers]\n")
    for asked in ("runs_answers", "outer"):
        with pytest.raises(EvaluationError, match="runs_answers: lm-eval runs the programs"):
            harness.load_tasks([asked], include=[tmp_path])
    with pytest.raises(EvaluationError, match="runs_answers: lm-eval runs the programs"):
        harness.evaluate_models(open_models([str(world["task"])]), ["outer"], [tmp_path])
    assert not ran.exists()


@pytest.mark.parametrize(
    ("labels", "choices", "why"),
    [(["1", "2"], "['1', '2']", "lm-eval reads the answer '1' as the position of a choice; write "
                                "doc_to_target: label, without braces"),
     (["yes", "no"], "[yes, no]", "doc_to_choice: write texts in quotes; found True"),
     ([0, 1], "['1', '2']", None), (["0", "1"], "['0', '1']", None)],
)  # fmt: skip
def test_choices_that_lm_eval_reads_as_something_else_are_refused(tmp_path, labels, choices, why):
    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": "a", "label": one}) + "\n" for one in labels))
    text = RUNS_ANSWERS.format(name="own", test=rows).replace("{{answer}}", "{{label}}")
    text = text.replace("generate_until", f"multiple_choice\ndoc_to_choice: {choices}")
    (tmp_path / "own.yaml").write_text(
        text.partition("process")[0].replace("unsafe_code: true", "")
    )
    if why is None:
        assert harness.load_tasks(["own"], include=[tmp_path])["tasks"].keys() == {"own"}
        return
    with pytest.raises(EvaluationError, match=f"own: {re.escape(why)}"):
        harness.load_tasks(["own"], include=[tmp_path])


def test_a_seed_draws_other_exemplars_and_is_recorded(world):
    def asked(**settings):
        (result,) = evaluated(world, names=["maembe_choose"],
                              settings=Asked(num_fewshot=2, **settings))  # fmt: skip
        samples = result["samples"]["maembe_choose"]
        return [sample["arguments"][0][0] for sample in samples], samples[0]["prompts"]

    usual, how = asked()
    assert (usual, how) == asked(fewshot_seed=1234)
    other, said = asked(fewshot_seed=7)
    assert usual != other
    assert (how, said) == ("num_fewshot=2", "num_fewshot=2, fewshot_seed=7")


def test_a_document_is_known_by_its_text_in_every_prompt():
    class Task:
        def __init__(self, **config):
            self.get_config = config.get

        def doc_to_text(self, document):
            return document["q"]

    def asked(shots=0, words="", question="One?", delimiter=" ", template="", **settings):
        arguments = [(f"<user>{question}", f"{delimiter}{choice}") for choice in ("yes", "no")]
        sample = {"doc_id": 0, "doc": {"q": question}, "arguments": arguments, "doc_hash": "x"}
        task = Task(num_fewshot=shots, description=words)
        harness._add_questions([sample], task, Asked(**settings), template)
        return sample["document_hash"], sample["prompts"]

    plain, how = asked()
    assert how == "num_fewshot=0"
    assert asked(words="Reply.") == (plain, "description='Reply.', num_fewshot=0")
    chat = {"apply_chat_template": True, "system_instruction": "Short."}
    assert asked(3, delimiter="", template="t", **chat) == (
        plain, "apply_chat_template='e3b98a4d', system_instruction='Short.', num_fewshot=3"
    )  # fmt: skip
    assert asked(template="u", **chat)[1] != asked(template="t", **chat)[1]
    assert asked(question="Two?")[0] != plain


@pytest.mark.slow
def test_every_task_of_lm_eval_that_imports_a_runner_of_answers_is_refused():
    """Tasks whose files call `exec`, or start programs, by the source of lm-eval itself."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    runs = re.compile(r"(?<![\w.])exec\(|code_eval|check_output\(.*g\+\+", re.DOTALL)
    folders = {file.parent for file in root.rglob("*.py") if runs.search(file.read_text())}
    folders -= {root}
    assert {folder.name for folder in folders} >= {"mbpp", "humaneval", "cruxeval"}
    index = lm_eval.tasks.TaskManager().task_index
    names = [
        name for name, entry in index.items()
        if entry.kind.name == "TASK" and entry.yaml_path and entry.yaml_path.parent in folders
    ]  # fmt: skip
    assert len(names) > 15
    for name in names:
        with pytest.raises(EvaluationError, match=f"{name}: lm-eval runs the programs"):
            harness.refuse_programs({name: index[name].cfg.get("unsafe_code", False)})
