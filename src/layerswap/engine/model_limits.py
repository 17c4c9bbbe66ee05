"""What a model can read, and what therefore cannot be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the model has an embedding for."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text, as the generation configuration has them."""
    generation: Any = model.generation_config
    found = generation.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def check_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that the model cannot go on from.

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


def left_padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, `[rows, tokens]` int64, padded on the left."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids.to(device), mask.to(device)


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
