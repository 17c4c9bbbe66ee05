"""Trains a pair of experts for every scarce language of the lab, and scores compositions of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.loading import without_progress_bars
from layerswap.compose.composition import Composition
from layerswap.compose.presets import Outside, Zones, default_zones, partition_zones, zone_grid
from layerswap.compose.presets import soup as everywhere
from layerswap.compose.presets import swap as layers_of
from layerswap.compose.recipe import check_recipe
from layerswap.experiment.conditions import DEFAULT as DEFAULT_SWAP
from layerswap.lab.assets import shipped
from layerswap.merge.api import make_plan
from layerswap.study.runner import Context
from research.lab.tasks import SPLITS, LabExample
from research.lab.train import PARTITION
from research.questions import trainings_of
from research.selection import select

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Weights = dict[str, Tensor]

BASE, RESULT = "base", "pair.json"
DENSITIES = {"TIES": 0.2, "TIES, half kept": 0.5}
"""Densities of TIES: as published, and milder."""
BASE_NAMES = ("base", "task expert", "language expert", "soup", *DENSITIES)
OTHERS: tuple[Outside, ...] = ("language", "task")
KINDS = ("task", "language")


def make_base(context: Context) -> None:
    """Train a base for a setting."""
    from research.lab.datasets import base_stream
    from research.lab.train import new_model, train
    from research.lab.world import make_tokenizer, make_world

    trainings, settings = trainings_of(context)
    world = make_world(settings)
    tokenizer = make_tokenizer(world)
    model: Any = new_model(trainings.shape, tokenizer, seed=0)
    stream = base_stream(world, trainings.base_mix, seed=0)
    train(model, tokenizer, stream, trainings.base, seed=0)
    model.save_pretrained(context.folder / BASE)
    tokenizer.save_pretrained(context.folder / BASE)


def score_pair(context: Context) -> None:
    """Train a task expert and language experts, and score the compositions of each pair."""
    settings = context.step.settings
    bases = [folder / BASE for folder in context.inputs.values()]
    bench = _Bench(bases[0] if bases else shipped().base, context)
    found = {}
    for language in (one.name for one in bench.world.scarce):
        base = bench.base
        for number in range(settings["rounds"]):
            seed = settings["seed"] + 100 * number
            pair = {kind: bench.expert(kind, language, base, seed) for kind in KINDS}
            scores = bench.score(language, base, pair, settings["n"])
            chosen, selected = choice(scores)
            if number + 1 < settings["rounds"]:
                base = dict(_composed(base, pair))[selected]
        found[language] = {
            "chosen": chosen,
            "selected": selected,
            "scores": {name: {split: right.astype(int).tolist() for split, right in one.items()}
                       for name, one in scores.items()},
        }  # fmt: skip
    (context.folder / RESULT).write_text(json.dumps(found) + "\n", "utf-8")


def choice(scores: Mapping[str, Mapping[str, npt.NDArray[np.bool_]]]) -> tuple[str, str]:
    """The grid's best composition on the development problems, and the one that is selected."""
    first = {name: right["development"] for name, right in scores.items()}
    grid = [name for name in first if name.startswith("swap ")]
    chosen = max(grid, key=lambda name: first[name].mean())
    return chosen, select(first, chosen, str(DEFAULT_SWAP))


def correct(
    model: Any, tokenizer: Any, examples: Sequence[LabExample], batch_size: int = 256
) -> npt.NDArray[np.bool_]:
    """True for every example that a model in memory answers exactly, decoding greedily."""
    import numpy as np
    import torch

    from research.lab.train import IGNORED, collate, encode

    rows = encode(tokenizer, examples)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    right = np.zeros(len(rows), dtype=bool)
    for start in range(0, len(rows), batch_size):
        taken = order[start : start + batch_size]
        batch = collate([rows[i] for i in taken], tokenizer.pad_token_id)
        gold = batch.pop("labels")[:, 1:]
        with torch.inference_mode():
            written = model(**batch, use_cache=False).logits[:, :-1].argmax(dim=-1)
        right[taken] = ((written == gold) | (gold == IGNORED)).all(dim=1).numpy()
    return right


class _Bench:
    """One model that trains and scores, with weights loaded as needed."""

    def __init__(self, base: Path, context: Context) -> None:
        from research.lab.scoring import load
        from research.lab.world import make_world

        self.trainings, settings = trainings_of(context)
        self.asked = context.step.settings["asked"]
        self.world = make_world(settings)
        model, self.tokenizer = load(base)
        self.model: Any = model
        self.base = _weights(model)
        self._tasks: dict[int, Weights] = {}

    def expert(self, kind: str, language: str, base: Weights, seed: int) -> Weights:
        """Train an expert from some weights; a task expert from the base is trained once."""
        from research.lab.datasets import language_stream, task_stream
        from research.lab.train import train

        if kind == "task" and base is self.base and seed in self._tasks:
            return self._tasks[seed]
        if kind == "task":
            stream = task_stream(self.world, seed=seed, asked=self.asked)
            training = self.trainings.task
        else:
            mix = self.trainings.language_mix
            stream = language_stream(self.world, language, mix, seed=seed)
            training = self.trainings.language
        self.model.load_state_dict(base)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        train(self.model, self.tokenizer, stream, training, seed=seed)
        found = _weights(self.model)
        if kind == "task" and base is self.base:
            self._tasks[seed] = found
        return found

    def score(
        self, language: str, base: Weights, pair: Mapping[str, Weights], n: int
    ) -> dict[str, dict[str, npt.NDArray[np.bool_]]]:
        """The right answers of every composition on `n` problems of each split."""
        from research.lab.tasks import examples

        asked = {
            split: examples(self.world, language, "problem", split, n, asked=self.asked)
            for split in SPLITS[1:]
        }
        found: dict[str, dict[str, npt.NDArray[np.bool_]]] = {}
        for name, weights in chain(_composed(base, pair), self._merged(base, pair)):
            self.model.load_state_dict(weights)
            found[name] = {
                str(split): correct(self.model, self.tokenizer, problems)
                for split, problems in asked.items()
            }
        return found

    def _merged(self, base: Weights, pair: Mapping[str, Weights]) -> Iterator[tuple[str, Weights]]:
        """The pair merged by methods that read checkpoints."""
        with TemporaryDirectory() as folder:
            stored = {"base": base, **pair}
            for name, weights in stored.items():
                self.model.load_state_dict(weights)
                with without_progress_bars():
                    self.model.save_pretrained(Path(folder, name))
                self.tokenizer.save_pretrained(Path(folder, name))
            for name, density in DENSITIES.items():
                recipe = {
                    "base": str(Path(folder, "base")),
                    "experts": {kind: str(Path(folder, kind)) for kind in KINDS},
                    "merge": {"method": "ties", "experts": list(KINDS), "density": density},
                }
                plan = make_plan(check_recipe(recipe, where=name))
                yield name, _weights(plan.load())


def _composed(base: Weights, pair: Mapping[str, Weights]) -> Iterator[tuple[str, Weights]]:
    """The models by name; those of the grid are called `swap b,u,tb,outside`."""
    from layerswap.checkpoint.places import place_tensors

    places = place_tensors(list(base))
    layers = 1 + max(p.layer for p in places.values() if p.layer is not None)
    yield "base", base
    yield "task expert", dict(pair["task"])
    yield "language expert", dict(pair["language"])

    def made(composition: Composition) -> Weights:
        return {
            name: sum(
                (share * pair[str(expert)][name] for expert, share in composition[place].weights),
                start=0 * base[name],
            )
            for name, place in places.items()
        }

    yield "soup", made(everywhere(layers, ["task", "language"]))
    yield str(DEFAULT_SWAP), made(layers_of(layers, zones=default_zones(layers)))
    half = layers // 2
    for zones in zone_grid(layers, bottom=range(half + 1), top=range(3), bottom_transition=(0, 1)):
        yield f"swap {_name(zones)},blend", made(layers_of(layers, zones=zones))
    own = partition_zones(PARTITION, layers)
    for outside in OTHERS:
        yield f"swap {_name(own)},{outside}", made(layers_of(layers, zones=own, outside=outside))


def _name(zones: Zones) -> str:
    return f"{zones.bottom},{zones.top},{zones.bottom_transition}"


def _weights(model: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
