"""Scoring along the trie: exact to the bit, with every distinct beginning run once."""

import warnings

import numpy as np
import pytest
import torch
from effort import sampled
from families import model_of
from tiny_models import EVERY, grid_of, same_bits, save_expert, swap_of

import layerswap as ls
from layerswap.compose.presets import swap as swap_composition
from layerswap.compose.presets import zone_grid
from layerswap.engine import scoring
from layerswap.engine.rows import make_batches, make_rows
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import LayerCounts, Runner, build_trie, count_layers, paths_of, walk
from layerswap.ground.errors import EvaluationError

RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return grid_of(swap_of(tmp_path_factory.mktemp("llama")))


def some_ids(rows=3, tokens=11):
    return torch.from_numpy(RNG.integers(3, 60, (rows, tokens)))


def batches():
    """Without padding, padded on the right without a mask, and on the left with one."""
    ids = some_ids()
    yield {"input_ids": ids}
    right = ids.clone()
    right[1, 6:] = 0
    yield {"input_ids": right}
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    yield {"input_ids": ids * mask, "attention_mask": mask}


def check_alone(logits, plans, ids):
    for index, plan in enumerate(plans):
        with torch.no_grad():
            assert same_bits(logits[index], plan.load()(ids).logits), index


# --- exactness ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", sampled([torch.float32, torch.bfloat16], torch.float32), ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("family", EVERY)
def test_logits_are_those_of_each_composition_alone(family, dtype, tmp_path):
    plans, kept = grid_of(swap_of(tmp_path, family, dtype))[::2], list(batches())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep = Sweep(plans)
        found = [dict(sweep.logits(**batch)) for batch in kept]
    assert sweep.runner.exact
    distinct = sweep.counts().distinct
    checked = sweep.runner.evaluations - len(kept) * distinct
    assert 0 < checked <= 3 * 5  # the check of exactness ran three compositions
    for index, plan in enumerate(plans):
        model = plan.load()
        for batch, logits in zip(kept, found, strict=True):
            with torch.no_grad():
                assert same_bits(logits[index], model(**batch, use_cache=False).logits), index


def test_texts_of_one_token_are_read_without_a_cache(tmp_path):
    """With a cache, Qwen3-Next reads one token by another kernel, which rounds otherwise."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=8, num_experts=4,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=2,
    )  # fmt: skip
    pair = [save_expert(tmp_path / f"e{seed}", config, seed) for seed in range(2)]
    plans = ls.swap(task=pair[0], language=pair[1], bottom=1, top=1).grid(bottom=[1, 2], top=[1])
    sweep, models = Sweep(plans), [plan.load() for plan in plans]
    for shape in [(3, 1)] * 4 + [(2, 7), (1, 70)]:
        ids = some_ids(*shape)
        for member, logits in sweep.logits(ids):
            with torch.no_grad():
                assert same_bits(logits, models[member](ids, use_cache=False).logits)


def test_members_can_be_chosen_and_added(llama):
    ids = some_ids()
    sweep = Sweep(llama)
    every = dict(sweep.logits(ids))
    few = dict(sweep.logits(ids, members=[7, 2]))
    assert set(few) == {2, 7}
    assert all(same_bits(few[i], every[i]) for i in few)
    growing = Sweep(llama[:4])
    dict(growing.logits(ids))
    assert growing.add(llama[4:]) == list(range(4, len(llama)))
    assert all(same_bits(logits, every[i]) for i, logits in growing.logits(ids))


@pytest.mark.slow
def test_a_model_that_is_not_exact_runs_its_compositions_alone(llama, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward
    memory = {}

    def with_memory(self, hidden_states, **kwargs):
        # A layer that reads the state of an earlier one, which no trie can know.
        out = forward(self, hidden_states, **kwargs)
        last = memory.get("last", 0) if self.self_attn.layer_idx else 0
        memory["last"] = out.mean()
        return out + last

    monkeypatch.setattr(LlamaDecoderLayer, "forward", with_memory)
    ids = some_ids()
    sweep = Sweep(llama)
    message = r"LlamaForCausalLM cannot be run one by one exactly \(log"
    with pytest.warns(UserWarning, match=message):
        found = dict(sweep.logits(ids))
    assert sweep.runner.exact is False
    check_alone(found, llama, ids)
    scores = sweep.loglikelihood([([5, 6], [7, 8])])
    for index, plan in enumerate(llama):
        with torch.no_grad():
            alone = plan.load()(torch.tensor([[5, 6, 7]])).logits.log_softmax(-1)
        expected = alone[0, 1, 7] + alone[0, 2, 8]
        assert scores.logprob[index, 0] == pytest.approx(float(expected), abs=1e-5)


# --- what it costs ---


@pytest.mark.parametrize(
    ("zones", "naive", "distinct"),
    [
        # The ranges that paper 1, section 3.2, found about equally good.
        ({"bottom": range(3, 6), "top": range(3), "bottom_transition": range(3),
              "top_transition": range(3)}, 2592, 398),
        ({"bottom": range(9), "top": range(5), "bottom_transition": range(3),
              "top_transition": range(3)}, 12960, 1862),
        ({"bottom": range(9), "top": range(9)}, 2592, 584),
    ],
)  # fmt: skip
def test_grids_of_32_layers_need_few_layer_evaluations(zones, naive, distinct):
    paths = paths_of([swap_composition(32, zones=z) for z in zone_grid(32, **zones)])
    counts = count_layers(build_trie(paths))
    assert str(counts).startswith(f"{distinct} layer evaluations instead of {naive} (")
    assert distinct_beginnings(paths) == distinct


def distinct_beginnings(paths):
    return len({tuple(path[: n + 1]) for path in paths for n in range(1, len(path) - 1)})


def test_counts_are_of_distinct_beginnings_and_held_states():
    for _ in range(50):
        paths = RNG.integers(0, 2, (RNG.integers(1, 12), RNG.integers(3, 8))).tolist()
        roots = build_trie(paths)
        counts = count_layers(roots)
        assert counts.distinct == distinct_beginnings(paths)
        assert counts.naive == len(paths) * (len(paths[0]) - 2)
        # Held are all nodes that have run and have children that have not.
        left, held = {}, 0
        for node, parent in walk(roots):
            if parent is not None:
                left[id(parent)] -= 1
            if node.children:
                left[id(node)] = len(node.children)
            held = max(held, sum(count > 0 for count in left.values()))
        assert counts.open_states == held
        leaves = [m for node, _ in walk(roots) if not node.children for m in node.members]
        assert sorted(leaves) == list(range(len(paths)))


def test_states_are_released(llama, monkeypatch):
    sweep = Sweep(llama)
    alive, most = set(), 0
    call = type(sweep.runner.stack.before(input_ids=some_ids(), use_cache=False).calls[0])
    plain = call.__call__

    def counted(self, layer, hidden):
        nonlocal most
        import weakref

        out = plain(self, layer, hidden)
        token = object()
        alive.add(token)
        weakref.finalize(out, alive.discard, token)
        most = max(most, len(alive))
        return out

    monkeypatch.setattr(call, "__call__", counted)
    for _ in sweep.logits(some_ids()):
        pass
    assert 1 < most <= sweep.counts().open_states + 1  # those held, and the one that is computed


# --- scores ---

REQUESTS = [
    ([5, 9, 13, 2, 44], [17, 8]),
    ([5, 9], [13]),
    ([5, 9], [14]),
    ([5, 9], [13, 2, 44]),
    ([30], [31, 32, 33, 34, 35, 36]),
    ([7, 7, 7, 7, 7, 7, 7, 7, 7], [7]),
]


def by_hand(model, requests):
    """Scores of one forward pass per request, in float64."""
    found = []
    for context, continuation in requests:
        ids = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].double().log_softmax(-1)
        start = len(context) - 1
        rows = logprobs[start : start + len(continuation)]
        chosen = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        found.append((chosen, bool((rows.argmax(1) == torch.tensor(continuation)).all())))
    return found


@pytest.mark.parametrize(
    "family", sampled(["llama", "gemma3", "gpt2", "bloom", "cohere2"], "llama", "bloom")
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_are_those_of_each_request_alone(family, batch_size, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))[::2]
    scores = Sweep(plans).loglikelihood(REQUESTS, batch_size=batch_size)
    assert scores.logprob.shape == scores.greedy.shape == (len(plans), len(REQUESTS))
    for row, plan in enumerate(plans):
        for column, (tokens, greedy) in enumerate(by_hand(plan.load(), REQUESTS)):
            assert scores.logprob[row, column] == pytest.approx(float(tokens.sum()), abs=2e-4)
            assert scores.greedy[row, column] == greedy


def test_logits_in_pieces_give_the_same_scores(llama, monkeypatch):
    sweep = Sweep(llama[:3])
    whole = sweep.loglikelihood(REQUESTS)
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 60 * 2)
    pieces = sweep.loglikelihood(REQUESTS)
    assert np.allclose(whole.logprob, pieces.logprob, atol=1e-5)
    assert np.array_equal(whole.greedy, pieces.greedy)


def test_batches_come_one_by_one(llama):
    sweep = Sweep(llama[:3])
    whole = sweep.loglikelihood(REQUESTS, batch_size=2, members=[2, 0])
    alone = Sweep([llama[0]]).loglikelihood(REQUESTS, batch_size=2)
    assert np.array_equal(alone.logprob[0], whole.logprob[1]), "to the bit"
    seen = []
    for part in sweep.iter_loglikelihood(REQUESTS, batch_size=2, members=[2, 0]):
        assert part.members == [2, 0]
        assert np.array_equal(part.logprob, whole.logprob[:, part.requests])
        seen += part.requests
    assert sorted(seen) == list(range(len(REQUESTS)))


def test_rows_are_shared_cut_and_batched():
    rows = make_rows(REQUESTS, None)  # requests 1 and 2 differ in their last token
    assert [len(row.tokens) for row in rows] == [9, 6, 6]
    assert [set(row.requests) >= {1, 2} for row in rows].count(True) == 1
    assert [len(batch) for batch in make_batches(rows, 2)] == [2, 1]
    requests = [([5, 6], [7]), ([5, 6], [8, 9, 10]), ([5, 6, 8, 1, 1], [3]), ([2, 6, 8, 1, 1], [3])]
    rows = make_rows(requests, None, share=False)
    assert [row.tokens for row in rows] == [(2, 6, 8, 1, 1), (5, 6, 8, 1, 1), (5, 6, 8, 9), (5, 6)]
    (row,) = make_rows([(list(range(10)), [90, 91])], max_length=4)
    assert row.tokens == (7, 8, 9, 90), "long contexts lose their beginning"


@pytest.mark.parametrize(
    ("requests", "settings", "message"),
    [
        ([([], [3])], {}, "request 0 has an empty context"),
        ([([3], [4]), ([3], [])], {}, "request 1 has an empty continuation"),
        ([([3], [60])], {}, "the continuation of request 0 holds token 60, but the model has 60"),
        ([([-1], [6])], {}, "the context of request 0 holds token -1"),
        ([([3], [4] * 9)], {"max_length": 8}, "a continuation of 9 tokens, but the model reads 8"),
        ([([3], [4])], {"members": [11, 99]}, "no composition 99; the compositions are 0"),
        ([([3], [4])], {"members": []}, "no composition is chosen"),
        ([], {}, "^there are no requests to score$"),
        ([([3], [4])], {"batch_size": 0}, "^batch_size is 0; it must be at least 1$"),
        ([([3], [4])], {"batch_size": -1}, "^batch_size is -1; it must be at least 1$"),
        ([([3], [4])], {"max_length": 0}, "^max_length is 0; it must be at least 1$"),
    ],
)
def test_impossible_requests_are_refused(llama, requests, settings, message):
    with pytest.raises(EvaluationError, match=message):
        Sweep(llama).loglikelihood(requests, **settings)


def paligemma(root):
    """A swap of two tiny models that read a text in both directions."""
    for seed, name in enumerate(("task", "language")):
        torch.manual_seed(seed)
        model = model_of("paligemma")
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(root / name)
    return ls.swap(task=root / "task", language=root / "language", bottom=1, top=1)


@pytest.mark.parametrize("batch_size", [1, 6])
def test_requests_to_a_model_that_is_not_causal_are_scored_alone(batch_size, tmp_path):
    plans = paligemma(tmp_path).grid(bottom=[0, 1], top=[1])
    with pytest.warns(UserWarning, match=r"read several requests together \(later tokens, padding"):
        scores = Sweep(plans).loglikelihood(REQUESTS, batch_size=batch_size)
    for row, plan in enumerate(plans):
        model = plan.load()
        for column, (context, continuation) in enumerate(REQUESTS):
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *continuation][:-1]])).logits[0]
            places = logits.log_softmax(-1)[-len(continuation) :]
            expected = sum(float(p[t]) for p, t in zip(places, continuation, strict=True))
            assert scores.logprob[row, column] == pytest.approx(expected, abs=1e-5)
    with pytest.warns(UserWarning, match=r"decoded for several compositions .*\(later tokens"):
        Sweep(plans).generate([[5, 6, 7], [8]], max_new_tokens=2)


def test_layers_that_are_not_in_one_list_run_alone(llama, monkeypatch):
    monkeypatch.setattr("layerswap.engine.virtual._find_stack", lambda *args: None)
    ids = some_ids()
    sweep = Sweep(llama[:3])
    with pytest.warns(UserWarning, match="they are not in one list"):
        found = dict(sweep.logits(ids))
    assert sweep.counts().ratio == 1
    check_alone(found, llama[:3], ids)
    with pytest.warns(UserWarning, match="every composition generates alone"):
        texts = sweep.generate([[5, 6, 7]], max_new_tokens=3, eos=[])
    assert [len(row) for row in texts] == [1, 1, 1]


def test_layers_that_are_not_exact_count_for_every_composition(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "_why_not_exact", lambda self, inputs, members: "logits differ")
    sweep = Sweep(grid_of(swap_of(tmp_path)))
    with pytest.warns(UserWarning, match="every composition runs alone"):
        sweep.loglikelihood([([5, 6], [7]), ([5, 6], [8, 9])])
    naive = len(sweep) * 5
    assert sweep.counts() == LayerCounts(naive, naive, 1)
