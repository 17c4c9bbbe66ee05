"""Options that several commands share: single ones, and groups that build one checked object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from layerswap.cli.commands import OptionGroup
from layerswap.ground.errors import RecipeError

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

_OVERWRITE = Option("--overwrite", help="Overwrite an output that layerswap wrote.")
_THREADS = Option(min=1, show_default="the usable processors", help="Number of threads.")
_AXIS = Option(help="Features that count as rows: input, as in the papers, or output.")
_LAYOUT = Option(
    help="Layout of the files. With auto, they share the experts' blocks if the filesystem can.",
    rich_help_panel=OUTPUT,
)
_RANK = Option(
    min=1,
    show_default="the exact rank",
    help="Largest rank of a merged adapter.",
    rich_help_panel=OUTPUT,
)
OutFolder = Annotated[Path, Option(help="Folder to create.")]
Overwrite = Annotated[bool, _OVERWRITE]
Threads = Annotated[int | None, _THREADS]
Axis = Annotated[Literal["input", "output"], _AXIS]
Layout = Annotated[Literal["auto", "plain"], _LAYOUT]
Rank = Annotated[int | None, _RANK]

_TASKS = Option(
    "--tasks", "--task", metavar="NAME,...", help="lm-eval tasks or groups. Repeatable."
)
_INCLUDE = Option(help="Folder with YAML files of more lm-eval tasks. Repeatable.")
_DEVICE = Option(
    show_default="a GPU if there is one", help="Device of the models: cpu, cuda, mps or xpu.",
    rich_help_panel=MODELS,
)  # fmt: skip
_ALLOW_CODE = Option(
    "--allow-code", help="Run programs that a model writes, in a sandbox.",
    rich_help_panel="Options",
)  # fmt: skip
Tasks = Annotated[list[str] | None, _TASKS]
Include = Annotated[list[Path] | None, _INCLUDE]
Device = Annotated[str | None, _DEVICE]
AllowCode = Annotated[bool, _ALLOW_CODE]


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
        blend_type Q8_0|F16|...: Type of the blended matrices of a GGUF output. (default: the wider
            of the experts')
        languages CODE,...: Languages on the model card, such as sw or sw,en.
    """

    tokenizer: str | None = None
    bake: bool | None = None
    base_as: str | None = None
    rank: Rank = None
    blend_type: str | None = None
    languages: str | None = None


class Prompts(OptionGroup, panel="Documents and prompts"):
    """Evaluation settings that do not depend on the engine.

    Options:
        limit: Number of documents per task, drawn in proportion to their labels.
        num_fewshot: Examples per prompt. (default: the task's)
        apply_chat_template: Write prompts with the tokenizer's chat template.
        think on|off|cut: Let the template think. With cut, only the text after the thought is
            scored. (default: the template's)
        system_instruction: System message of the chat, or text before a plain prompt.
        fewshot_as_multiturn: Write examples as turns of the chat. (default: multiturn with
            --apply-chat-template)
        gen_kwargs NAME=VALUE,...: Generation settings that override the tasks', such as
            max_gen_toks=64.
        dtype float32|bfloat16|float16: Dtype of the models. (default: as stored)
    """

    limit: Annotated[int | None, Option(min=1)] = None
    num_fewshot: Annotated[int | None, Option("--num-fewshot", "--shots", min=0)] = None
    apply_chat_template: bool = False
    think: str | None = None
    system_instruction: str | None = None
    fewshot_as_multiturn: Annotated[
        bool | None, Option("--fewshot-as-multiturn/--fewshot-as-one-turn")
    ] = None
    gen_kwargs: str | None = None
    device: Device = None
    dtype: Annotated[str | None, Option(rich_help_panel=MODELS)] = None

    def settings(self) -> EvaluationSettings:
        """The checked settings."""
        from layerswap.evaluation.settings import EvaluationSettings
        from layerswap.ground.yaml_file import validate

        return validate(EvaluationSettings, self.given(), where="command line", expected="options")


class EvaluationOptions(Prompts, panel=MODELS):
    """All settings of an evaluation.

    Options:
        batch_size: Batch size. (default: the largest that fits)
        engine: Engine: layerswap's own, or transformers or vLLM one by one.
        engine_args NAME=VALUE,...: Arguments of vLLM, such as gpu_memory_utilization=0.8.
    """

    batch_size: Annotated[int | None, Option(min=1)] = None
    engine: Literal["sweep", "hf", "vllm"] = "sweep"
    engine_args: str | None = None


def refuse_checkpoint(option: str, values: list[str] | str | None, *, takes: str) -> None:
    """Refuse a checkpoint given as a benchmark or a language."""
    for value in [values] if isinstance(values, str) else values or ():
        if "/" in value or (Path(value) / "config.json").is_file():
            raise RecipeError(
                f"{option}: {value!r} is a checkpoint, not {takes}. Checkpoints go to "
                "--task-expert and --language-expert of merge, plan and delta"
            )


def read_pairs(option: str, texts: list[str] | None, value: str = "PATH") -> dict[str, str]:
    """Values of a repeatable option `NAME=VALUE`, by name."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, content = text.partition("=")
        if not name or not equals:
            raise RecipeError(f"{option}: {text!r} is not NAME={value}")
        if name in pairs:
            raise RecipeError(f"{option}: {name!r} is given twice")
        pairs[name] = content
    return pairs


def task_names(given: list[str] | None) -> list[str]:
    """Names of tasks, from values that may each hold several with commas between."""
    return [name.strip() for value in given or () for name in value.split(",") if name.strip()]
