"""Options that several commands share, and the recipe that those of a merge describe."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from layerswap.cli import output
from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.compose import Recipe
    from layerswap.evaluation.settings import EvaluationSettings

COMPOSITION, OUTPUT_PANEL = "Composition", "Output"

Base = Annotated[
    str, typer.Option(metavar="MODEL", help="Checkpoint that the experts were fine-tuned from.")
]
TaskExpert = Annotated[
    str,
    typer.Option(
        "--task-expert",
        "--task",
        metavar="MODEL",
        help="Task expert: a folder or a Hub id (owner/name@revision).",
    ),
]
LanguageExpert = Annotated[
    str,
    typer.Option(
        "--language-expert",
        "--language",
        metavar="MODEL",
        help="Language expert: a folder or a Hub id (owner/name@revision).",
    ),
]
OutFolder = Annotated[Path, typer.Option(help="Folder to create.")]
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
DEVICE_HELP = "Device of the models: cpu, cuda or mps. Default: a GPU if any."
Device = Annotated[str | None, typer.Option(help=DEVICE_HELP)]
Axis = Annotated[
    str, typer.Option(metavar="input|output", help="Features that count as rows (papers: input).")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Overwrite an output that layerswap wrote.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Number of threads. Default: the usable processors."),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pickled weights (.bin), tensors only.")
]
ALLOW_CODE_HELP = "Run programs that a model writes, in a sandbox."
AllowCode = Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the logs of libraries, and tracebacks.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16",
        help="Dtype of the output. Default: as stored, or as baked adapters are.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]  # fmt: skip
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Largest size of one file, such as 500MB. Default: 5GB.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]  # fmt: skip


def _composed(kind: Any, *names: str, **settings: Any) -> Any:
    """An optional option of the composition's panel."""
    settings.setdefault("metavar", "N" if kind is int else None)
    return Annotated[kind | None, typer.Option(*names, rich_help_panel=COMPOSITION, **settings)]


def _written(kind: Any, *names: str, **settings: Any) -> Any:
    """An optional option of the output's panel."""
    return Annotated[kind | None, typer.Option(*names, rich_help_panel=OUTPUT_PANEL, **settings)]


RECIPE: dict[str, Any] = {
    "task_expert": _composed(
        str, "--task-expert", "--task", metavar="MODEL",
        help="Task expert: a folder, a GGUF file or a Hub id (owner/name@revision).",
    ),
    "language_expert": _composed(
        str, "--language-expert", "--language", metavar="MODEL",
        help="Language expert: a folder, a GGUF file or a Hub id (owner/name@revision).",
    ),
    "base": _composed(
        str, metavar="MODEL",
        help="Checkpoint that both experts were fine-tuned from. Magnitude weights need it.",
    ),
    "preset": _composed(
        str, metavar="layer-swapping|reasoning",
        help="Default zones: the paper's, or those of a native specialist and a reasoner.",
    ),
    "bottom": _composed(
        int, min=0, help="Layers from the language expert at the input (paper: 5 of 32)."
    ),
    "top": _composed(
        int, min=0, help="Layers from the language expert at the output (paper: 2 of 32)."
    ),
    "bottom_transition": _composed(int, min=0, help="Blended layers above the bottom zone."),
    "top_transition": _composed(int, min=0, help="Blended layers below the top zone."),
    "partition": _composed(
        str, metavar="A|B|C|Z",
        help="Partition in place of zones. Default: the one that both experts were trained on.",
    ),
    "outside": _composed(
        str, metavar="blend|language|task",
        help="Source of embeddings, final norm and head. Default: blend, or the partition's.",
    ),
    "weights": _composed(
        str, metavar="uniform|magnitude|W_TASK,W_LANG",
        help="Weights of task and language expert in a blend. Default: uniform.",
    ),
    "tokenizer": _written(
        str, metavar="task|language|union",
        help="Tokenizer of the output where the experts' differ. Rows are aligned by token.",
    ),
    "bake": _written(bool, "--bake", help="Write full weights from adapters too."),
    "rank": _written(int, min=1, help="Largest rank of a merged adapter. Default: exact."),
    "dtype": Dtype,
    "max_shard_size": MaxShardSize,
    "languages": _written(
        str, metavar="CODE,...", help="Languages on the model card, such as sw or sw,en."
    ),
    "blend_type": _written(
        str, metavar="Q8_0|F16|...",
        help="Type of the blended matrices of a GGUF output. Default: the wider of the experts'.",
    ),
}  # fmt: skip
"""The options that describe a merge, in the order of the help."""
BESIDE_A_FILE = ("tokenizer", "bake", "rank", "dtype", "max_shard_size", "blend_type", "languages")
"""Those that may stand beside a recipe file, and override it."""
RecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE.yaml]", help="Recipe or mergekit configuration."),
]


PROMPT_PANEL, MODEL_PANEL = "Documents and prompts", "Models"


def _setting(panel: str, kind: Any, *names: str, default: Any = None, **settings: Any) -> Any:
    """An option of an evaluation with its default."""
    return Annotated[kind, typer.Option(*names, rich_help_panel=panel, **settings)], default


SETTINGS: dict[str, tuple[Any, Any]] = {
    "limit": _setting(
        PROMPT_PANEL, int | None, min=1, help="Number of documents per task, the first ones."
    ),
    "num_fewshot": _setting(
        PROMPT_PANEL, int | None, "--num-fewshot", "--shots", min=0,
        help="Examples per prompt. Default: those of the task.",
    ),
    "apply_chat_template": _setting(
        PROMPT_PANEL, bool, "--apply-chat-template", default=False,
        help="Write prompts with the tokenizer's chat template.",
    ),
    "system_instruction": _setting(
        PROMPT_PANEL, str | None,
        help="System message of the chat, or text before a plain prompt.",
    ),
    "fewshot_as_multiturn": _setting(
        PROMPT_PANEL, bool | None, "--fewshot-as-multiturn/--fewshot-as-one-turn",
        help="Examples as turns of the chat. Default: yes with --apply-chat-template.",
    ),
    "gen_kwargs": _setting(
        PROMPT_PANEL, str | None, metavar="NAME=VALUE,...",
        help="Generation settings that replace those of the tasks, such as max_gen_toks=64.",
    ),
    "allow_code": _setting(
        PROMPT_PANEL, bool, "--allow-code", default=False, help=ALLOW_CODE_HELP
    ),
    "batch_size": _setting(
        MODEL_PANEL, int | None, min=1, help="Batch size. Default: the largest that fits."
    ),
    "device": _setting(MODEL_PANEL, str | None, help=DEVICE_HELP),
    "dtype": _setting(
        MODEL_PANEL, str | None, metavar="float32|bfloat16|float16",
        help="Dtype of the models. Default: as stored.",
    ),
    "engine": _setting(
        MODEL_PANEL, Literal["sweep", "hf", "vllm"], default="sweep",
        help="Engine: layerswap's own, transformers one by one, or vLLM.",
    ),
    "engine_args": _setting(
        MODEL_PANEL, str | None, metavar="NAME=VALUE,...",
        help="Arguments of vLLM, such as gpu_memory_utilization=0.8.",
    ),
}  # fmt: skip
"""The options of an evaluation, in the order of the help."""


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `RECIPE`.

    It receives the checked recipe as `recipe`, and whether options described it, and not a file,
    as `follow_training`: what they leave open, the experts' training decides.
    """

    def run(recipe: Path | None, given: dict[str, Any]) -> None:
        flags = {name: given.pop(name) for name in RECIPE}
        command(recipe=build_recipe(recipe, flags), follow_training=recipe is None, **given)

    added = {"recipe": (RecipeFile, None), **{name: (kind, None) for name, kind in RECIPE.items()}}
    return extended(command, added, lambda given: run(given.pop("recipe"), given))


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with options of `SETTINGS`; it receives them as one object, `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(given: dict[str, Any]) -> None:
            values = {name: given.pop(name) for name in names}
            command(settings=_settings(values), **given)

        return extended(command, {name: SETTINGS[name] for name in names}, run, last=True)

    return decorate


def _settings(values: Mapping[str, Any]) -> EvaluationSettings:
    from layerswap.compose.yaml_file import validate
    from layerswap.evaluation.settings import EvaluationSettings

    given = {name: value for name, value in values.items() if value is not None}
    return validate(EvaluationSettings, given, where="command line", expected="options")


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with options of `RECIPE`, as parameters of the same names."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        added = {name: (RECIPE[name], None) for name in names}
        return extended(command, added, lambda given: command(**given))

    return decorate


class PlainCommand(TyperCommand):
    """A command whose help is plain text, by groups of options.

    Rich's boxes take longer to import and to draw than all the rest of the help.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, the options, and each panel of options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = getattr(param, "rich_help_panel", None) or kind
                groups.setdefault(panel, []).append(row)
        for title, rows in sorted(groups.items(), key=lambda group: group[0] != "Arguments"):
            with formatter.section(title):
                formatter.write_dl(rows)


REMOVED = {
    "learn": "learned coefficients scored below a swap. Choose among swaps and merges by "
    "`layerswap sweep`",
    "suggest": "its zones scored below the default's. Merge with the default zones, or choose by "
    "`layerswap sweep`; `layerswap delta` shows what fine-tuning changed",
    "recipe export": "layerswap reads mergekit configurations and no longer writes them. Merge the "
    "recipe by `layerswap merge`",
}
"""Commands of 0.1 that are gone: the reason, and the replacement."""


class PlainGroup(TyperGroup):
    """A group of commands whose help shows their whole summaries."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named first.

        Raises:
            RecipeError: it was removed; the message names the replacement.
        """
        name = f"{ctx.command_path} {args[0]}".partition(" ")[2]
        if name in REMOVED:
            raise RecipeError(f"`layerswap {name}` was removed in 0.2: {REMOVED[name]}")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group; where a command comes first, only those that it can share.

        Typer imports Pydantic to read the others, which takes longer than a command's help.
        """
        found = super().get_params(ctx)
        if ctx.parent is None and sys.argv[1:] and not sys.argv[1].startswith("-"):
            return [param for param in found if param.name == "version"]
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or more for every command."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(limit=400)) for name, one in found if one is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command(
    app: typer.Typer, name: str | None = None, *, json: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function as a command of `app` with the options of its output.

    Args:
        app: the group of commands.
        name: of the command; the function's when None.
        json: give it --json; it ends with `output.finish`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run(given: dict[str, Any]) -> None:
            asked = {key: given.pop(key, False) for key in ("quiet", "verbose", "as_json")}
            output.choose(**asked)
            function(**given)

        added: dict[str, tuple[Any, Any]] = {"as_json": (Json, False)} if json else {}
        added |= {"quiet": (Quiet, False), "verbose": (Verbose, False)}
        app.command(name, cls=PlainCommand)(extended(function, added, run, last=True))
        return function

    return register


def extended(
    command: Callable[..., None],
    added: Mapping[str, tuple[Any, Any]],
    run: Callable[[dict[str, Any]], None],
    *,
    last: bool = False,
) -> Callable[..., None]:
    """A command with more options, as Typer reads them from the signature.

    Args:
        command: the command; its name, help and other options stay.
        added: annotation and default by name.
        run: called with every value by name.
        last: put them after the command's own options, not between those that are required and
            the others.
    """
    names = {"Recipe": object, "EvaluationSettings": object}
    hints = get_type_hints(command, localns=names, include_extras=True)
    only = inspect.Parameter.KEYWORD_ONLY
    own = [
        p.replace(kind=only, annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name not in {*added, "follow_training", "settings"}
    ]
    more = [inspect.Parameter(name, only, default=default, annotation=kind)
            for name, (kind, default) in added.items()]  # fmt: skip

    @wraps(command)
    def wrapped(**given: Any) -> None:
        run(given)

    needed = [p for p in own if p.default is p.empty]
    others = [p for p in own if p not in needed]
    parameters = [*needed, *others, *more] if last else [*needed, *more, *others]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def build_recipe(path: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """The recipe in a file, or the one that the options of `merge` and `plan` describe.

    Raises:
        RecipeError: both or neither are given, or the recipe is wrong.
    """
    from layerswap.compose.recipe import check_recipe, read_recipe

    given = {name: value for name, value in flags.items() if value is not None}
    output: dict[str, Any] = {name: given.pop(name) for name in BESIDE_A_FILE if name in given}
    if "languages" in output:
        output["languages"] = [code.strip() for code in output["languages"].split(",")]
    if path is not None:
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise RecipeError(f"--{flag} cannot be given beside a recipe; write it into {path}")
        recipe = read_recipe(path).model_dump(exclude_unset=True)
        return check_recipe({**recipe, **output}, where=str(path))
    if not {"task_expert", "language_expert"} <= set(given):
        raise RecipeError("give a recipe file, or both --task-expert and --language-expert")
    for name in ("task_expert", "language_expert"):
        expect_checkpoint(f"--{name.replace('_', '-')}", given[name])
    data: dict[str, Any] = {
        "experts": {name: given.pop(f"{name}_expert") for name in ("task", "language")},
        **({"base": given.pop("base")} if "base" in given else {}),
        **output,
    }
    if "partition" in given:
        name = given.pop("partition")
        flag = next((flag for flag in given if flag != "outside"), "").replace("_", "-")
        if flag:
            raise RecipeError(f"--{flag} cannot be given beside --partition, which says it all")
        data["partition"] = {"name": name, **given}
    else:
        data |= {"weights": read_weights(given.pop("weights", "uniform")), "swap": given}
    return check_recipe(data, where="command line")


def read_weights(text: str) -> str | dict[str, float]:
    """The value of `--weights`: a word, or the weights of both experts.

    Raises:
        RecipeError: neither.
    """
    if "," not in text:
        return text
    try:
        task, language = map(float, text.split(","))
    except ValueError:
        raise RecipeError(
            f"--weights: {text!r} is not uniform, magnitude or two numbers like 0.6,0.4"
        ) from None
    return {"task": task, "language": language}


TASK_NAME = re.compile(r"\w+_\w+")
LANGUAGES = re.compile(r"[a-z]{2,3}(_[A-Z][a-z]{3})?|[A-Z][a-z]+")


def expect_checkpoint(option: str, value: str) -> None:
    """Name the mix-up where a checkpoint's option is given a benchmark or a language.

    Raises:
        RecipeError: `value` is no folder, and reads as a benchmark or a language.
    """
    from layerswap.evaluation.suites import suite_names

    if "/" in value or Path(value).exists():
        return
    kind = "language" if "language" in option else "task"
    if kind == "task" and (value in {"gsm8k", *suite_names()} or TASK_NAME.match(value)):
        raise RecipeError(
            f"{option}: {value!r} is no folder and reads like a benchmark; give the task expert's "
            "checkpoint. Benchmarks go to `eval --suite` or `select --task`"
        )
    if kind == "language" and LANGUAGES.fullmatch(value):
        raise RecipeError(
            f"{option}: {value!r} is no folder and reads like a language; give the language "
            "expert's checkpoint. Languages go to `eval --language` or `select --language`"
        )


def refuse_checkpoint(option: str, values: list[str] | str | None, *, takes: str) -> None:
    """Name the mix-up where an option for a benchmark or a language is given a checkpoint.

    Raises:
        RecipeError: a value is a path or a checkpoint folder.
    """
    for value in [values] if isinstance(values, str) else values or ():
        if "/" in value or (Path(value) / "config.json").is_file():
            raise RecipeError(
                f"{option}: {value!r} is a checkpoint, not {takes}. Checkpoints go to "
                "--task-expert and --language-expert of merge, plan and linearity"
            )


def read_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Values of an option that is given as `NAME=VALUE`, by name.

    Raises:
        RecipeError: a text without a name or a value, or a name given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise RecipeError(f"{option}: {text!r} is not NAME=PATH")
        if name in pairs:
            raise RecipeError(f"{option}: {name!r} is given twice")
        pairs[name] = value
    return pairs


def task_names(given: list[str] | None) -> list[str]:
    """Names of tasks, from values of an option that each may hold several with commas between."""
    return [name.strip() for value in given or () for name in value.split(",") if name.strip()]


def named_folders(option: str, texts: list[str]) -> dict[str, str]:
    """Folders or Hub ids by name: `NAME=FOLDER`, or the folder's own name.

    Raises:
        RecipeError: two have one name, or a name is no name of a folder.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, given, source = text.partition("=")
        name, source = (name, source) if given else (text.rstrip("/").rpartition("/")[2], text)
        if not name or not source or name.startswith(".") or "/" in name:
            raise RecipeError(f"{option}: {text!r} is not FOLDER or NAME=FOLDER")
        if name in found:
            raise RecipeError(f"{option}: two are called {name!r}; write NAME=FOLDER")
        found[name] = source
    return found
