"""Checks and pads token requests, against the limits of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Where configurations say how many tokens a model reads."""


def max_length(model: PreTrainedModel) -> int | None:
    """Most tokens that the model reads; None where its configuration sets no bound."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in LENGTHS)
    return next((length for length in found if isinstance(length, int)), None)


def rotary_bound(model: PreTrainedModel) -> int | None:
    """Tokens beyond which rotary tables depend on the longest text of a batch; None if never.

    Those of dynamic NTK scaling, and of LongRoPE with its two sets of frequencies.
    """
    found = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if "dynamic" in str(kind):
                found.append(int(cast("Any", module).original_max_seq_len))
            elif kind == "longrope":
                parameters: Any = cast("Any", module).config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                found.append(int(parameters["original_max_position_embeddings"]))
    return min(found, default=None)


def vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the model has an embedding for."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text, as the generation configuration has them."""
    # A model without a head has none; reading its logits says so.
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def check_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that the model cannot continue.

    Raises:
        EvaluationError: one is empty, too long, or holds a token that the model does not have.
    """
    check_tokens(prompts, vocabulary(model), "prompt")
    bound = max_length(model)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise EvaluationError(f"prompt {index} is empty; give it at least one token")
        if bound is not None and len(prompt) + max_new_tokens > bound:
            raise EvaluationError(
                f"prompt {index} has {len(prompt)} tokens, which with {max_new_tokens} new ones "
                f"is more than the {bound} that the model reads"
            )


def check_tokens(rows: Sequence[Sequence[int]], vocabulary: int, what: str) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        EvaluationError: naming the first.
    """
    for index, row in enumerate(rows):
        for token in row:
            if not 0 <= token < vocabulary:
                raise EvaluationError(
                    f"{what} {index} holds token {token}, but the model has {vocabulary}; "
                    "tokenise with the experts' tokenizer"
                )


def pad(
    rows: Sequence[Sequence[int]], *, fill: int = 0, left: bool = False, width: int | None = None
) -> torch.Tensor:
    """Rows as one tensor, int64 `(rows, width)`; `width` is the longest row's when None."""
    import torch

    width = max(map(len, rows)) if width is None else width
    padded = torch.full((len(rows), width), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        start = width - len(row) if left else 0
        padded[index, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded


def pad_with_mask(
    rows: Sequence[Sequence[int]], *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 `(rows, longest)` each, 0 at padding."""
    return pad(rows, left=left), pad([[1] * len(row) for row in rows], left=left)


def batches(
    texts: Sequence[Sequence[int]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and mask of `size` texts at a time, padded on the right, longest texts first."""
    ordered = sorted(texts, key=lambda text: (-len(text), tuple(text)))
    for start in range(0, len(ordered), size):
        yield pad_with_mask(ordered[start : start + size])
