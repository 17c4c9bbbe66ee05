"""Registers functions as commands: options, plain help, and extras."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from layerswap.cli import output
from layerswap.versions import Extra, need_extras

Json = Annotated[bool, Option("--json", help="Print one JSON document for programs.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print errors only.")]
Verbose = Annotated[
    bool, Option("--verbose", "-v", help="Print tracebacks and the logs of libraries.")
]


class OptionGroup:
    """Options that a command receives as one object, in a panel of the help.

    `Options:` in the docstring of a group has its help texts, as that of a command.
    """

    panel: ClassVar[str | None] = None

    def __init_subclass__(cls, panel: str | None = None) -> None:
        cls.panel = panel

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """The annotation and the default of every option, by name.

        A field with several types in a file is an option of its first type.
        """
        hints = get_type_hints(cls, include_extras=True)
        options: dict[str, tuple[Any, Any]] = {}
        for group in reversed(cls.__mro__[: cls.__mro__.index(OptionGroup)]):
            texts = _parted(group)[1]
            for name in inspect.get_annotations(group):
                kind, default = _first_type(hints[name], getattr(cls, name))
                panel = getattr(group, "panel", cls.panel)
                options[name] = (_option(name, kind, texts.get(name), panel=panel), default)
        return options

    def given(self) -> dict[str, Any]:
        """The options that have a value, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


NEEDS: Mapping[str, tuple[Extra, ...]] = {
    "quickstart": ("lab",), "compare": ("eval",), "study report": ("eval",),
    "delta": ("report",),
    "analyse linearity": ("lab",), "analyse composability": ("eval",),
    "analyse fisher": ("models",), "analyse freeze-or-revert": ("train", "eval"),
    "analyse select": ("eval",), "bases": ("models",), "ask label": ("play",),
    "ask answer": ("play",), "ask prefer": ("play",), "ask read": ("eval",),
}  # fmt: skip
"""Extras without which a command cannot begin; other commands check theirs after their options."""


class PlainCommand(TyperCommand):
    """A command that checks its extras; its help is plain text.

    Rich's boxes take longer to import and to draw than all the rest of the help.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        name = ctx.command_path.partition(" ")[2]
        if name in NEEDS:
            need_extras(f"`layerswap {name}`", *NEEDS[name])
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, the options, and each panel of options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                panel = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or panel, []).append(row)
        _write(formatter, panels)


FIRST = ("new", "study", "merge", "eval", "ask", "deploy")
"""Commands that `layerswap --help` lists first, in this order."""


class PlainGroup(TyperGroup):
    """A group of commands whose help shows their whole summaries, by panels."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the group; where a command comes first, only those that it can share.

        Typer imports Pydantic to read the others, which takes longer than a command's help.
        """
        options = super().get_params(ctx)
        if ctx.parent is None and sys.argv[1:] and not sys.argv[1].startswith("-"):
            return [param for param in options if param.name == "version"]
        return options

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summary of every command."""
        panels: dict[str, list[tuple[str, str]]] = {}
        names = self.list_commands(ctx)
        if ctx.parent is None:
            names = [*FIRST, *(name for name in names if name not in FIRST)]
        for name in names:
            command: Any = self.get_command(ctx, name)
            panel = getattr(command, "rich_help_panel", None)
            rows = panels.setdefault(panel if isinstance(panel, str) else "Commands", [])
            rows.append((name, command.get_short_help_str(limit=400)))
        _write(formatter, panels)


def _write(formatter: Any, panels: Mapping[str, list[tuple[str, str]]]) -> None:
    for title, rows in panels.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def group(summary: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(
        cls=PlainGroup, rich_markup_mode=None, no_args_is_help=True, help=summary
    )  # fmt: skip


def command(
    app: typer.Typer, name: str | None = None, *, json: bool = False, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function as a command with the options of its output.

    Keyword-only parameters become options, and others arguments. `Options:` in the docstring has a
    line for each: `name: help text`, `name METAVAR: help text`, or with `(default: words)` at the
    end. The options of a parameter whose type is an `OptionGroup` are options of the command.

    Args:
        app: the group of commands.
        name: of the command; the function's when None.
        json: give it --json; it ends with `output.finish`.
        panel: section of the help that lists it.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        shared: dict[str, Any] = {"as_json": Json} if json else {}
        shared |= {"quiet": Quiet, "verbose": Verbose}
        app.command(name, cls=PlainCommand, rich_help_panel=panel)(_flattened(function, shared))
        return function

    return register


def _flattened(function: Callable[..., None], shared: Mapping[str, Any]) -> Callable[..., None]:
    """A function with the options of its groups, and the shared flags, as parameters."""
    groups: dict[str, tuple[type[OptionGroup], list[str]]] = {}
    options: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(function, include_extras=True)
    prose, texts = _parted(function)
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints[name]
        if isinstance(annotation, type) and issubclass(annotation, OptionGroup):
            inner = annotation.options()
            groups[name] = (annotation, list(inner))
            options |= inner
        else:
            argument = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            option = _option(name, annotation, texts.get(name), argument=argument)
            options[name] = (option, parameter.default)
    options |= {name: (annotation, False) for name, annotation in shared.items()}

    @wraps(function)
    def run(**given: Any) -> None:
        output.choose(**{"as_json": False, **{name: given.pop(name) for name in shared}})
        for name, (annotation, inner) in groups.items():
            given[name] = annotation(**{option: given.pop(option) for option in inner})
        function(**given)

    run.__doc__ = prose
    # Typer reads the options from the signature.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                           annotation=annotation)
         for name, (annotation, default) in options.items()]
    )  # fmt: skip
    run.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    return run


def _parted(documented: object) -> tuple[str, dict[str, str]]:
    """The docstring before `Options:`, and what it says of each option, without its name."""
    prose, _, section = (inspect.getdoc(documented) or "").partition("\n\nOptions:\n")
    lines = re.findall(r"^ {4}(\w+)(.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return prose, {name: " ".join(line.split()) for name, line in lines}


def _option(
    name: str,
    annotation: Any,
    text: str | None,
    *,
    argument: bool = False,
    panel: str | None = None,
) -> Any:
    """The annotation of an option with its text; a flag has no negative unless it names one."""
    if text is None:
        return annotation
    named, _, words = text.partition(": ")
    flags = [word for word in named.split() if word.startswith("--")]
    kind, *given = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    if given:
        info = copy(given[0])
    elif argument:
        info = Argument()
    else:
        alone = [f"--{name.replace('_', '-')}"] * (kind in (bool, bool | None))
        info = Option(*(flags[0].split(",") if flags else alone))
    info.metavar = " ".join(word for word in named.split() if word not in flags).strip(":") or None
    info.help, _, default = words.partition(" (default: ")
    info.show_default = default.removesuffix(")") or info.show_default
    info.rich_help_panel = info.rich_help_panel or panel
    return Annotated[kind, info]


def _first_type(annotation: Any, default: Any) -> tuple[Any, Any]:
    """The first type of a union, optional if the default has another type, and the default."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, default
    first = get_args(annotation)[0]
    fits = get_origin(first) is None and isinstance(default, first)
    return (first, default) if fits else (first | None, None)
