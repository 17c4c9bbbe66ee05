"""Registers functions as commands: shared options, groups of options, and plain help."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from layerswap.cli import output
from layerswap.cli.next_commands import next_command
from layerswap.errors import RecipeError
from layerswap.versions import Extra, need_extras

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the logs of libraries, and tracebacks.")
]


class Group:
    """Options that a command receives as one object."""

    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values

    @classmethod
    def options(cls) -> dict[str, tuple[Any, Any]]:
        """The annotation and the default of every option, by name."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: (kind, getattr(cls, name)) for name, kind in hints.items()}

    def given(self) -> dict[str, Any]:
        """The options that have a value, by name."""
        values = {name: getattr(self, name) for name in self.options()}
        return {name: value for name, value in values.items() if value is not None}


NEEDS: Mapping[str, tuple[Extra, ...]] = {
    "quickstart": ("lab",), "lab score": ("lab",), "compare": ("eval",), "study report": ("eval",),
    "analyse linearity": ("lab",), "analyse composability": ("eval",),
    "analyse fisher": ("models",), "analyse freeze-or-revert": ("train", "eval"),
    "analyse select": ("eval",),
}  # fmt: skip
"""Extras without which a command cannot begin; other commands check theirs after their options."""


class PlainCommand(TyperCommand):
    """A command that checks its extras and names the next command; its help is plain text.

    Rich's boxes take longer to import and to draw than all the rest of the help.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        name = ctx.command_path.partition(" ")[2]
        need_extras(f"`layerswap {name}`", *NEEDS.get(name, ()))
        result = super().invoke(ctx)
        if (following := next_command(name, ctx.params)) is not None:
            output.suggest(following)
        return result

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, the options, and each panel of options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(row)
        _write(formatter, panels)


class PlainGroup(TyperGroup):
    """A group of commands whose help shows their whole summaries, by panels.

    Attributes:
        moved: sentences on commands that have moved or gone, by their names.
    """

    moved: Mapping[str, str] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; a RecipeError says what replaces one that has moved."""
        for name in (" ".join(args[:2]), args[0]):
            if name in self.moved:
                raise RecipeError(f"`layerswap {name}` {self.moved[name]}")
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
        """Write the summary of every command."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
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

    The options of a parameter whose type is a `Group` become options of the command.

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
    groups: dict[str, tuple[type[Group], list[str]]] = {}
    options: dict[str, tuple[Any, Any]] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, Group):
            inner = kind.options()
            groups[name] = (kind, list(inner))
            options |= inner
        else:
            options[name] = (kind, parameter.default)
    options |= {name: (kind, False) for name, kind in shared.items()}

    @wraps(function)
    def run(**given: Any) -> None:
        output.choose(**{"as_json": False, **{name: given.pop(name) for name in shared}})
        for name, (kind, inner) in groups.items():
            given[name] = kind(**{option: given.pop(option) for option in inner})
        function(**given)

    # Typer reads the options from the signature.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
         for name, (kind, default) in options.items()]
    )  # fmt: skip
    run.__annotations__ = {name: kind for name, (kind, _) in options.items()}
    return run
