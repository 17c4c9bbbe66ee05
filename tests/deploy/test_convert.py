"""Folders as GGUF files: every tensor against an independent converter, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from deployed import save_chat_model, save_tokenizer, write_like
from effort import sampled
from gguf import GGUFReader
from gguf_conversion import FAMILIES, convert, save_model
from gguf_files import tensors_of

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.gguf_view import as_gguf
from layerswap.deploy.convert import LIKE, plan_conversion
from layerswap.ground.errors import LayerswapError
from layerswap.merge.target import MergeOptions


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("deploy")
    folder = save_chat_model(root / "merged", 1)
    base = save_chat_model(root / "base", 0)
    return folder, write_like(base, root / "base.gguf")


@pytest.mark.parametrize("kind", [LIKE, "BF16", "F16", "Q8_0", "Q5_0", "Q4_1", "Q4_0"])
def test_a_file_holds_the_tensors_that_another_converter_writes(pair, tmp_path, kind):
    folder, like = pair
    plan = plan_conversion(str(folder), str(like), kind)
    assert kind != LIKE or not plan.notes
    written = plan.write(tmp_path / "model.gguf", MergeOptions())
    expected = write_like(folder, tmp_path / "expected.gguf", kind="F32" if kind == LIKE else kind)
    assert tensors_of(written) == tensors_of(expected)


@pytest.mark.parametrize("family", sampled([*FAMILIES], "gemma3", "falcon-groups", "qwen3_moe"))
def test_every_family_is_read_backwards(tmp_path, family):
    folder = save_model(tmp_path / "model", family)
    like = open_checkpoint(str(convert(folder, tmp_path / "like.gguf", family)))
    from layerswap.checkpoint.read import read_tensor

    expected = {t.name: t.data for t in GGUFReader(tmp_path / "like.gguf").tensors}
    for name, infos in as_gguf(open_checkpoint(str(folder)), like).items():
        found = np.concatenate([read_tensor(info).reshape(-1) for info in infos])
        assert np.array_equal(found, expected[name].reshape(-1)), name


def test_what_differs_is_taken_from_the_folder_and_said(pair, tmp_path):
    folder, _ = pair
    like = write_like(folder, tmp_path / "l.gguf", template="{{ 1 }}", rope=5e5, bos=True, eos=2)
    plan = plan_conversion(str(folder), str(like))
    assert plan.notes == (
        "rope.freq_base: 10000 of the folder, in place of 500000",
        "tokenizer.ggml.eos_token_id: 1 of the folder, in place of 2",
        "tokenizer.ggml.add_bos_token: false as in the folder, in place of true",
        "chat template: the folder's, in place of the file's",
    )
    written = open_checkpoint(str(plan.write(tmp_path / "model.gguf", MergeOptions()))).metadata
    assert written is not None
    assert written["llama.rope.freq_base"] == 10_000
    assert written["tokenizer.ggml.eos_token_id"] == 1
    assert written["tokenizer.ggml.add_bos_token"] is False
    assert "<|turn|>" in written["tokenizer.chat_template"]
    assert json.loads(written["layerswap.record"])["deployed"] == str(folder)


def test_tokens_that_fine_tuning_added(pair, tmp_path):
    _, like = pair
    folder = save_chat_model(tmp_path / "wider", 2, vocab_size=320)
    tokenizer = save_tokenizer(folder)
    tokenizer.add_tokens(["mwalimu"])
    tokenizer.save_pretrained(folder)
    plan = plan_conversion(str(folder), str(like))
    rows = len(tokenizer) - 1
    assert plan.notes == (
        f"added tokens of the folder that {like} lacks: 'mwalimu'",
        f"320 rows of the folder, in place of {rows}",
    )
    written = open_checkpoint(str(plan.write(tmp_path / "model.gguf", MergeOptions()))).metadata
    assert written is not None
    tokens, types = (written[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert tokens[rows : rows + 2] == ["mwalimu", f"[PAD{rows + 1}]"]
    assert types[rows : rows + 2] == [4, 5]
    assert len(tokens) == len(types) == written["llama.vocab_size"] == 320


def test_a_tied_head_is_left_out_and_an_untied_one_is_added(pair, tmp_path):
    _, like = pair
    tied = save_chat_model(tmp_path / "tied", 3, tie_word_embeddings=True)
    headless = write_like(tied, tmp_path / "tied.gguf")
    assert "output.weight" not in tensors_of(headless)
    untied = save_chat_model(tmp_path / "untied", 4)
    for folder, file, head in (
        (tied, headless, False),
        (tied, like, True),
        (untied, headless, True),
    ):
        names = [tensor.name for tensor in plan_conversion(str(folder), str(file)).tensors]
        assert ("output.weight" in names) == head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 128}, "feed_forward_length is 96, but `intermediate_size` of .*128"),
        ({"num_hidden_layers": 2}, "block_count is 3, but"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         "has no rotary scaling, and the folder's `rope_type` is 'linear'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_pair_is_refused_by_name(pair, tmp_path, change, message):
    folder = save_chat_model(tmp_path / "other", **change)
    with pytest.raises(LayerswapError, match=message):
        plan_conversion(str(folder), str(pair[1]))


def test_refusals_before_anything_is_written(pair, tmp_path):
    folder, like = pair
    with pytest.raises(LayerswapError, match=r"type 'Q4_K_M' cannot be written; there are like, F"):
        plan_conversion(str(folder), str(like), "Q4_K_M")
    with pytest.raises(LayerswapError, match="--like takes a GGUF file of the base"):
        plan_conversion(str(folder), str(folder))
    with pytest.raises(LayerswapError, match="is a GGUF file already"):
        plan_conversion(str(like), str(like))
    bare = tmp_path / "bare.gguf"
    tokens = [f"<{i}>" for i in range(300)]
    write_like(folder, bare, tokens=tokens)
    with pytest.raises(LayerswapError, match="not the same tokenizer"):
        plan_conversion(str(folder), str(bare))


def test_another_family_is_refused_with_both_names(pair, tmp_path):
    folder = save_model(tmp_path / "gemma", "gemma3")
    with pytest.raises(
        LayerswapError, match=r"gemma with .*base.gguf: GGUF architecture is 'llama'"
    ):
        plan_conversion(str(folder), str(pair[1]))


def test_a_rope_base_that_the_file_lacks_is_llama_cpps(pair, tmp_path):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    folder = save_chat_model(tmp_path / "other", **rope)
    like = write_like(pair[0], tmp_path / "no-rope.gguf", rope=None)
    note = "rope.freq_base: 500000 of the folder, in place of 10000"
    assert note in plan_conversion(str(folder), str(like)).notes
