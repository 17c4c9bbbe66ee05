"""The bridge to lm-eval: its own results on the merged checkpoint, task by task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import layerswap as ls
from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.harness import evaluate
from layerswap.evaluation.response_cache import AnswerStore

QUESTIONS = [
    {"question": f"Asha ana maembe {a} na Juma ana {b}. Jumla ni ngapi?", "answer": str(a + b),
     "choices": [str(a), str(a + b), str(a * b + 1)], "right": 1}
    for a, b in [(2, 3), (4, 5), (1, 7), (6, 2), (3, 3), (8, 1), (5, 4)]
]  # fmt: skip
GENERATE = """
task: maembe_generate
dataset_path: json
dataset_kwargs: {{data_files: {{train: "{train}", test: "{test}"}}}}
training_split: train
fewshot_split: train
test_split: test
num_fewshot: 2
fewshot_config: {{sampler: first_n}}
output_type: generate_until
doc_to_text: "Swali: {{{{question}}}}\\nJibu:"
doc_to_target: " {{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "Swali"], max_gen_toks: 12, do_sample: false}}
filter_list:
- name: strict
  filter: [{{function: regex, regex_pattern: "([0-9]+)"}}, {{function: take_first}}]
- {{name: raw, filter: [{{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: maembe_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{test}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: right
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
READ = """
task: maembe_read
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{test}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, Path]:
    """Two tiny experts with a byte-level tokenizer, and a folder of lm-eval tasks."""
    root = tmp_path_factory.mktemp("harness")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel

    core.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator([json.dumps(q) for q in QUESTIONS], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, vocab_size=len(tokenizer),
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    for seed, name in enumerate(("task", "language")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    tasks = root / "tasks"
    tasks.mkdir()
    for split, rows in (("train", QUESTIONS[:2]), ("test", QUESTIONS[2:])):
        lines = "\n".join(map(json.dumps, rows))
        (tasks / f"{split}.jsonl").write_text(lines + "\n")
    files = {split: tasks / f"{split}.jsonl" for split in ("train", "test")}
    for name, text in (("generate", GENERATE), ("choose", CHOOSE), ("read", READ)):
        (tasks / f"{name}.yaml").write_text(text.format(**files))
    return {"root": root, "tasks": tasks, "task": root / "task", "language": root / "language"}


NAMES = ["maembe_generate", "maembe_choose", "maembe_read"]


def sweep_of(world, bottoms=(0, 1, 2), tops=(0, 1)) -> Sweep:
    plan = ls.swap(task=world["task"], language=world["language"])
    return Sweep(plan.grid(bottom=bottoms, top=tops))


def judge(world, sweep, **settings):
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    return evaluate(sweep, tokenizer, NAMES, include=[world["tasks"]], **settings)


def alone(world, plan, folder) -> dict:
    """lm-eval as its users run it, on the checkpoint written to disk."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    plan.save(folder)
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), batch_size=16, device="cpu", dtype="float32"),
        tasks=NAMES, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(world["tasks"]), include_defaults=False),
    )  # fmt: skip


def comparable(results: dict) -> dict:
    return {
        task: {key: value for key, value in found.items() if "stderr" not in key}
        for task, found in results["results"].items()
    }


def test_every_composition_scores_what_lm_eval_gives_its_checkpoint(world, tmp_path):
    sweep = sweep_of(world)
    found = judge(world, sweep)
    assert len({json.dumps(comparable(one), default=float) for one in found}) > 1
    for index in (0, 3, 5):
        expected = alone(world, sweep.plans[index], tmp_path / str(index))
        ours, theirs = comparable(found[index]), comparable(expected)
        assert ours.keys() == theirs.keys()
        for task, scores in theirs.items():
            assert ours[task].keys() == scores.keys()
            for key, value in scores.items():
                if isinstance(value, float):
                    assert ours[task][key] == pytest.approx(value, rel=1e-4), (task, key)
        for task in NAMES:
            for mine, other in zip(
                found[index]["samples"][task], expected["samples"][task], strict=True
            ):
                assert mine["doc_id"] == other["doc_id"]
                if task == "maembe_generate":
                    assert mine["resps"] == other["resps"]
                assert mine["prompt_hash"] == other["prompt_hash"]


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


def test_nothing_is_computed_twice(world, tmp_path):
    path = tmp_path / "answers.sqlite"
    sweep = Counted(sweep_of(world).plans)
    store = AnswerStore(path)
    first = judge(world, sweep, store=store)
    assert {members for _, _, members in sweep.asked} == {6}
    store.close()
    again = Counted(sweep_of(world).plans)
    second = judge(world, again, store=AnswerStore(path))
    assert again.asked == []
    assert [comparable(one) for one in first] == [comparable(one) for one in second]
    more = Counted(sweep_of(world, bottoms=(0, 1, 2, 3)).plans)
    judge(world, more, store=AnswerStore(path))
    assert {members for _, _, members in more.asked} == {len(more) - 6}


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
        judge(world, sweep, store=AnswerStore(path))
    again = Counted(sweep_of(world).plans)
    found = judge(world, again, store=AnswerStore(path))
    scores = next(count for kind, count, _ in again.asked if kind == "score")
    everything = Counted(sweep_of(world).plans)
    whole = judge(world, everything)
    assert scores < next(count for kind, count, _ in everything.asked if kind == "score")
    assert [comparable(one) for one in found] == [comparable(one) for one in whole]


def test_chosen_documents_and_members(world):
    sweep = sweep_of(world)
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    found = evaluate(
        sweep, tokenizer, ["maembe_choose"], include=[world["tasks"]], members=[4],
        samples={"maembe_choose": [1, 3]},
    )  # fmt: skip
    assert len(found) == 1
    assert [row["doc_id"] for row in found[0]["samples"]["maembe_choose"]] == [1, 3]


def test_a_task_that_is_not_known(world):
    with pytest.raises(EvaluationError, match=r"^tasks no_such_task: ") as caught:
        evaluate(sweep_of(world), None, ["no_such_task"])
    assert "\n" not in str(caught.value)
