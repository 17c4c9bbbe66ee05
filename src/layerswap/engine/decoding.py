"""Decoding: token selection, sampling and stopping.

Random draws depend on the seed, the prompt's number and the position in the text alone. The
settings of a model's generation configuration are applied by transformers' own processors.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from layerswap.checkpoint.loading import in_float64
from layerswap.ground.errors import EvaluationError, one_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

_KNOWN = json.loads(Path(__file__).with_name("generation_settings.json").read_bytes())
ROW_BY_ROW, WITHOUT_EFFECT, ONE_IS_NONE = map(frozenset, _KNOWN.values())
"""Settings whose processors change a row's logits by that row's tokens alone; settings that the
caller gives, that change only the cost, or that need one in neither list; settings that change
nothing at 1, where all others change nothing at 0 or False."""
FAILURES = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError,
            ValueError)  # fmt: skip
"""Errors of transformers where settings contradict each other, or the model."""


Reason = Literal["eos", "stop", "length"]
"""Why a text ends: the model ended it, a stop string appeared, or it has the maximum length."""


@dataclass(frozen=True)
class Sampling:
    """Random sampling of tokens.

    A draw depends on the seed, the prompt's position and the position in the text alone: every
    composition answers a prompt with the same random numbers, independent of other texts.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the most likely tokens that together have this probability.
        seed: of the random numbers.

    Raises:
        EvaluationError: a setting out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature < math.inf:  # logits over less are not finite
            raise EvaluationError(
                f"temperature is {self.temperature}; it must be at least 0.000001 and finite"
            )
        if self.top_k < 0:
            raise EvaluationError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise EvaluationError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def draws(self, prompts: Sequence[int], count: int) -> npt.NDArray[np.float64]:
        """Return uniform numbers in [0, 1), `(prompts, count)`, by the prompts' numbers."""
        import numpy as np

        draws = np.empty((len(prompts), count))
        for row, prompt in enumerate(prompts):
            digest = hashlib.sha256(f"{self.seed}/{prompt}".encode()).digest()
            key = np.frombuffer(digest[:16], dtype=np.uint64)
            draws[row] = np.random.Generator(np.random.Philox(key=key)).random(count)
        return draws


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, int64 `[rows]`, by the inverse of the distribution function.

    `logits` is float32 `[rows, vocabulary]`, minus infinity for excluded tokens. `draws` is float64
    `[rows]` on the CPU, uniform in [0, 1).
    """
    import torch

    cumulative = in_float64(logits).softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the real sum, so that a draw close to 1 still finds a token.
    thresholds = (draws.to(cumulative.device) * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_max(logits.shape[1] - 1).to(logits.device)


class Generation(NamedTuple):
    """A generated text."""

    tokens: tuple[int, ...]  # all of them, with the token that ended the text
    reason: str  # a `Reason`


@dataclass(frozen=True)
class Decoding:
    """The choice of tokens and the ends of a text."""

    max_new_tokens: int
    eos: frozenset[int] = frozenset()  # tokens that end a text
    stop: tuple[str, ...] = ()  # strings that end a text, anywhere in the new tokens
    tokenizer: Any = None  # decodes tokens for `stop`
    sampling: Sampling | None = None  # greedy when None
    own: frozenset[str] = frozenset()  # settings of the generation configuration that act

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EvaluationError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed")
        if self.stop and self.tokenizer is None:
            raise EvaluationError("stop strings need the tokenizer that decodes them")
        if unsupported := self.own - ROW_BY_ROW:
            raise EvaluationError(
                f"generation_config.json sets {', '.join(sorted(unsupported))}, which a sweep does "
                "not apply; remove it there, or use --engine hf"
            )

    def processors(self, model: PreTrainedModel, length: int) -> LogitsProcessorList:
        """Return the processors that transformers' `generate` makes for prompts of one length.

        They read rows without padding: int64 `[rows, tokens]`, the prompt and the new tokens.
        """
        import torch
        from transformers import LogitsProcessorList

        if not self.own and self.sampling is None:
            return LogitsProcessorList()
        made: list[LogitsProcessorList] = []

        def keep(model: Any, ids: torch.Tensor, *, logits_processor: Any, **_: Any) -> torch.Tensor:
            del model
            made.append(logits_processor)
            return ids

        config: Any = copy.deepcopy(model.generation_config)
        settings: dict[str, Any] = {"do_sample": False}
        if (sampling := self.sampling) is not None:
            settings = {
                "do_sample": True, "temperature": float(sampling.temperature),
                "top_k": sampling.top_k, "top_p": sampling.top_p,
            }  # fmt: skip
        ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
        try:
            config.update(
                max_length=None, max_new_tokens=self.max_new_tokens, pad_token_id=0,
                eos_token_id=sorted(self.eos) or None, cache_implementation=None, **settings,
            )  # fmt: skip
            with configured(model, config):
                model.generate(  # type: ignore[operator]
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    custom_generate=keep,
                )
        except FAILURES as error:
            raise settings_error(error) from None
        return made[0]

    def reasons(self, written: Sequence[Sequence[int]]) -> list[Reason | None]:
        """Return each text's reason to end after its last token; None if it continues."""
        reasons: list[Reason | None] = []
        for tokens, stopped in zip(written, self._stopped(written), strict=True):
            if tokens[-1] in self.eos:
                reasons.append("eos")
            elif stopped:
                reasons.append("stop")
            else:
                reasons.append("length" if len(tokens) >= self.max_new_tokens else None)
        return reasons

    def _stopped(self, written: Sequence[Sequence[int]]) -> list[bool]:
        if not self.stop:
            return [False] * len(written)
        # A token is at least a byte; two more, since some decode differently at the beginning.
        longest = max(len(stop.encode()) for stop in self.stop) + 2
        tails = [tuple(tokens[-longest:]) for tokens in written]
        distinct = list(dict.fromkeys(tails))
        texts = dict(zip(distinct, self.tokenizer.batch_decode(distinct), strict=True))
        return [any(stop in texts[tail] for stop in self.stop) for tail in tails]


def acting_settings(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of a model's own settings that can change its output."""
    from transformers import GenerationConfig

    # Names that transformers does not know have no effect there either.
    known = vars(GenerationConfig()).keys() - WITHOUT_EFFECT  # type: ignore[no-untyped-call]
    own = vars(getattr(model, "generation_config", None) or GenerationConfig())  # type: ignore[no-untyped-call]
    return frozenset(
        name
        for name in known
        if not name.startswith("_")
        and own.get(name) is not None
        and (name in ROW_BY_ROW or own[name] != (1 if name in ONE_IS_NONE else 0))
    )


@contextmanager
def configured(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Replace the generation configuration, from which `generate` takes missing settings."""
    own: Any = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def settings_error(error: Exception) -> EvaluationError:
    """Describe an error of generation with the model's own settings in one line."""
    return EvaluationError(
        f"transformers cannot generate with generation_config.json ({type(error).__name__}: "
        f"{one_line(error)})"
    )
