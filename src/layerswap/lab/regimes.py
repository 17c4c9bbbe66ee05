"""The second paper's table 1 on the lab: every way of training, judged on the same questions.

    python -m layerswap.lab.regimes --out FOLDER [--language furo] [--seeds 3]

Trainings are those of `layerswap train`, from files, with the lab's settings. A run that is cut
short goes on from the last finished training.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.compose.recipe import check_recipe
from layerswap.evaluate.statistics import mean_interval, paired_difference
from layerswap.lab.assets import shipped
from layerswap.lab.scoring import Measure, load, score_model
from layerswap.lab.skills import Example
from layerswap.lab.streams import language_stream, task_stream
from layerswap.lab.tokenizer import MAX_LENGTH
from layerswap.lab.training import Trainings
from layerswap.lab.world import make_world
from layerswap.merge.make import make_plan
from layerswap.train.expert import train_expert
from layerswap.train.expert_file import check_expert

PARTITION = "C"
HELD_OUT = 256
LORA = {"r": 8, "alpha": 8}
LORA_RATE = 1e-3
"""A low-rank adapter needs a higher rate than the weights themselves do."""
MEASURES: tuple[Measure, ...] = ("task_target", "task_source", "comprehension_target")

Right = npt.NDArray[np.float64]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Regimes:
    """Where the trainings of one seed lie, and on which files they are.

    Attributes:
        root: of this seed.
        language: the scarce language.
        seed: of the data and its order.
    """

    root: Path
    language: str
    seed: int

    @property
    def trainings(self) -> dict[str, dict[str, Any]]:
        """What to train, by the name of its folder."""
        task, language = self._files("task"), self._files("language")
        both = {"task": task, "language": language}
        part = {"partition": PARTITION}
        found: dict[str, dict[str, Any]] = {
            "mix": {"mix": [task, language]},
            "simultaneous": {"simultaneous": both, "train": part},
        }
        for name, files in both.items():
            found[name] = {"data": files}
            found[f"{name}-partial"] = {"data": files, "train": {**part, "part": name}}
        return found | {f"{name}-lora": {**spec, "lora": LORA} for name, spec in found.items()}

    def write_files(self) -> None:
        """The training data of the two experts, as files."""
        world, trainings = make_world(), Trainings()
        streams = {
            "task": (task_stream(world, seed=self.seed), trainings.task),
            "language": (
                language_stream(world, self.language, trainings.language_mix, seed=self.seed),
                trainings.language,
            ),
        }
        self.root.mkdir(parents=True, exist_ok=True)
        for name, (stream, training) in streams.items():
            files = self._files(name)
            _write(Path(files["train"]), stream, training.steps * training.batch)
            _write(Path(files["validation"]), stream, HELD_OUT)

    def train(self, say: Say) -> None:
        """Whatever is not trained yet."""
        settings = Trainings().task
        for name, spec in self.trainings.items():
            rate = LORA_RATE if "lora" in spec else settings.learning_rate
            checked = check_expert({
                "base": str(shipped().base),
                "seed": self.seed,
                "save_every": 10**9,
                "hyperparameters": {
                    "learning_rate": rate,
                    "per_device_train_batch_size": settings.batch,
                    "warmup_steps": settings.warmup,
                    "adam_beta2": settings.beta2,
                    "max_length": MAX_LENGTH,
                    "lr_scheduler_type": "linear",
                    "logging_steps": 50,
                },
                **spec,
            })  # fmt: skip
            out = self.root / name
            say(f"seed {self.seed}: {name}")
            train_expert(checked, out, resume=out.is_dir())

    def treatments(self) -> Iterator[tuple[str, Any]]:
        """Every model of the table: its name, and the model."""
        yield "base", load(shipped().base)[0]
        for name in self.trainings:
            yield name, self._load({"soup": {"experts": ["expert"]}}, expert=name)
        for kind in ("", "-partial", "-lora", "-partial-lora"):
            places = {"partition": {"name": PARTITION}}
            experts = {"task": f"task{kind}", "language": f"language{kind}"}
            yield f"swap{kind}", self._load(places, **experts)

    def _load(self, method: Mapping[str, Any], **experts: str) -> Any:
        recipe = {
            "base": str(shipped().base),
            "experts": {name: str(self.root / folder) for name, folder in experts.items()},
            "bake": True,
            "dtype": "float32",
            **method,
        }
        return make_plan(check_recipe(recipe, where="regimes")).load()

    def _files(self, name: str) -> dict[str, str]:
        return {part: str(self.root / f"{name}-{part}.jsonl") for part in ("train", "validation")}


def study(
    out: Path, *, language: str, seeds: int, n: int, say: Say = lambda line: None
) -> dict[str, dict[str, Right]]:
    """Train and judge everything.

    Args:
        out: where trainings are kept.
        language: the scarce language.
        seeds: how often everything is trained, with other data in another order.
        n: questions of a measure.
        say: told what is being done.

    Returns:
        By treatment and measure, the share of the seeds whose model was right on each question,
        float64 `(n,)`.
    """
    _, tokenizer = load(shipped().base)
    found: dict[str, dict[str, list[Right]]] = {}
    for seed in range(1, seeds + 1):
        regimes = Regimes(out / f"{language}-{seed}", language, seed)
        regimes.write_files()
        regimes.train(say)
        for name, model in regimes.treatments():
            right = score_model(model, tokenizer, language, "test", n, measures=MEASURES)
            for measure, values in right.items():
                found.setdefault(name, {}).setdefault(measure, []).append(values.astype(float))
    return {
        name: {measure: np.mean(runs, axis=0) for measure, runs in measures.items()}
        for name, measures in found.items()
    }


def table(found: Mapping[str, Mapping[str, Right]]) -> str:
    """The results as Markdown, with the difference of each to the swap of fully trained experts."""
    lines = [
        f"| trained | {' | '.join(m.replace('_', ', ') for m in MEASURES)} | to the swap |",
        "|---|---:|---:|---:|---:|",
    ]
    reference = found["swap"]["task_target"]
    for name, measures in found.items():
        scores = " | ".join(str(mean_interval(measures[m])) for m in MEASURES)
        apart = paired_difference(measures["task_target"], reference)
        lines.append(
            f"| {name} | {scores} | {apart.mean:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}] |"
        )
    return "\n".join(lines)


def _write(path: Path, stream: Iterator[Example], n: int) -> None:
    if path.exists():
        for _ in islice(stream, n):
            pass
        return
    lines = (
        json.dumps({"prompt": e.prompt, "completion": e.completion}) for e in islice(stream, n)
    )
    draft = path.with_suffix(".draft")
    draft.write_text("\n".join(lines) + "\n", "utf-8")
    draft.replace(path)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--language", default="furo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--n", type=int, default=1000)
    options = parser.parse_args()
    found = study(
        options.out, language=options.language, seeds=options.seeds, n=options.n,
        say=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    )  # fmt: skip
    print(table(found))  # noqa: T201


if __name__ == "__main__":
    main()
