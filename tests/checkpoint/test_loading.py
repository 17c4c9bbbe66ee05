"""Loading with transformers never runs a checkpoint's own code."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
from merging import change_config, save_expert, tiny_llama
from refusals import refused

import layerswap as ls
from layerswap.checkpoint.loading import load_causal_lm, load_config, load_tokenizer
from layerswap.ground.errors import CheckpointError

SOURCE = Path(__file__).parents[2] / "src" / "layerswap"
NO_CODE = {"GenerationConfig", "PeftModel"}
"""Their files hold no code, and their `from_pretrained` has no such argument."""


def calls(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "from_pretrained"
    ]


def test_everything_is_loaded_in_one_place():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if calls(path)}
    assert found == {"checkpoint/loading.py"}


def test_code_is_refused_at_every_call():
    for call in calls(SOURCE / "checkpoint" / "loading.py"):
        assert isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) not in NO_CODE:
            [given] = [k.value for k in call.keywords if k.arg == "trust_remote_code"]
            assert ast.unparse(given) == "False"


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """A checkpoint with its own code, and a user who answers yes to every question."""
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    module = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own:\n    pass\n"
    (tmp_path / "own.py").write_text(module)
    maps = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": maps}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return tmp_path


@pytest.mark.parametrize("load", [load_tokenizer, load_config, load_causal_lm])
def test_a_checkpoint_with_code_is_refused_in_one_line(hostile, load):
    message = refused(CheckpointError, load, hostile, named="expert")
    assert message.startswith("expert: ")
    assert message.endswith("(it needs Python code of its own, which layerswap never runs)")
    assert "\n" not in message
    assert not (hostile / "ran").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return [save_expert(folder / f"e{seed}", tiny_llama(), seed) for seed in range(2)]


@pytest.fixture
def pair(saved, tmp_path):
    return [shutil.copytree(one, tmp_path / one.name) for one in saved]


KERNEL = "kernels-community/flash-attn3"
KERNELS = [
    {"attn_implementation": KERNEL},
    {"_attn_implementation": KERNEL},
    {"_attn_implementation": f"paged|{KERNEL}"},
    {"attn_implementation": {"": KERNEL}},
    {"attn_implementation": "flash_attention_3"},  # which falls back to a kernel
    {"attn_implementation": ["x/y"]},
    {"experts_implementation": "sonicmoe"},
    {"_experts_implementation": KERNEL},
]


@pytest.mark.parametrize("keys", KERNELS, ids=str)
def test_no_kernel_is_fetched_for_a_configuration(pair, tmp_path, monkeypatch, keys):
    from transformers import modeling_utils
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    asked = []

    def watched(name, *args, **kwargs):
        asked.append(name)
        return lazy_import_flash_attention(name, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", watched)
    change_config(pair[0], **keys)
    change_config(pair[1], **keys)
    plan = ls.swap(task=pair[0], language=pair[1])
    for model in (
        load_causal_lm(pair[0]),
        plan.load(),
        load_causal_lm(plan.save(tmp_path / "out")),
    ):
        assert model.config._attn_implementation == "sdpa"
    assert asked == []
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not [key for key in written if "_implementation" in key]


def test_a_kernel_in_a_part_of_a_configuration(tmp_path):
    own = {"_attn_implementation": KERNEL}
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **own}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": text, **own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = load_config(tmp_path)
    assert config._attn_implementation is None
    assert config.text_config._attn_implementation is None


def test_transformers_own_implementations_stay(pair):
    change_config(pair[0], attn_implementation="eager")
    assert load_causal_lm(pair[0]).config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token_id": [[1]]}', '{"eos_token_id": 2.5}',
        '{"eos_token_id": "x"}', '{"eos_token_id": true}', '{"eos_token_id": {"a": 1}}',
        '{"pad_token_id": "y"}', '{"max_new_tokens": "many"}', '{"compile_config": {"x": 1}}',
        '{"watermarking_config": 3}', '{"cache_implementation": "x\\ny"}', '{"to_dict": 2}',
    ],
    ids=lambda content: content[:30],
)  # fmt: skip
def test_odd_generation_configurations_are_one_line(pair, content):
    (pair[0] / "generation_config.json").write_text(content)
    message = refused(CheckpointError, ls.swap(task=pair[0], language=pair[1]).load)
    assert message.startswith(f"{pair[0]}: its generation configuration cannot be loaded (")
    assert "\n" not in message
