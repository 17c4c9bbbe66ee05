"""Lanes: rows share one as long as they cannot differ, and keep their caches."""

import numpy as np
import pytest
import torch

from layerswap.engine.decoding import Sampling, draw_tokens
from layerswap.engine.lanes import Lanes, SegmentCache
from layerswap.engine.trie import build_trie


class Caches:
    """The tokens of every lane, per depth and segment, as the real caches would hold them."""

    def __init__(self, lanes):
        self.texts = [[[None] * count for count in level.counts] for level in lanes.levels]
        for depth, level in enumerate(lanes.levels):
            for row in range(len(lanes)):
                self.texts[depth][level.segment[row]][level.lane[row]] = []

    def change(self, change):
        texts = self.texts[change.depth][change.segment]
        copies = [list(texts[lane]) for lane in change.lanes]
        if change.append_at is None:
            self.texts[change.depth][change.segment] = copies
        else:
            assert change.append_at == len(texts)
            texts += copies

    def write(self, lanes, tokens):
        for depth, level in enumerate(lanes.levels):
            written = {(s, n): t for s, n, t in zip(level.segment, level.lane, tokens, strict=True)}
            for (segment, lane), token in written.items():
                self.texts[depth][segment][lane].append(int(token))


@pytest.mark.parametrize("seed", range(25))
def test_rows_share_lanes_until_they_write_different_tokens(seed):
    rng = np.random.default_rng(seed)
    count, depth = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    paths = rng.integers(0, 2, (count, depth + 2)).tolist()
    lanes = Lanes(build_trie(paths), prompts=int(rng.integers(1, 4)))
    caches = Caches(lanes)
    texts = {row: [] for row in zip(lanes.member, lanes.prompt, strict=True)}
    for _ in range(12):
        if not len(lanes):
            break
        # Rows of one lane are computed once, so they write the same.
        leaves = lanes.levels[-1].position
        tokens = rng.choice([3, 3, 3, 4, 5], leaves.max() + 1)[leaves]
        running = rng.random(leaves.max() + 1)[leaves] > 0.08
        tokens = tokens[running]
        changes = lanes.keep(running)
        changes += lanes.split(tokens) if len(lanes) else []
        for change in changes:
            caches.change(change)
        caches.write(lanes, tokens)
        for *row, token in zip(lanes.member, lanes.prompt, tokens, strict=True):
            texts[tuple(row)].append(int(token))
        check(lanes, caches, paths, texts)


def check(lanes, caches, paths, texts):
    rows = list(zip(lanes.member.tolist(), lanes.prompt.tolist(), strict=True))
    for depth, (level, layout) in enumerate(zip(lanes.levels, lanes.layout(), strict=True)):
        position_of = {}  # by all that decides what a row computes at this depth
        for row, (member, prompt) in enumerate(rows):
            position, text = level.position[row], texts[member, prompt]
            state = tuple(paths[member][: depth + 1]), prompt, tuple(text)
            assert position_of.setdefault(state, position) == position
            assert caches.texts[depth][level.segment[row]][level.lane[row]] == text
            assert level.variants[level.segment[row]] == paths[member][depth]
            assert layout.first[position] == lanes.levels[0].position[row]
            if depth:
                assert layout.parent[position] == lanes.levels[depth - 1].position[row]
            (segment,) = [s for s in layout.segments if s.start <= position < s.stop]
            assert segment.variant == paths[member][depth]
        assert len(set(position_of.values())) == len(position_of)
        assert len(layout.row) == sum(level.counts) >= len(position_of)
        if rows:
            most = len(position_of) / 0.75 + len(level.variants)
            assert sum(level.counts) <= max(most, 1)


def test_caches_grow_copy_and_close_up():
    rng = np.random.default_rng(0)
    cache = SegmentCache(2, 5)
    prompt = torch.from_numpy(rng.random((2, 3, 4, 2)))
    cache.write_prompt(0, (prompt, prompt + 1))
    truth = prompt
    for position in range(4, 90):
        if position == 20:
            cache.append(2, torch.tensor([1, 0, 1]))
            truth = truth[[0, 1, 1, 0, 1]]
        if position == 40:
            cache.keep(torch.tensor([4, 2]))
            truth = truth[[4, 2]]
        token = torch.from_numpy(rng.random((len(truth), 3, 1, 2)))
        keys, values = cache.write_token(position, (token, token + 1))
        truth = torch.cat([truth, token], dim=2)
        assert torch.equal(keys, truth)
        assert torch.equal(values, truth + 1)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.1, -1.0, 2.0, -torch.inf, 0.7]])
    count = 20_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw_tokens(logits.expand(count, -1), draws)
    shares = torch.bincount(tokens, minlength=5) / count
    assert torch.allclose(shares, logits.softmax(-1)[0], atol=1e-4)
    extremes = draw_tokens(logits.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53]).double())
    assert extremes.tolist() == [0, 4]


def test_draws_depend_on_seed_and_prompt_alone():
    sampling = Sampling(seed=7)
    some = sampling.draws([4, 0], 6)
    assert np.array_equal(sampling.draws([0, 1, 2, 3, 4], 9)[[4, 0], :6], some)
    assert not np.array_equal(Sampling(seed=8).draws([4, 0], 6), some)
    assert 0.45 < Sampling().draws(range(200), 50).mean() < 0.55
