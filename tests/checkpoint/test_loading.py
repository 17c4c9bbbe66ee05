"""Whatever transformers loads for us, a checkpoint's own code never runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from layerswap.checkpoint.loading import load_causal_lm, load_config, load_tokenizer
from layerswap.errors import CheckpointError

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
    """A checkpoint with code of its own, and a person who says yes to every question."""
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
    with pytest.raises(CheckpointError) as caught:
        load(hostile, named="expert")
    message = str(caught.value)
    assert message.startswith("expert: ")
    assert message.endswith("(it needs Python code of its own, which layerswap never runs)")
    assert "\n" not in message
    assert not (hostile / "ran").exists()
