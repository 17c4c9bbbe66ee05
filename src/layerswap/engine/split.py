"""A model split at its layers: the part before them, the call of each layer, the part after.

Families differ in the parts around the layers: scaled embeddings, position embeddings, masks and
windows, rotary tables, ALiBi, scaled or capped logits. This module reimplements none of that. It
runs the model's own forward pass with the layers replaced: once to record the arguments of every
layer, once to feed in the hidden state that comes out of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerswap.engine.transformers_inside import LayerCache, cache_of_model
from layerswap.ground.errors import EvaluationError, one_line

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Call:
    """A layer's arguments other than the hidden state."""

    args: tuple[Any, ...]  # after the hidden state, which is every layer's first argument
    kwargs: dict[str, Any]

    def __call__(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer on a hidden state, `[rows, tokens, width]`."""
        output = layer(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Entry:
    """The input of the layers: the first hidden state, and the call of every layer."""

    hidden: torch.Tensor
    calls: Sequence[Call]


class _LastLayerReached(Exception):
    """Stops a forward pass at the last layer, when only earlier results are needed."""


class SplitModel:
    """The layers of a model in evaluation mode, and the parts of its forward pass around them."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], device: torch.device
    ) -> None:
        self.model, self._device = model, device
        self.layers = list(layers)
        # Per layer, the rest of its output after the hidden state; None for a bare tensor.
        self._output_rests: list[tuple[Any, ...] | None] = [None] * len(self.layers)
        self._learn_outputs()

    def before(self, cache: LayerCache | None = None, **inputs: Any) -> Entry:
        """Run the part before the layers on the inputs of a forward pass, after those in a cache.

        The calls of the layers then read and extend the cache.
        """
        calls: list[Call] = []
        entering: list[torch.Tensor] = []

        def record(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # By its place, since models name it differently.
            hidden, *rest = args or (kwargs.pop(next(iter(kwargs))),)
            entering.append(hidden)
            calls.append(Call(tuple(rest), kwargs))
            if layer == len(self.layers) - 1:
                raise _LastLayerReached
            return self._output(layer, hidden)

        caching = nullcontext() if cache is None else cache_of_model(cache, len(self.layers))
        with self._replaced(record), caching:
            try:
                self.model(**{**inputs, "use_cache": cache is not None})
            except _LastLayerReached:
                return Entry(entering[0], calls)
        raise RuntimeError("the model did not call its last layer")

    def after(self, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the part after the layers, final norm and head, on hidden states.

        With the inputs of the forward pass, `hidden` is the last layer's output for them, and
        logits are `[rows, tokens, vocabulary]`. Without inputs, these are any hidden states `[n,
        width]`, because this part treats every position by itself, and logits are `[n,
        vocabulary]`.
        """
        # Without inputs, each hidden state is a text of one token: some models reshape to the
        # shape of their input.
        state = hidden if inputs else hidden[:, None]

        def inject(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del args, kwargs
            return self._output(layer, state)

        with self._replaced(inject):
            logits = self.model(**(inputs or one_token(self._device, len(hidden)))).logits
        return logits if inputs else logits.reshape(len(hidden), -1)  # type: ignore[no-any-return]

    @cached_property
    def takes_positions(self) -> bool:
        """True if the positions of tokens act, when they are given."""
        import torch

        def logits(*positions: int) -> torch.Tensor:
            ids = torch.tensor([[0, 1], positions], device=self._device)
            inputs = {"input_ids": ids[:1], "position_ids": ids[1:], "use_cache": False}
            return self.model(**inputs).logits  # type: ignore[no-any-return]

        def act() -> str | None:
            return None if not torch.equal(logits(0, 1), logits(0, 0)) else "they do not act"

        return reason_of(act) is None

    @cached_property
    def why_no_kv_cache(self) -> str | None:
        """Return the reason why a KV cache per layer does not suffice; None if it does."""
        updates: list[int] = []

        class Filled:
            length = 0

            def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
                updates.append(layer)
                return keys, values

        def fills() -> str | None:
            entry = self.before(Filled(), input_ids=one_token(self._device)["input_ids"])
            hidden = entry.hidden
            for index, (layer, call) in enumerate(zip(self.layers, entry.calls, strict=True)):
                hidden = call(layer, hidden)
                if updates != [index]:
                    return (
                        f"layer {index} adds no keys and values of its own to a cache: it keeps a "
                        "recurrent state, or reads another layer's"
                    )
                updates.clear()
            return None

        return reason_of(fills)

    def _learn_outputs(self) -> None:
        """Run one token, to learn the form of every layer's output."""

        def learn(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            module: Any = self.layers[layer]
            output = type(module).forward(module, *args, **kwargs)
            self._output_rests[layer] = output[1:] if isinstance(output, tuple) else None
            return output

        with self._replaced(learn):
            read_one_token(self.model, self._device)

    def _output(self, layer: int, hidden: torch.Tensor) -> Any:
        rest = self._output_rests[layer]
        return hidden if rest is None else (hidden, *rest)

    @contextmanager
    def _replaced(
        self, replacement: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    ) -> Iterator[None]:
        """Replace the forward pass of every layer by `replacement(layer, args, kwargs)`."""

        def forward_of(layer: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: replacement(layer, args, kwargs)

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = forward_of(index)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)


def tree_map(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to the leaves of trees of one structure (tuples, lists, dictionaries)."""
    if isinstance(first, tuple | list):
        parts = zip(first, *others, strict=True)
        return type(first)(tree_map(function, *same) for same in parts)
    if isinstance(first, dict):
        return {key: tree_map(function, *(d[key] for d in (first, *others))) for key in first}
    return function(first, *others)


def one_token(device: torch.device, rows: int = 1) -> dict[str, Any]:
    """Return the inputs of a forward pass for rows of one token."""
    import torch

    ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
    return {"input_ids": ids, "use_cache": False}


def read_one_token(model: PreTrainedModel, device: torch.device) -> None:
    """Refuse a model that cannot read a token, or whose output for it has no logits."""
    import torch

    try:
        with torch.inference_mode():
            output = model(**one_token(device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's code: no common class
        why = one_line(f"{type(error).__name__}: {error}")
        raise EvaluationError(
            f"{type(model).__name__} cannot read a token ({why}); its config.json may contradict "
            "its weights"
        ) from None
    logits = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        raise EvaluationError(
            f"{type(model).__name__} has no language-model head, so there are no logits to "
            "evaluate; `architectures` in its config.json must be a causal language model"
        )


def reason_of(check: Callable[[], str | None]) -> str | None:
    """Run a check of the model; return the reason that it finds, or its error."""
    import torch

    try:
        with torch.inference_mode():
            return check()
    except torch.OutOfMemoryError:
        raise
    except (
        EvaluationError, RuntimeError, TypeError, ValueError, LookupError, AttributeError
    ) as error:  # fmt: skip
        return f"{type(error).__name__}: {error}".splitlines()[0]
