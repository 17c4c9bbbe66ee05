"""Shared prefixes: groups of rows, and the same scores and texts as with whole rows."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EVERY, grid_of, swap_of

import layerswap as ls
from layerswap.engine import prefix as prefix_module
from layerswap.engine.prefix import group_by_prefix
from layerswap.engine.rows import first_scored, make_rows
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import Runner

RNG = np.random.default_rng(5)
EXAMPLES, MORE = (RNG.integers(3, 60, count).tolist() for count in (33, 25))
"""The beginnings of two kinds of few-shot prompts."""


def questions(beginning, count):
    """Questions with two answers each, one of one token and one of two."""
    found = []
    for _ in range(count):
        question = RNG.integers(3, 60, RNG.integers(1, 9)).tolist()
        found += [([*beginning, *question], [7]), ([*beginning, *question], [8, 9])]
    return found


def widths(sweep):
    """A list that collects the rows and tokens of every call of a layer."""
    noted = []
    for layer in sweep.runner.stack.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: noted.append(tuple((*args, *kwargs.values())[0].shape[:2])),
            with_kwargs=True,
        )
    return noted


@pytest.fixture(autouse=True)
def _cheap_passes(monkeypatch):
    """Prompts of 40 tokens are enough."""
    monkeypatch.setitem(prefix_module.PASS_TOKENS, "cpu", 8)


@pytest.mark.parametrize("family", EVERY)
def test_scores_are_those_of_whole_rows(family, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))[::2]
    requests = [*questions(EXAMPLES, 9), *questions(MORE, 7), *questions([], 3)]
    sweep = Sweep(plans)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = sweep.loglikelihood(requests, batch_size=4, share_prefixes=False)
        noted = widths(sweep)
        sweep.loglikelihood(requests, batch_size=4, share_prefixes=False)
        read = sum(rows * width for rows, width in noted)
        noted.clear()
        shared = sweep.loglikelihood(requests, batch_size=4)
    assert sum(rows * width for rows, width in noted) < 0.7 * read
    assert sweep._shares_prefixes
    assert (1, len(EXAMPLES)) in noted
    assert (1, len(MORE)) in noted
    assert shared.greedy.tolist() == whole.greedy.tolist()
    assert shared.logprob == pytest.approx(whole.logprob, abs=2e-4)


def test_half_precision(tmp_path):
    sweep = Sweep(grid_of(swap_of(tmp_path, "gemma3", torch.bfloat16))[:3])
    requests = questions(EXAMPLES, 9)
    whole = sweep.loglikelihood(requests, share_prefixes=False)
    shared = sweep.loglikelihood(requests)
    assert sweep._shares_prefixes
    assert shared.logprob == pytest.approx(whole.logprob, rel=0.05)


def test_a_model_whose_logits_differ_reads_whole_rows(tmp_path, monkeypatch):
    sweep = Sweep([swap_of(tmp_path)])
    requests = questions(EXAMPLES, 6)
    whole = sweep.loglikelihood(requests, share_prefixes=False)
    run = Runner.run

    def wrong(self, inputs, members, *, prefix=0):
        if prefix:
            inputs = inputs | {"input_ids": inputs["input_ids"].flip(1)}
        return run(self, inputs, members, prefix=prefix)

    monkeypatch.setattr(Runner, "run", wrong)
    assert np.array_equal(sweep.loglikelihood(requests).logprob, whole.logprob)
    assert sweep._shares_prefixes is False


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_texts_are_those_of_whole_prompts(family, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))[::2]
    prompts = [list(context) for context, _ in questions(EXAMPLES, 7)[::2]]
    # Beside a longer prompt, their padding is longer than the prefix.
    prompts += [RNG.integers(3, 60, count).tolist() for count in (4, 20)]
    prompts.append([*EXAMPLES, *RNG.integers(3, 60, 60).tolist()])
    sweep = Sweep(plans)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noted = widths(sweep)
        shared = sweep.generate(prompts, max_new_tokens=8, batch_size=4, eos=[])
        assert (1, len(EXAMPLES)) in noted
        noted.clear()
        whole = sweep.generate(
            prompts, max_new_tokens=8, batch_size=4, eos=[], share_prefixes=False
        )
        assert (1, len(EXAMPLES)) not in noted
    assert shared == whole


def test_drawn_texts_are_those_of_whole_prompts(tmp_path):
    sweep = Sweep([swap_of(tmp_path)])
    prompts = [list(context) for context, _ in questions(EXAMPLES, 8)[::2]]
    settings = {"max_new_tokens": 12, "sampling": ls.Sampling(temperature=0.9, seed=3), "eos": []}
    shared = sweep.generate(prompts, **settings)
    assert shared == sweep.generate(prompts, share_prefixes=False, **settings)
    assert len({one.tokens for one in shared[0]}) > 4


# --- groups ---


def grouped(requests, size=4):
    rows = make_rows(requests, None)
    return group_by_prefix(rows, [first_scored(row, requests) for row in rows], size)


def test_a_common_instruction_before_different_examples():
    start = RNG.integers(3, 60, 30).tolist()
    kinds = [[*start, kind, *RNG.integers(3, 60, 40).tolist()] for kind in (61, 62)]
    requests = [question for kind in kinds for question in questions(kind, 12)]
    requests += [question for kind in range(63, 69) for question in questions([*start, kind], 1)]
    groups = grouped(requests)
    assert [group.prefix for group in groups] == [71, 71, 30]


def test_padding_can_cost_more_than_prefixes_save():
    requests = [*questions([3], 5), *questions([4, 4, 4], 5)]
    assert grouped(requests) == [(make_rows(requests, None), 0)]
    kinds = [[kind, *RNG.integers(3, 60, 59).tolist()] for kind in range(61, 77)]
    lengths = [*[10] * 15, 900]
    requests = [([*kind, *RNG.integers(3, 60, own).tolist()], [7]) for kind in kinds
                for own in lengths]  # fmt: skip
    (group,) = grouped(requests, 16)
    assert group.prefix == 0


def test_a_pass_costs_more_on_a_gpu():
    requests = [question for _ in range(20)
                for question in questions(RNG.integers(3, 60, 90).tolist(), 4)]  # fmt: skip
    rows = make_rows(requests, None)
    asked = [first_scored(row, requests) for row in rows]
    assert len(group_by_prefix(rows, asked, 16)) == 20
    assert [group.prefix for group in group_by_prefix(rows, asked, 16, device="cuda")] == [0]


def test_a_prefix_ends_before_what_is_asked():
    text = RNG.integers(3, 60, 50).tolist()
    requests = [(text[:20], [*text[20:], last, 5]) for last in range(12)]
    (group,) = grouped(requests)
    assert group.prefix == 19  # the logits of the 20th token are asked for


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=40), st.integers(1, 5))
def test_groups_hold_every_row_once(requests, size):
    rows = make_rows(requests, None)
    asked = {row.tokens: first_scored(row, requests) for row in rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(prefix_module.PASS_TOKENS, "cpu", 1)
        groups = grouped(requests, size)
    assert sorted(row.tokens for group in groups for row in group.rows) == sorted(asked)
    for group, prefix in groups:
        assert len({row.tokens[:prefix] for row in group}) == 1
        assert all(prefix <= asked[row.tokens] for row in group)
        assert [len(row.tokens) for row in group] == sorted(
            (len(row.tokens) for row in group), reverse=True
        )
