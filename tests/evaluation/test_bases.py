"""How a base reads a text: tokens, bits as transformers computes them, and a best only if sure."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from deployed import save_chat_model, write_like
from lab_files import write_lab_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.cli import app
from layerswap.evaluation.bases import (
    Counts,
    bits_of,
    count_tokens,
    describe,
    find_best,
    glance,
    read_sample,
    spelling_bits,
)
from layerswap.evaluation.statistics import ratio_interval
from layerswap.ground.errors import DataError
from layerswap.lab.assets import shipped


@pytest.fixture(scope="module")
def lab():
    base = shipped().base
    return load_causal_lm(base, dtype="float32"), load_tokenizer(base)


@pytest.fixture
def files(tmp_path, monkeypatch):
    write_lab_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bases(*arguments):
    return CliRunner().invoke(app, ["bases", *map(str, arguments)])


def test_bits_are_those_of_transformers_one_line_at_a_time(lab, files, monkeypatch, caplog):
    model, tokenizer = lab
    monkeypatch.setattr(tokenizer, "model_max_length", 9)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    lines = [*read_sample("qaa.txt")[:20], "x " * 700]
    expected = []
    for line in lines[:-1]:
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        first = tokenizer.bos_token_id
        ids = torch.tensor([[tokenizer.eos_token_id if first is None else first, *ids]])
        with torch.inference_mode():
            loss = model(ids, labels=ids).loss
        expected.append(float(loss) * (ids.shape[1] - 1) / math.log(2))
    found = bits_of(model, tokenizer, lines)
    np.testing.assert_allclose(found[:-1], expected, rtol=1e-4)
    assert found[-1] > 0  # longer than the model reads at once
    assert not caplog.records  # that a text is longer


def test_tokens_that_are_parts_of_characters_are_counted():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    counts = count_tokens(PreTrainedTokenizerFast(tokenizer_object=plain), ["abé", "ሀ", "x"])
    assert counts.tokens.tolist() == [4, 3, 1]
    assert counts.byte_tokens.tolist() == [2, 3, 0]
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wordy = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    counts = count_tokens(wordy, ["a b b"])
    assert (counts.unknown, counts.byte_tokens.tolist()) == (2, [0])
    assert describe("b", ["a b b"], counts).verdict == ""


def test_spelling_is_a_probability_and_learns_from_other_lines_alone():
    lines = [f"the cat sat on mat {'ab'[i % 2]}" for i in range(20)]
    same = spelling_bits(lines).sum()
    assert same < spelling_bits([line[:: 1 if i % 5 else -1] for i, line in enumerate(lines)]).sum()
    alone = spelling_bits(["q" * 8, *("zzzz" for _ in range(9))])
    assert alone[0] > 8 * 8 - 8  # a line does not help itself


def test_ratios_have_intervals_that_cover():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        wholes = rng.integers(5, 30, 100).astype(float)
        found = ratio_interval(wholes * 1.7 + rng.normal(0, 4, 100), wholes)
        inside += found.low <= 1.7 <= found.high
    assert 0.90 <= inside / 200 <= 0.985


def test_the_best_is_marked_only_where_the_interval_allows_it(files):
    sample, rng = read_sample("qaa.txt"), np.random.default_rng(1)
    n = len(sample)

    def counts(shift):
        return Counts(np.ones(n), np.zeros(n), 0, 100 + rng.normal(shift, 5, n))

    assert find_best(sample, [counts(0), counts(-10)]) == 1
    first = counts(0)
    assert find_best(sample, [first, Counts(np.ones(n), np.zeros(n), 0, first.bits)]) is None
    assert find_best(sample, [first]) is None


def test_the_command_prints_what_a_program_reads(files):
    done = bases("qaa.txt", shipped().base, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    (one,) = facts["bases"]
    assert facts["best"] is None
    assert one["bits_per_byte"]["low"] < one["bits_per_byte"]["mean"] < one["bits_per_byte"]["high"]
    counted = json.loads(bases("qaa.txt", shipped().base, "--tokenizer-only", "--json").stdout)
    assert counted["bases"][0]["bits_per_byte"] is None
    assert counted["bases"][0]["per_word"] == one["per_word"]


@pytest.mark.slow
def test_a_gguf_file_is_read_as_the_folder_of_its_weights(files):
    folder = save_chat_model(files / "base")
    file = write_like(folder, files / "base.gguf")
    done = bases("qaa.txt", folder, file, "--json")
    assert done.exit_code == 0, done.output
    one, other = json.loads(done.stdout)["bases"]
    assert one["per_character"] == other["per_character"]
    assert one["bits_per_byte"]["mean"] == pytest.approx(other["bits_per_byte"]["mean"], rel=1e-4)


def test_a_mistake_is_one_line(files):
    (files / "short.txt").write_text("one\n")
    for arguments, said in (
        (("short.txt", "b"), "short.txt: 1 line, too few for an interval; give at least 10"),
        (("qaa.txt", "b", "b"), "b: is given twice"),
    ):
        with pytest.raises(DataError if "twice" not in said else Exception, match=said):
            raise bases(*arguments).exception


def test_a_glance_says_in_words_how_the_base_reads(lab, files):
    (files / "long.txt").write_text("".join(f"{i} {'a ' * 999}\n" for i in range(20)))
    assert max(map(len, read_sample("long.txt"))) == 400
    sample = read_sample("qaa.txt")
    assert glance("lab", *lab, sample[:9]) is None
    reading = glance("lab", *lab, sample)
    assert "bits per byte" in reading.line("Furo")
    assert "tokens per" in reading.line("Furo")
    bits = spelling_bits(sample)
    n = len(bits)
    worse, better = (Counts(np.ones(n), np.zeros(n), 0, bits * by) for by in (1.5, 0.5))
    assert describe("b", sample, worse).verdict == "does not read it"
    assert "the base does not read Furo; compare" in describe("b", sample, worse).line("Furo")
    assert describe("b", sample, better).verdict == "reads it"
    spelt = Counts(np.ones(n), np.ones(n), 0)
    assert describe("b", sample, spelt).verdict == "spells it in bytes"
