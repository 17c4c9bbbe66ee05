"""A slice of the real MGSM: a sweep against lm-eval on the merged checkpoint, adapters included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerswap as ls
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate

DATA = Path(__file__).parents[1] / "data" / "mgsm"
# As lm-eval's own mgsm_direct_sw, over a local file.
TASK = """
task: mgsm_slice_sw
dataset_path: csv
dataset_kwargs:
  data_files: {{test: "{file}"}}
  delimiter: "\\t"
  column_names: [question, answer]
test_split: test
output_type: generate_until
num_fewshot: 0
doc_to_text: "Swali: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer|string}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n\\n", "\\n", "Swali:"], do_sample: false, max_gen_toks: 16}}
filter_list:
- {{name: remove_whitespace, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}
- name: flexible-extract
  filter:
  - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
  - {{function: take_first}}
metric_list:
- {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true,
   ignore_punctuation: true}}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mgsm")
    (folder / "mgsm.yaml").write_text(TASK.format(file=DATA / "mgsm_sw.tsv"))
    return folder


def judged(folder_or_plan, tasks, tokenizer):
    (found,) = evaluate(Sweep([folder_or_plan]), tokenizer, ["mgsm_slice_sw"], include=[tasks])
    return found


def with_lm_eval(model, tokenizer, tasks):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4),
        tasks=["mgsm_slice_sw"], bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip


def same(found, expected):
    ours, theirs = found["samples"]["mgsm_slice_sw"], expected["samples"]["mgsm_slice_sw"]
    assert len(ours) == len(theirs) == 2 * 8, "two filters, eight problems"
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("doc", "target", "resps", "filtered_resps", "exact_match", "filter"):
            assert mine[key] == other[key], key


@pytest.mark.slow
def test_a_slice_of_mgsm_scores_as_in_lm_eval(world, tasks, tmp_path):
    plan = ls.swap(task=world["task"], language=world["language"])
    plans = plan.grid(bottom=[0, 1, 2], top=[0, 1])
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    found = evaluate(Sweep(plans), tokenizer, ["mgsm_slice_sw"], include=[tasks])
    texts = {json.dumps([s["resps"] for s in f["samples"]["mgsm_slice_sw"]]) for f in found}
    assert len(texts) > 1, "the compositions write different texts"
    for index in (1, 4):
        folder = plans[index].save(tmp_path / str(index))
        model = AutoModelForCausalLM.from_pretrained(folder)
        same(found[index], with_lm_eval(model, tokenizer, tasks))


@pytest.mark.slow
def test_compositions_of_adapters_are_judged_as_peft_runs_them(world, tasks, tmp_path):
    base = world["task"]
    for seed, (name, rank) in enumerate({"math": 4, "swahili": 6}.items()):
        torch.manual_seed(seed)
        config = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=8, use_rslora=bool(seed),
            target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], init_lora_weights=False,
        )  # fmt: skip
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        adapted.save_pretrained(tmp_path / name)
    start = ls.swap(task=tmp_path / "math", language=tmp_path / "swahili", base=base)
    plans = start.grid(bottom=[0, 1, 2], top=[0, 1])
    tokenizer = AutoTokenizer.from_pretrained(base)
    sweep = Sweep(plans)
    assert sweep.counts().ratio > 1.5, "the adapters share one base in memory"
    found = evaluate(sweep, tokenizer, ["mgsm_slice_sw"], include=[tasks])
    for index in (0, 3):
        folder = plans[index].save(tmp_path / f"out-{index}")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        same(found[index], with_lm_eval(model.merge_and_unload(), tokenizer, tasks))
