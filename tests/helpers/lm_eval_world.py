"""A world for lm-eval: two tiny experts, tasks over local files, and sweeps of them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from merging import save_expert
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

QUESTIONS = [
    {"question": f"Asha ana maembe {a} na Juma ana {b}. Jumla ni ngapi?", "answer": str(a + b),
     "choices": [str(a), str(a + b), str(a * b + 1)], "right": 1}
    for a, b in [(2, 3), (4, 5), (1, 7), (6, 2), (3, 3), (8, 1), (5, 4)]
]  # fmt: skip
LABELS = ["ndogo", "kubwa", "sawa"]
LABEL = """
task: maembe_label
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{labelled}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\nJibu:"
doc_to_choice: [ndogo, kubwa, sawa]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that is learned from the questions."""
    special = ["<s>", "</s>", "<pad>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(map(json.dumps, QUESTIONS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], eos_token=special[1], pad_token=special[-1]
    )


def make_harness_world(root: Path, **shape: int) -> dict[str, Path]:
    """Two tiny experts with a byte-level tokenizer, and a folder of lm-eval tasks."""
    tokenizer = byte_tokenizer()
    usual = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 512}  # fmt: skip
    config = LlamaConfig(
        intermediate_size=48, num_hidden_layers=4, vocab_size=len(tokenizer),
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        **(usual | shape),
    )  # fmt: skip
    for seed, name in enumerate(("task", "language")):
        save_expert(root / name, config, seed)
        tokenizer.save_pretrained(root / name)
    tasks = root / "tasks"
    tasks.mkdir()
    labelled = [{**row, "label": LABELS[i % 3]} for i, row in enumerate(QUESTIONS)]
    splits = {"train": QUESTIONS[:2], "test": QUESTIONS[2:], "labelled": labelled}
    for split, rows in splits.items():
        lines = "\n".join(map(json.dumps, rows))
        (tasks / f"{split}.jsonl").write_text(lines + "\n")
    files = {split: tasks / f"{split}.jsonl" for split in splits}
    texts = {"generate": GENERATE, "choose": CHOOSE, "read": READ, "label": LABEL}
    for name, text in texts.items():
        (tasks / f"{name}.yaml").write_text(text.format(**files))
    return {"root": root, "tasks": tasks, "task": root / "task", "language": root / "language"}


def write_sweep(world: dict[str, Path], path: Path, **changes: object) -> Path:
    """A sweep file over the experts and tasks of `world`."""
    data = {
        "recipe": {
            "experts": {"task": str(world["task"]), "language": str(world["language"])},
            "swap": {},
        },
        "grid": {"bottom": "0-2", "top": [0, 1]},
        "tasks": ["maembe_choose", "maembe_generate"],
        "include": [str(world["tasks"])],
        "choose_by": {"task": "maembe_choose", "metric": "acc_norm"},
        "development": 0.6,
        **changes,
    }
    path.write_text(yaml.safe_dump(data))
    return path


LINES = {"wo": "ba ak nit ñu xam naa dem bu", "en": "the of and to in that was his"}


def write_languages(folder, *codes):
    """A text `<code>.txt` for each language, of which the first is made of Wolof's words."""
    for code, text in zip(codes, LINES.values(), strict=True):
        turns = (text.split()[i:] + text.split()[:i] for i in range(8))
        rows = [" ".join(one * (2 + k)) for one in turns for k in range(8)]
        (folder / f"{code}.txt").write_text("\n".join(rows), "utf-8")
