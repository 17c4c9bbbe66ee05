"""Options that several commands share: single ones, and groups that build one checked object."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layerswap.cli import commands
from layerswap.ground.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.evaluation.settings import EvaluationSettings

EXPERTS = "Experts"
_expert, composed, _written, _prompts, _models = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (EXPERTS, "Composition", "Output", "Documents and prompts", "Models")
)
CHECKPOINT = "a folder or a Hub id (owner/name@revision)."

_BASE = _expert(metavar="MODEL", help="Checkpoint that the experts were fine-tuned from.")
_TASK_EXPERT = _expert(
    "--task-expert", "--task", metavar="MODEL", help=f"Task expert: {CHECKPOINT}"
)
_LANGUAGE_EXPERT = _expert(
    "--language-expert", "--language", metavar="MODEL", help=f"Language expert: {CHECKPOINT}"
)
Base = Annotated[str, _BASE]
AnyBase = Annotated[str | None, _BASE]
TaskExpert = Annotated[str, _TASK_EXPERT]
LanguageExpert = Annotated[str, _LANGUAGE_EXPERT]

OutFolder = Annotated[Path, typer.Option(help="Folder to create.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Overwrite an output that layerswap wrote.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, show_default="the usable processors", help="Number of threads.")
]
Axis = Annotated[
    Literal["input", "output"], typer.Option(help="Features that count as rows (papers: input).")
]
Layout = Annotated[
    Literal["auto", "plain"],
    typer.Option(
        rich_help_panel="Output",
        help="Layout of the files: auto shares blocks with the experts where the filesystem can.",
    ),
]
DTYPES = "float32|bfloat16|float16"
Rank = Annotated[
    int | None, _written(min=1, show_default="exact", help="Largest rank of a merged adapter.")
]

Language = Annotated[
    str | None, typer.Option(help="Language code or name (sw, swh_Latn, Swahili).")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks", "--task", metavar="NAME,...", help="lm-eval tasks or groups. Repeatable."
    ),
]
Include = Annotated[
    list[Path] | None,
    typer.Option(help="Folder with YAML files of more lm-eval tasks. Repeatable."),
]
Device = Annotated[
    str | None,
    _models(show_default="a GPU if any", help="Device of the models: cpu, cuda, mps or xpu."),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run programs that a model writes, in a sandbox.")
]


class PairOptions(commands.OptionGroup):
    """A task expert and a language expert."""

    task_expert: Annotated[str | None, _TASK_EXPERT] = None
    language_expert: Annotated[str | None, _LANGUAGE_EXPERT] = None


class Experts(PairOptions):
    """One expert or several of any kind."""

    expert: Annotated[
        list[str] | None, _expert(metavar="MODEL", help="Expert of any kind. Repeatable.")
    ] = None

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


class Zones(commands.OptionGroup):
    """Zones of a swap, and the weights of its blends."""

    bottom: Annotated[
        int | None,
        composed(
            min=0,
            metavar="N",
            help="Layers from the language expert at the input (paper: 5 of 32).",
        ),
    ] = None
    top: Annotated[
        int | None,
        composed(
            min=0,
            metavar="N",
            help="Layers from the language expert at the output (paper: 2 of 32).",
        ),
    ] = None
    bottom_transition: Annotated[
        int | None, composed(min=0, metavar="N", help="Blended layers above the bottom zone.")
    ] = None
    top_transition: Annotated[
        int | None, composed(min=0, metavar="N", help="Blended layers below the top zone.")
    ] = None
    outside: Annotated[
        str | None,
        composed(
            metavar="blend|language|task",
            show_default="blend, or the partition's",
            help="Source of embeddings, final norm and head.",
        ),
    ] = None
    weights: Annotated[
        str | None,
        composed(
            metavar="uniform|magnitude|W_TASK,W_LANG",
            show_default="uniform",
            help="Weights of both experts in a blend. Magnitude weights need --base.",
        ),
    ] = None


class WeightFormat(commands.OptionGroup):
    """Settings of the weights that a command writes."""

    dtype: Annotated[
        str | None, _written(metavar=DTYPES, show_default="as stored", help="Dtype of the output.")
    ] = None
    max_shard_size: Annotated[
        str | None,
        _written(
            metavar="SIZE", show_default="5GB", help="Largest size of one file, such as 500MB."
        ),
    ] = None


class OutputFormat(WeightFormat):
    """Settings of the merged checkpoint, which may be combined with a recipe file."""

    tokenizer: Annotated[
        str | None,
        _written(
            metavar="task|language|union",
            help="Tokenizer of the output where the experts' differ. Rows are aligned by token.",
        ),
    ] = None
    bake: Annotated[
        bool | None, _written("--bake", help="Write full weights from adapters too.")
    ] = None
    base_as: Annotated[
        str | None,
        _written(
            metavar="nf4|nf4-double",
            show_default="as stored",
            help="Round the base of QLoRA adapters to 4 bits, as in training.",
        ),
    ] = None
    rank: Rank = None
    blend_type: Annotated[
        str | None,
        _written(
            metavar="Q8_0|F16|...",
            show_default="the wider of the experts'",
            help="Type of the blended matrices of a GGUF output.",
        ),
    ] = None
    languages: Annotated[
        str | None,
        _written(metavar="CODE,...", help="Languages on the model card, such as sw or sw,en."),
    ] = None


class Prompts(commands.OptionGroup):
    """Evaluation settings that do not depend on the engine."""

    limit: Annotated[
        int | None,
        _prompts(min=1, help="Number of documents per task, drawn in proportion to their labels."),
    ] = None
    limit_first: Annotated[
        int | None, _prompts(min=1, help="Number of documents per task, the first ones.")
    ] = None
    num_fewshot: Annotated[
        int | None,
        _prompts(
            "--num-fewshot",
            "--shots",
            min=0,
            show_default="the task's",
            help="Examples per prompt.",
        ),
    ] = None
    apply_chat_template: Annotated[
        bool,
        _prompts("--apply-chat-template", help="Write prompts with the tokenizer's chat template."),
    ] = False
    think: Annotated[
        str | None,
        _prompts(
            metavar="on|off|cut",
            show_default="the template's",
            help="Let the template think. With cut, only the text after the thought is scored.",
        ),
    ] = None
    system_instruction: Annotated[
        str | None, _prompts(help="System message of the chat, or text before a plain prompt.")
    ] = None
    fewshot_as_multiturn: Annotated[
        bool | None,
        _prompts(
            "--fewshot-as-multiturn/--fewshot-as-one-turn",
            show_default="multiturn with --apply-chat-template",
            help="Write examples as turns of the chat.",
        ),
    ] = None
    gen_kwargs: Annotated[
        str | None,
        _prompts(
            metavar="NAME=VALUE,...",
            help="Generation settings that override the tasks', such as max_gen_toks=64.",
        ),
    ] = None
    device: Device = None
    dtype: Annotated[
        str | None, _models(metavar=DTYPES, show_default="as stored", help="Dtype of the models.")
    ] = None

    def settings(self) -> EvaluationSettings:
        """The checked settings."""
        from layerswap.evaluation.settings import EvaluationSettings
        from layerswap.ground.yaml_file import validate

        return validate(EvaluationSettings, self.given(), where="command line", expected="options")


class Evaluation(Prompts):
    """All settings of an evaluation."""

    allow_code: AllowCode = False
    batch_size: Annotated[
        int | None, _models(min=1, show_default="the largest that fits", help="Batch size.")
    ] = None
    engine: Annotated[
        Literal["sweep", "hf", "vllm"],
        _models(help="Engine: layerswap's own, transformers one by one, or vLLM."),
    ] = "sweep"
    engine_args: Annotated[
        str | None,
        _models(
            metavar="NAME=VALUE,...", help="Arguments of vLLM, such as gpu_memory_utilization=0.8."
        ),
    ] = None


class Address(commands.OptionGroup):
    """The address of a page that is served."""

    host: Annotated[
        str, typer.Option(help="Address to serve on. A network address needs a token.")
    ] = "127.0.0.1"
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, show_default="8765, or a free one", help="Port.")
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LAYERSWAP_TOKEN", show_default="a new one if one is needed", help="Token."
        ),
    ] = None


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


def named_folders(option: str, texts: list[str]) -> dict[str, str]:
    """Folders or Hub ids by name: `NAME=FOLDER`, or the folder's own name."""
    folders: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        name, source = (name, source) if equals else (text.rstrip("/").rpartition("/")[2], text)
        if not name or not source or name.startswith(".") or "/" in name:
            raise RecipeError(f"{option}: {text!r} is not FOLDER or NAME=FOLDER")
        if name in folders:
            raise RecipeError(f"{option}: two are called {name!r}; write NAME=FOLDER")
        folders[name] = source
    return folders
