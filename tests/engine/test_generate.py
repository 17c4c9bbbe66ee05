"""Joint generation gives the texts of transformers for every composition."""

import json
import re
import warnings

import numpy as np
import pytest
import torch
from effort import sampled
from lm_eval.models.utils_hf import stop_sequences_criteria
from merging import recipe_plan
from refusals import one_line
from tiny_models import FAMILIES, MORE, config_of, grid_of, save_expert, swap_of
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import layerswap as ls
from layerswap.engine.decoding import Sampling
from layerswap.engine.sweep import Sweep
from layerswap.ground.errors import EvaluationError

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 60, n).tolist() for n in (9, 1, 12, 9)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return grid_of(swap_of(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of one character per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = "_^$0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"[:60]
    core = Tokenizer(models.WordLevel({char: i for i, char in enumerate(text)}, unk_token="_"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="_")


def alone(plan, prompts, eos=None, own=False, **settings):
    """The texts of transformers, one prompt at a time; `own` keeps the model's settings."""
    model = plan.load()
    if not own:
        model.generation_config.eos_token_id = eos
        model.generation_config.pad_token_id = 0
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(out[0, len(prompt) :].tolist())
    return found


def tokens_of(generations):
    return [list(generation.tokens) for generation in generations]


# --- greedy ---


@pytest.mark.parametrize("family", sampled([*FAMILIES, *MORE], "llama", "gpt2"))
def test_tokens_are_those_of_each_composition_alone(family, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))
    found = Sweep(plans).generate(PROMPTS, max_new_tokens=12, eos=[])
    for generations, plan in list(zip(found, plans, strict=True))[::3]:
        expected = alone(plan, PROMPTS, max_new_tokens=12, do_sample=False)
        assert tokens_of(generations) == expected
        assert {generation.reason for generation in generations} == {"length"}


@pytest.mark.slow
def test_rows_end_on_their_own(llama):
    whole = Sweep(llama).generate(PROMPTS, max_new_tokens=30, eos=[])
    written = [token for row in whole for g in row for token in g.tokens]
    # Tokens that end some rows early, some late and some not at all.
    eos = [token for token, _ in sorted(zip(*np.unique(written, return_counts=True), strict=True),
                                        key=lambda pair: pair[1])][10:13]  # fmt: skip
    eos = [int(token) for token in eos]
    found = Sweep(llama).generate(PROMPTS, max_new_tokens=30, eos=eos)
    reasons = {g.reason for row in found for g in row}
    assert reasons == {"eos", "length"}
    default = Sweep(llama).generate(PROMPTS, max_new_tokens=30)
    assert default == Sweep(llama).generate(PROMPTS, max_new_tokens=30, eos=[2])
    assert len({len(g.tokens) for row in found for g in row}) > 3
    for generations, plan in list(zip(found, llama, strict=True))[::2]:
        expected = alone(plan, PROMPTS, eos, max_new_tokens=30, do_sample=False)
        assert tokens_of(generations) == expected
        for generation in generations:
            assert (generation.tokens[-1] in eos) == (generation.reason == "eos")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_stop_strings_end_rows_as_in_lm_eval(family, letters, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))[::3]
    sweep = Sweep(plans)
    texts = [
        letters.decode(g.tokens) for row in sweep.generate(PROMPTS, max_new_tokens=20, eos=[])
        for g in row
    ]  # fmt: skip
    stop = [texts[0][3:5], texts[9][6:9], texts[-1][1:2]]
    found = sweep.generate(PROMPTS, max_new_tokens=20, eos=[], stop=stop, tokenizer=letters)
    assert {g.reason for row in found for g in row} == {"stop", "length"}
    for generations, plan in zip(found, plans, strict=True):
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            criteria = stop_sequences_criteria(letters, stop, len(prompt), 1)
            (expected,) = alone(
                plan, [prompt], max_new_tokens=20, do_sample=False, stopping_criteria=criteria
            )
            assert list(generation.tokens) == expected


def test_batches_come_one_by_one_and_do_not_matter(llama):
    sweep = Sweep(llama)
    whole = sweep.generate(PROMPTS, max_new_tokens=8)
    parts = list(sweep.iter_generate(PROMPTS, max_new_tokens=8, batch_size=3, members=[4, 1]))
    assert [len(part) for part in parts] == [6, 2]
    for (member, prompt), generation in (pair for part in parts for pair in part):
        assert generation == whole[member][prompt]
    assert sweep.generate(PROMPTS[::-1], max_new_tokens=8, members=[3]) == [whole[3][::-1]]


def test_equal_compositions_and_beginnings_are_computed_once(llama, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    rows = []
    forward = LlamaDecoderLayer.forward

    def counted(self, hidden_states, **kwargs):
        if hidden_states.shape[1] == 1:
            rows.append(hidden_states.shape[0])
        return forward(self, hidden_states, **kwargs)

    twins = [llama[3]] * 4
    sweep = Sweep(twins)
    sweep.generate(PROMPTS[:1], max_new_tokens=2)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    found = sweep.generate(PROMPTS[:2], max_new_tokens=6, eos=[])
    assert all(generations == found[0] for generations in found)
    assert rows == [2] * 5 * 5  # two prompts, five layers, five steps after the prompts


# --- settings of the generation configuration ---

SETTINGS = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"forced_eos_token_id": 7},
    {"suppress_tokens": [*range(3, 40)]},
    {"begin_suppress_tokens": [*range(3, 50)]},
    {"bad_words_ids": [[n] for n in range(10, 50)]},
    {"min_new_tokens": 6},
    {"min_length": 14},
    {"exponential_decay_length_penalty": [2, 1.9]},
    {"sequence_bias": [[[n], -9.0] for n in range(10, 40)]},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "forced_eos_token_id": [7, 8]},
]


def with_settings(root, family="llama", eos=(), **settings):
    """Three compositions of experts whose generation configuration has some settings."""
    swap_of(root, family)
    config = {"pad_token_id": 0, "eos_token_id": [*eos] or None, **settings}
    (root / "task" / "generation_config.json").write_text(json.dumps(config))
    return grid_of(ls.swap(task=root / "task", language=root / "language", bottom=1, top=1))[::4]


@pytest.mark.parametrize("settings", sampled(SETTINGS, SETTINGS[0]), ids="-".join)
def test_generation_settings_act_as_in_transformers(settings, tmp_path):
    plain = with_settings(tmp_path / "plain")
    eos = sorted({tokens[3] for tokens in alone(plain[0], PROMPTS, own=True, max_new_tokens=10)})
    plans = with_settings(tmp_path / "own", eos=eos, **settings)
    expected = [alone(plan, PROMPTS, own=True, max_new_tokens=10) for plan in plans]
    sweep = Sweep(plans)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*every composition generates alone")
        found = sweep.generate(PROMPTS, max_new_tokens=10)
    assert [tokens_of(row) for row in found] == expected
    sweep._decodes_jointly = False
    assert sweep.generate(PROMPTS, max_new_tokens=10) == found
    plain = with_settings(tmp_path / "other", eos=eos)
    assert [alone(plan, PROMPTS, own=True, max_new_tokens=10) for plan in plain] != expected, (
        "no effect"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 3, "length_penalty": 0.5}, "generation_config.json sets num_beams, which"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generation_config.json sets penalty_alpha, which"),
        ({"forced_eos_token_id": 99}, r".*generation_config.json \(IndexError: "),
        ({"exponential_decay_length_penalty": [2, 1.9]}, r".*generation_config.json \("),
    ],
    ids=str,
)
def test_generation_settings_that_cannot_act_are_one_line(settings, message, tmp_path):
    sweep = Sweep(with_settings(tmp_path, **settings))
    said = one_line(EvaluationError, sweep.generate, PROMPTS, max_new_tokens=4)
    assert re.match(message, said)


# --- sampling ---


NARROW = Sampling(temperature=0.7, top_k=12, top_p=0.8, seed=1)


def drawn_alone(plan, prompt, draws, processors):
    """A second implementation of sampling: whole forward passes, no cache."""
    model, tokens = plan.load(), []
    for draw in draws:
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].float()
        for process in processors:
            logits = process(ids, logits)
        share = logits[0].double().softmax(-1).cumsum(-1)
        tokens.append(int((share <= draw * share[-1]).sum()))
    return tokens


WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)]


def check_draws(found, plans, sampling, processors):
    draws = sampling.draws(range(len(PROMPTS)), 8)
    for generations, plan in zip(found, plans, strict=False):
        for prompt, row, generation in zip(PROMPTS, draws, generations, strict=True):
            assert list(generation.tokens) == drawn_alone(plan, prompt, row, processors)


@pytest.mark.slow
def test_sampled_tokens_are_those_of_their_draws(llama):
    for sampling, processors in ((Sampling(seed=3), []), (NARROW, WARPERS)):
        found = Sweep(llama).generate(PROMPTS, max_new_tokens=8, eos=[], sampling=sampling)
        check_draws(found, llama[:2], sampling, processors)


@pytest.mark.slow
def test_sampling_with_settings_of_the_generation_configuration(tmp_path):
    """The model's own settings act before and after those of sampling, as in transformers."""
    plans = with_settings(tmp_path, repetition_penalty=1.5, min_p=0.02)
    sweep, settings = Sweep(plans), {"max_new_tokens": 8, "sampling": NARROW}
    found = sweep.generate(PROMPTS, **settings)
    own = [RepetitionPenaltyLogitsProcessor(1.5), *WARPERS, MinPLogitsWarper(0.02)]
    check_draws(found, plans, NARROW, own)
    sweep._decodes_jointly = False
    assert sweep.generate(PROMPTS, **settings) == found


@pytest.mark.slow
def test_samples_do_not_depend_on_other_rows(llama):
    sweep, settings = Sweep(llama), {"max_new_tokens": 8, "sampling": Sampling(seed=2)}
    whole = sweep.generate(PROMPTS, **settings)
    assert sweep.generate(PROMPTS, batch_size=1, **settings) == whole
    assert sweep.generate(PROMPTS, members=[5], **settings) == [whole[5]]
    assert sweep.generate(PROMPTS, max_new_tokens=8, sampling=Sampling(seed=4)) != whole
    greedy = sweep.generate(PROMPTS, max_new_tokens=8)
    assert sweep.generate(PROMPTS, max_new_tokens=8, sampling=Sampling(top_k=1)) == greedy
    assert whole != greedy


# --- refusals ---


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[5], [61]], {}, "prompt 1 holds token 61, but the model has 60"),
        ([[5] * 120], {"max_new_tokens": 9}, "prompt 0 has 120 tokens, which with 9 new ones is"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[5]], {"stop": ["a"]}, "stop strings need the tokenizer"),
        ([[5]], {"members": [-1]}, "no composition -1"),
        ([], {}, "^there are no prompts to generate after$"),
        ([[5]], {"batch_size": 0}, "^batch_size is 0; it must be at least 1$"),
        ([[5]], {"batch_size": -1}, "^batch_size is -1; it must be at least 1$"),
    ],
)
def test_impossible_generations_are_refused(llama, prompts, settings, message):
    with pytest.raises(EvaluationError, match=message):
        Sweep(llama).generate(prompts, **{"max_new_tokens": 4, **settings})


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0.0}, {"temperature": np.inf}, {"temperature": np.nan},
     {"temperature": 1e-320}, {"top_k": -1}, {"top_p": 1.5}],
    ids=str,
)  # fmt: skip
def test_sampling_out_of_range(setting):
    ((name, value),) = setting.items()
    with pytest.raises(EvaluationError, match=f"^{name} is {value}; it must be "):
        Sampling(**setting)


def test_a_model_that_decodes_differently_is_detected(llama, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def contrary(self, hidden_states, **kwargs):
        return forward(self, hidden_states, **kwargs) * (1 if hidden_states.shape[1] > 1 else -1)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", contrary)
    with pytest.warns(UserWarning, match="a token's logit is .* below the largest"):
        Sweep(llama).generate(PROMPTS[::2], max_new_tokens=4)


# --- models that cannot be decoded together ---


@pytest.mark.slow
def test_a_state_inside_modules_is_detected(letters, tmp_path):
    """RecurrentGemma keeps its state in modules, which a few steps would not reveal."""
    from transformers import RecurrentGemmaConfig

    config = RecurrentGemmaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=96, num_hidden_layers=4, lru_width=32,
        num_attention_heads=4, num_key_value_heads=1, attention_window_size=6,
    )  # fmt: skip
    pair = {n: save_expert(tmp_path / n, config, i) for i, n in enumerate(("task", "language"))}
    patterns = [
        {"match": rf"model\.layers\.(?P<layer>\d+)\.{names}\..*", "role": role}
        for names, role in (
            ("temporal_block", "attention"), ("mlp_block", "mlp"),
            ("(temporal_pre_norm|channel_pre_norm)", "norm"),
        )
    ] + [{"match": r"model\.final_norm\.weight", "role": "final_norm"}]  # fmt: skip
    plan = recipe_plan(experts=pair, patterns=patterns, swap={"bottom": 1, "top": 1})
    plans = [plan, *plan.grid(bottom=[1, 2], top=[0])]
    # A prompt of one token looks like a step of decoding, which continues the text before it.
    prompts = [*PROMPTS, *([token] for token in range(3, 19))]
    with pytest.warns(UserWarning, match="it keeps a recurrent state"):
        found = Sweep(plans).generate(prompts, max_new_tokens=10, eos=[])
    for generations, one in zip(found, plans, strict=True):
        for prompt, generation in zip(prompts, generations, strict=True):
            fresh = alone(one, [prompt], max_new_tokens=10, do_sample=False)
            assert [list(generation.tokens)] == fresh


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_texts_at_which_rotary_tables_change_are_refused(rope, tmp_path):
    plan = swap_of(tmp_path, rope_parameters=rope, max_position_embeddings=16)
    sweep = Sweep([plan])
    (texts,) = sweep.generate(PROMPTS, max_new_tokens=4, eos=[])
    assert tokens_of(texts) == alone(plan, PROMPTS, max_new_tokens=4, do_sample=False)
    tokens = list(range(3, 19))
    assert sweep.loglikelihood([(tokens, [4])]).logprob.shape == (1, 1)
    beyond = "a text of 17 tokens is beyond the 16 up to which LlamaForCausalLM has one rotary"
    for ask in (
        lambda: sweep.loglikelihood([([3, *tokens], [4])], max_length=32),
        lambda: sweep.generate([tokens[:12]], max_new_tokens=5),
        lambda: next(sweep.logits(torch.tensor([[3, *tokens]]))),
    ):
        with pytest.raises(EvaluationError, match=beyond):
            ask()


def test_a_model_without_a_head_is_one_line(tmp_path):
    from transformers import AutoModel

    for seed in range(2):
        torch.manual_seed(seed)
        AutoModel.from_config(config_of("llama")).save_pretrained(tmp_path / f"e{seed}")
    plan = ls.swap(task=tmp_path / "e0", language=tmp_path / "e1", bottom=1, top=1)
    with pytest.raises(EvaluationError, match=r"^LlamaModel has no language-model head"):
        next(Sweep([plan]).logits(torch.tensor([[5, 6]])))
