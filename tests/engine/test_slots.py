"""Lanes: rows share one exactly as long as nothing tells them apart, and keep their caches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerswap.engine.generation import Sampling, draw_tokens
from layerswap.engine.slots import GroupCache, Slots
from layerswap.engine.trie import build_trie


class Caches:
    """What the caches of a run would hold: per level and group, the history of every slot."""

    def __init__(self, lanes):
        self.held = [[[None] * n for n in level.counts] for level in lanes.levels]
        for number, level in enumerate(lanes.levels):
            for row in range(len(lanes)):
                self.held[number][level.group[row]][level.slot[row]] = []

    def copy(self, change):
        slots = self.held[change.level][change.group]
        slots += [list(slots[s]) for s in change.slots]

    def close(self, change):
        slots = self.held[change.level][change.group]
        self.held[change.level][change.group] = [slots[s] for s in change.slots]

    def write(self, lanes, tokens):
        for number, level in enumerate(lanes.levels):
            done = set()
            for row in range(len(lanes)):
                place = int(level.group[row]), int(level.slot[row])
                if place not in done:
                    self.held[number][place[0]][place[1]].append(int(tokens[row]))
                    done.add(place)


@pytest.mark.parametrize("seed", range(25))
def test_rows_share_lanes_until_they_write_different_tokens(seed):
    rng = np.random.default_rng(seed)
    count, depth = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    paths = rng.integers(0, 2, (count, depth + 2)).tolist()
    roots = build_trie(paths)
    lanes = Slots(roots, prompts=int(rng.integers(1, 4)))
    caches = Caches(lanes)
    histories = {(m, p): [] for m, p in zip(lanes.member, lanes.prompt, strict=True)}
    for _ in range(12):
        if not len(lanes):
            break
        # Equal rows are computed once, so they write the same.
        leaves = lanes.levels[-1].position
        tokens = rng.choice([3, 3, 3, 4, 5], leaves.max() + 1)[leaves]
        running = rng.random(leaves.max() + 1)[leaves] > 0.08
        for change in lanes.keep(running):
            caches.close(change)
        tokens = tokens[running]
        if len(lanes):
            for change in lanes.split(tokens):
                caches.copy(change)
        caches.write(lanes, tokens)
        for m, p, token in zip(lanes.member, lanes.prompt, tokens, strict=True):
            histories[m, p].append(int(token))
        check(lanes, caches, paths, histories)


def check(lanes, caches, paths, histories):
    layouts = lanes.layout()
    rows = list(zip(lanes.member.tolist(), lanes.prompt.tolist(), strict=True))
    for number, (level, layout) in enumerate(zip(lanes.levels, layouts, strict=True)):
        known = {}
        lane = level.position
        for row, (m, p) in enumerate(rows):
            truth = tuple(paths[m][: number + 1]), p, tuple(histories[m, p])
            assert known.setdefault(truth, lane[row]) == lane[row]
            held = caches.held[number][level.group[row]][level.slot[row]]
            assert held == histories[m, p]
            assert level.keys[level.group[row]] == paths[m][number]
            # What a lane is computed from is this row's lane one level up, and at the first.
            assert layout.first[lane[row]] == lanes.levels[0].position[row]
            if number:
                assert layout.parent[lane[row]] == lanes.levels[number - 1].position[row]
            (bounds,) = [g for g in layout.groups if g[2] <= lane[row] < g[3]]
            assert bounds[1] == paths[m][number]
        assert len(set(known.values())) == len(known)
        assert len(layout.row) == sum(level.counts) >= len(known)
        if rows:
            assert sum(level.counts) <= max(len(known) / 0.75 + len(level.keys), 1)


def test_caches_grow_copy_and_close_up():
    rng = np.random.default_rng(0)
    cache = GroupCache(2, 5)
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
    assert cache.nbytes >= 2 * truth.nbytes


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.1, -1.0, 2.0, -torch.inf, 0.7]])
    count = 20_000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw_tokens(logits.expand(count, -1), draws)
    shares = torch.bincount(tokens, minlength=5) / count
    assert torch.allclose(shares, logits.softmax(-1)[0], atol=1e-4)
    extremes = draw_tokens(logits.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53]).double())
    assert extremes.tolist() == [0, 4]


def test_draws_depend_on_seed_and_stream_alone():
    sampling = Sampling(seed=7)
    some = sampling.draws([4, 0], 6)
    assert np.array_equal(sampling.draws([0, 1, 2, 3, 4], 9)[[4, 0], :6], some)
    assert not np.array_equal(Sampling(seed=8).draws([4, 0], 6), some)
    assert 0.45 < Sampling().draws(range(200), 50).mean() < 0.55
