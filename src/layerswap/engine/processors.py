"""The settings of a model's generation configuration, applied by transformers' own processors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from layerswap.errors import EvaluationError, one_line

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

ROW_BY_ROW = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "remove_invalid_values",
    "renormalize_logits", "repetition_penalty", "sequence_bias", "suppress_tokens", "top_h",
    "typical_p",
})  # fmt: skip
"""Settings whose processors change a row's logits by that row's tokens alone."""
WITHOUT_EFFECT = frozenset({
    "_from_model_config", "assistant_confidence_threshold", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "diversity_penalty", "do_sample",
    "early_stopping", "eos_token_id", "length_penalty", "low_memory", "max_cache_len", "max_length",
    "max_new_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "return_dict_in_generate", "temperature", "top_k", "top_p",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Settings that the caller gives, that change only the cost, or that need one not in this list."""
ONE_IS_NONE = frozenset({
    "encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams",
    "num_return_sequences",
})  # fmt: skip
"""Settings that change nothing at 1; all others change nothing at 0 or False."""
FAILURES = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError,
            ValueError)  # fmt: skip
"""Errors of transformers where settings contradict each other, or the model."""


def acting_settings(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of a model's own settings that can change what it writes."""
    from transformers import GenerationConfig

    # Names that transformers does not know have no effect there either.
    known = vars(GenerationConfig()).keys() - WITHOUT_EFFECT  # type: ignore[no-untyped-call]
    own = vars(getattr(model, "generation_config", None) or GenerationConfig())  # type: ignore[no-untyped-call]
    return frozenset(
        name
        for name in known
        if own.get(name) is not None
        and (name in ROW_BY_ROW or own[name] != (1 if name in ONE_IS_NONE else 0))
    )


def own_processors(model: PreTrainedModel, length: int, **settings: Any) -> LogitsProcessorList:
    """Return the processors that transformers' `generate` makes for prompts of one length.

    They read rows without padding: int64 `[rows, tokens]`, the prompt and the new tokens. Other
    `settings` replace those of the model's generation configuration.
    """
    import torch

    made: list[LogitsProcessorList] = []

    def keep(model: Any, ids: torch.Tensor, *, logits_processor: Any, **_: Any) -> torch.Tensor:
        del model
        made.append(logits_processor)
        return ids

    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    with own_config(model, cache_implementation=None, **settings) as config:
        model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=keep
        )
    return made[0]


@contextmanager
def own_config(model: PreTrainedModel, **settings: Any) -> Iterator[GenerationConfig]:
    """Replace settings of a model's generation configuration; failures become one line."""
    import torch

    # `generate` takes missing settings from the model's own configuration.
    own: Any = model.generation_config
    config = model.generation_config = copy.deepcopy(own)
    try:
        config.update(max_length=None, pad_token_id=0, **settings)
        yield config
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise settings_error(error) from None
    finally:
        model.generation_config = own


def settings_error(error: Exception) -> EvaluationError:
    """Describe an error of generation with the model's own settings in one line."""
    why = one_line(error)
    return EvaluationError(
        f"transformers cannot generate with generation_config.json ({type(error).__name__}: {why})"
    )
