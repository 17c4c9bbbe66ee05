"""Options that several commands share: single ones, and groups that build one checked object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from layerswap.cli.commands import OptionGroup
from layerswap.evaluation.asked import AskedFields
from layerswap.ground.errors import RecipeError
from layerswap.reading.files import names_in

if TYPE_CHECKING:
    from layerswap.evaluation.settings import EvaluationSettings

EXPERTS, OUTPUT, MODELS = "Experts", "Output", "Models"
"""Panels of the help."""

_BASE = Option(
    metavar="MODEL", help="Checkpoint that the experts were fine-tuned from.",
    rich_help_panel=EXPERTS,
)  # fmt: skip
_TASK_EXPERT, _LANGUAGE_EXPERT = (
    Option(
        f"--{kind}-expert", f"--{kind}", metavar="MODEL", rich_help_panel=EXPERTS,
        help=f"{kind.capitalize()} expert: a folder or a Hub id (owner/name@revision).",
    )
    for kind in ("task", "language")
)  # fmt: skip
Base = Annotated[str, _BASE]
AnyBase = Annotated[str | None, _BASE]
TaskExpert = Annotated[str, _TASK_EXPERT]
LanguageExpert = Annotated[str, _LANGUAGE_EXPERT]

OutFolder = Annotated[Path, Option(help="Folder to create.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Overwrite an output that layerswap wrote.")]
Threads = Annotated[
    int | None,
    Option(min=1, show_default="one for each usable processor", help="Number of threads."),
]
Axis = Annotated[
    Literal["input", "output"],
    Option(help="Features that count as rows: input, as in the papers, or output."),
]
Layout = Annotated[Literal["auto", "plain"], Option(
    help="Layout of the files. With auto, they share the experts' blocks if the filesystem can.",
    rich_help_panel=OUTPUT,
)]  # fmt: skip
Device = Annotated[str | None, Option(
    show_default="a GPU if there is one", help="Device of the models: cpu, cuda, mps or xpu.",
    rich_help_panel=MODELS,
)]  # fmt: skip
AllowCode = Annotated[bool, Option(
    "--allow-code", help="Run programs that a model writes, in a sandbox.",
    rich_help_panel="Options",
)]  # fmt: skip


class PairOptions(OptionGroup):
    """A task expert and a language expert."""

    task_expert: Annotated[str | None, _TASK_EXPERT] = None
    language_expert: Annotated[str | None, _LANGUAGE_EXPERT] = None


class Experts(PairOptions, panel=EXPERTS):
    """One expert or several of any kind.

    Options:
        expert MODEL: Expert of any kind. Repeatable.
    """

    expert: list[str] | None = None

    def named(self) -> list[str | dict[str, str]]:
        """The experts for `open_subjects`; the pair's names are `task` and `language`."""
        pair = {"task": self.task_expert, "language": self.language_expert}
        return [
            *({name: expert} for name, expert in pair.items() if expert is not None),
            *(self.expert or ()),
        ]

    def only(self) -> str:
        """The expert of a command that takes one."""
        pair = [expert for expert in (self.task_expert, self.language_expert) if expert is not None]
        every: list[str] = [*pair, *(self.expert or ())]
        if len(every) != 1:
            raise RecipeError(f"give one expert with --expert; {len(every)} are given")
        return every[0]


class Zones(OptionGroup, panel="Composition"):
    """Zones of a swap, and the weights of its blends.

    Options:
        bottom N: Layers from the language expert at the input (paper: 5 of 32).
        top N: Layers from the language expert at the output (paper: 2 of 32).
        bottom_transition N: Blended layers above the bottom zone.
        top_transition N: Blended layers below the top zone.
        outside blend|language|task: Source of embeddings, final norm and head. (default: blend, or
            the partition's)
        weights uniform|magnitude|W_TASK,W_LANG: Weights of both experts in a blend. Magnitude
            weights need --base. (default: uniform)
    """

    bottom: Annotated[int | None, Option(min=0)] = None
    top: Annotated[int | None, Option(min=0)] = None
    bottom_transition: Annotated[int | None, Option(min=0)] = None
    top_transition: Annotated[int | None, Option(min=0)] = None
    outside: str | None = None
    weights: str | None = None


class WeightFormat(OptionGroup, panel=OUTPUT):
    """Settings of the weights that a command writes.

    Options:
        dtype float32|bfloat16|float16: Dtype of the output. (default: as stored)
        max_shard_size SIZE: Largest size of one file, such as 500MB. (default: 5GB)
    """

    dtype: str | None = None
    max_shard_size: str | None = None


class OutputFormat(WeightFormat, panel=OUTPUT):
    """Settings of the merged checkpoint, which may be combined with a recipe file.

    Options:
        tokenizer task|language|union: Tokenizer of the output where the experts' differ. Rows are
            aligned by token.
        bake: Write full weights from adapters too.
        base_as nf4|nf4-double: Round the base of QLoRA adapters to 4 bits, as in training.
            (default: as stored)
        rank: Largest rank of a merged adapter. (default: the exact rank)
        blend_type Q8_0|F16|...: Type of the blended matrices of a GGUF output. (default: the wider
            of the experts')
        languages CODE,...: Languages on the model card, such as sw or sw,en.
    """

    tokenizer: str | None = None
    bake: bool | None = None
    base_as: str | None = None
    rank: Annotated[int | None, Option(min=1)] = None
    blend_type: str | None = None
    languages: str | None = None


class EvaluationOptions(AskedFields, OptionGroup, panel="Documents and prompts"):
    """All settings of an evaluation.

    Options:
        dtype float32|bfloat16|float16: Dtype of the models. (default: as stored)
    """

    device: Device = None
    dtype: Annotated[str | None, Option(rich_help_panel=MODELS)] = None

    def settings(self) -> EvaluationSettings:
        """The checked settings."""
        from layerswap.evaluation.settings import EvaluationSettings
        from layerswap.ground.yaml_file import validate

        given = {**self.given(), "tasks": task_names(self.tasks)}
        return validate(EvaluationSettings, given, where="command line", expected="options")


def read_pairs(option: str, texts: list[str] | None, form: str) -> dict[str, str]:
    """Values of a repeatable option of a form such as `CODE=FILE`, by name."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, content = text.partition("=")
        if not name or not equals:
            raise RecipeError(f"{option}: {text!r} is not {form}")
        if name in pairs:
            raise RecipeError(f"{option}: {name!r} is given twice")
        pairs[name] = content
    return pairs


def task_names(given: list[str] | None) -> list[str]:
    """Names of tasks, from values that may each hold several with commas between."""
    return [name for value in given or () for name in names_in(value)]
