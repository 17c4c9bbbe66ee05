"""The papers' open questions on the lab: one thing is changed, and all compositions are scored.

    python -m research ask divergence --out questions

A question is a few settings of the lab. Of each, experts are trained from the shipped base (or from
one that is trained for the setting), and every composition of a grid answers the same problems. The
steps are those of a study: what is done is not done again, also between questions in one folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from layerswap.checkpoint import fingerprint
from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import shipped
from layerswap.study.runner import Context
from layerswap.study.steps import Graph, Step
from research.lab.datasets import BaseMix
from research.lab.tasks import ProblemKind
from research.lab.train import ModelShape, Training, Trainings
from research.lab.world import VERB_LAST, LanguageSettings, WorldSettings

FIRST_SEED = 5000
"""Seed of the experts, far from those of the shipped ones and of the study."""


@dataclass(frozen=True)
class Setting:
    """A variant of the lab.

    Attributes:
        name: for tables.
        trainings: of base and experts.
        world: of the languages.
        rounds: number of trainings and merges, each from the merge before.
        asked: the number that the problems ask for.
        base: name of its base, which settings may share; the shipped one when None.
    """

    name: str
    trainings: Trainings = field(default_factory=Trainings)
    world: WorldSettings = field(default_factory=WorldSettings)
    rounds: int = 1
    asked: ProblemKind = "left"
    base: str | None = None

    def settings(self) -> dict[str, Any]:
        """Everything that the measurements depend on."""
        return _plain({"trainings": asdict(self.trainings), "world": asdict(self.world)})

    def base_settings(self) -> dict[str, Any]:
        """Everything that its base depends on."""
        usual = Trainings()
        here = replace(self.trainings, task=usual.task, language=usual.language,
                       language_mix=usual.language_mix)  # fmt: skip
        return _plain({"trainings": asdict(here), "world": asdict(self.world)})


@dataclass(frozen=True)
class Question:
    """An open question.

    Attributes:
        title: as a sentence.
        settings: to compare; the first is the lab as it ships.
    """

    title: str
    settings: tuple[Setting, ...]


def questions() -> dict[str, Question]:
    """The questions by name."""
    usual, plain = Trainings(), Setting("as shipped")
    mix, full = usual.base_mix, Setting("full SFT", _parts(usual, None))
    return {
        "shipped": Question("The lab as it ships", (plain,)),
        "divergence": Question(
            "Experts that diverge more: when do transition zones start to matter?",
            (plain, *(_faster(scale) for scale in (0.5, 2, 4))),
        ),
        "full": Question(
            "Experts trained in full instead of in their own part: does the swap still win?",
            (plain, full),
        ),
        "knowledge": Question(
            "How much of a language must the base know?",
            (plain, *(_base_mix(mix, scale) for scale in (0.3, 2))),
        ),
        "distance": Question(
            "How far may the language be from the source?",
            (plain, _distant("a twentieth of the words shared", 0.05),
             _distant("a fifth shared, verb last", 0.2, verb_last=True)),
        ),
        "depth": Question(
            "Fewer layers, trained in part and in full",
            (plain, full, *_shaped("4 layers", layers=4)),
        ),
        "width": Question(
            "Narrower layers, trained in part and in full",
            (plain, full, *_shaped("hidden size 64", hidden=64, heads=4, mlp=168)),
        ),
        "rounds": Question(
            "Train and merge again, from the merge: does a second round help?",
            (plain, replace(plain, name="a second round", rounds=2)),
        ),
        "tasks": Question(
            "Another task than the number that is left",
            (plain, replace(plain, name="the number at the start", asked="start")),
        ),
    }  # fmt: skip


def find(names: Sequence[str]) -> dict[str, Question]:
    """Some questions by name.

    Raises:
        RecipeError: there is no such question.
    """
    known = questions()
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise RecipeError(f"no question {unknown!r} of the lab; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def plan(asked: Mapping[str, Question], *, seeds: int, n: int) -> Graph:
    """The steps of some questions, without repetition of shared settings.

    Args:
        asked: the questions by name.
        seeds: pairs of experts of each setting.
        n: development problems of a language, and as many test problems.
    """
    steps: dict[str, Step] = {}
    for name, question in asked.items():
        needs = []
        for setting in question.settings:
            for step in _steps(setting, seeds, n):
                steps[step.name] = step
                if step.kind == "pair":
                    needs.append(step.name)
        settings = {"question": question.title, "pairs": needs}
        steps[f"answer/{name}"] = Step(f"answer/{name}", "answer", settings, tuple(needs))
    return Graph(list(steps.values()))


def trainings_of(context: Context) -> tuple[Trainings, WorldSettings]:
    """The trainings and world in the settings of a step."""
    plain = context.step.settings["trainings"]
    from research.lab.datasets import LanguageMix
    from research.lab.world import settings_of

    kinds = ("base", "task", "language", "joint")
    trainings = Trainings(
        shape=ModelShape(**plain["shape"]),
        base_mix=BaseMix(**plain["base_mix"]),
        language_mix=LanguageMix(**plain["language_mix"]),
        **{kind: Training(**plain[kind]) for kind in kinds},
    )
    return trainings, settings_of({"settings": context.step.settings["world"]})


def _steps(setting: Setting, seeds: int, n: int) -> Iterator[Step]:
    shared = setting.settings()
    needs: tuple[str, ...] = ()
    inputs: dict[str, str] = {}
    if setting.base is None:
        inputs = {"base": fingerprint(shipped().base / "model.safetensors")}
    else:
        needs = (f"base/{setting.base}",)
        yield Step(needs[0], "base", setting.base_settings())
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        more = {
            "seed": seed,
            "n": n,
            "rounds": setting.rounds,
            "asked": setting.asked,
        }
        yield Step(f"pair/{setting.name}/{seed}", "pair", {**shared, **more}, needs, inputs)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with lists in place of tuples, as keys are made from."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _faster(scale: float) -> Setting:
    usual = Trainings()
    rates = {
        kind: replace(one, learning_rate=one.learning_rate * scale)
        for kind, one in (("task", usual.task), ("language", usual.language))
    }
    return Setting(
        f"learning rates x {scale:g}",
        replace(usual, task=rates["task"], language=rates["language"]),
    )


def _parts(usual: Trainings, part: None) -> Trainings:
    return replace(
        usual, task=replace(usual.task, part=part), language=replace(usual.language, part=part)
    )


def _base_mix(mix: BaseMix, scale: float) -> Setting:
    changed = replace(mix, scarce=mix.scarce * scale, scarce_problems=mix.scarce_problems * scale)
    trainings = replace(Trainings(), base_mix=changed)
    name = f"the base sees x {scale:g} of it"
    return Setting(name, trainings, base=name)


def _distant(name: str, shared: float, *, verb_last: bool = False) -> Setting:
    usual = WorldSettings()
    languages = tuple(
        _moved(entry, shared, verb_last) if entry.name == "furo" else entry
        for entry in usual.languages
    )
    name = f"furo: {name}"
    return Setting(name, world=replace(usual, languages=languages), base=name)


def _moved(entry: LanguageSettings, shared: float, verb_last: bool) -> LanguageSettings:
    return replace(entry, shared=shared, order=VERB_LAST if verb_last else entry.order)


def _shaped(name: str, **changes: int) -> tuple[Setting, Setting]:
    """Another model shape, with experts trained in their own part and in full."""
    usual = Trainings()
    own = replace(usual, shape=replace(usual.shape, **changes))
    in_full = _parts(own, None)
    return Setting(name, own, base=name), Setting(f"{name}, full SFT", in_full, base=name)
