"""The layers that a configuration stacks, in one form whatever keys it is written with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layerswap.compose.mergekit.schema import read_reference
from layerswap.compose.mergekit.settings import Scalar, Setting, read_setting, value_at
from layerswap.compose.yaml_file import KeyPath

DISCRETE = ("filter_wise", "int8_mask", "normalize", "rescale")
"""Parameters that are true or false."""
Parameters = Mapping[str, Setting]


@dataclass(frozen=True)
class Source:
    """A model in a slice.

    Attributes:
        path: where it is written.
        model: what it is called.
        parameters: its own settings.
        layers: first layer and the one after the last; None where all are meant, or for layers
            that cannot be read.
    """

    path: KeyPath
    model: str
    parameters: Parameters
    layers: tuple[int, int] | None


@dataclass(frozen=True)
class Slice:
    """Neighbouring layers of the output.

    Attributes:
        path: where it is written.
        sources: what they are merged from, in order.
        base: the base model for these layers.
        scopes: settings for all sources, the nearest first.
    """

    path: KeyPath
    sources: tuple[Source, ...]
    base: str | None
    scopes: tuple[Parameters, ...]

    @property
    def length(self) -> int:
        """How many layers it has."""
        layers = self.sources[0].layers
        assert layers is not None, "checked before anything is resolved"
        return layers[1] - layers[0]

    def value(
        self, name: str, tensor: str, t: float, source: Source | None = None
    ) -> Scalar | None:
        """A parameter for one tensor, of one source or for all; None where nothing sets it.

        Args:
            name: the parameter.
            tensor: the tensor's name.
            t: position in the slice, 0..1.
            source: whose own settings are looked at first.
        """
        own = (source.parameters,) if source else ()
        for scope in (*own, *self.scopes):
            if name in scope:
                found = value_at(scope[name], tensor, t, discrete=name in DISCRETE)
                if found is not None:
                    return found
        return None


def read_stack(data: Mapping[Any, Any], layers: int | None = None) -> list[Slice]:
    """The slices of a configuration's plain data; passes over what has a wrong type.

    `models` are one slice of all `layers`, to which a base model that is not among them is added,
    as mergekit does.
    """
    top = _settings(data.get("parameters"))
    base = _model(data.get("base_model"))
    path, part, scopes = _body(data, top)
    models = part.get("models")
    if isinstance(models, list):
        whole = None if layers is None else (0, layers)
        sources = [*_sources((*path, "models"), models, whole)]
        if base is not None and base not in [source.model for source in sources]:
            sources.append(Source(("base_model",), base, {}, whole))
        return [Slice((*path, "models"), tuple(sources), base, scopes)] if sources else []
    found = []
    slices = part.get("slices")
    for i, entry in enumerate(slices if isinstance(slices, list) else ()):
        here = (*path, "slices", i)
        if isinstance(entry, Mapping) and isinstance(entry.get("sources"), list):
            sources = [*_sources((*here, "sources"), entry["sources"], None)]
            own = _model(entry.get("base_model")) or base
            if sources:
                inner = (_settings(entry.get("parameters")), *scopes)
                found.append(Slice(here, tuple(sources), own, inner))
    return found


def _body(
    data: Mapping[Any, Any], top: Parameters
) -> tuple[KeyPath, Mapping[Any, Any], tuple[Parameters, ...]]:
    """Where the models or slices are, and the settings around them, the nearest first."""
    modules = data.get("modules")
    if isinstance(modules, Mapping) and modules:
        name, module = next(iter(modules.items()))
        if isinstance(module, Mapping):
            return ("modules", name), module, (_settings(module.get("parameters")), top)
    return (), data, (top,)


def _sources(path: KeyPath, entries: list[Any], whole: tuple[int, int] | None) -> Iterator[Source]:
    for i, entry in enumerate(entries):
        if isinstance(entry, Mapping) and (model := _model(entry.get("model"))) is not None:
            layers = _range(entry["layer_range"]) if "layer_range" in entry else whole
            yield Source((*path, i), model, _settings(entry.get("parameters")), layers)


def _model(value: object) -> str | None:
    try:
        found = read_reference(value)
    except ValueError:
        return None
    return found if isinstance(found, str) and found else None


def _range(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or [type(v) for v in value] != [int, int]:
        return None
    return value[0], value[1]


def _settings(value: object) -> Parameters:
    found = {}
    for name, setting in value.items() if isinstance(value, Mapping) else ():
        try:
            found[name] = read_setting(setting)
        except ValueError:
            found[name] = []  # set, but to nothing: its own mistake is reported elsewhere
    return found
