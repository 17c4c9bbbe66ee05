"""Log-probabilities of labels without the logits of a whole batch, for training on a CPU.

With a vocabulary of 262,144 the logits are the largest cost of a small model. TRL's fused head
skips positions without a label only where Triton runs, and computes every tile again for the
gradient. Here the head sees the labelled positions alone, in chunks, and the gradient of a chunk is
computed while its logits exist: three matrix products instead of four, in constant memory.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from trl.trainer.utils import FusedCausalLMOutput

CHUNK = 1 << 25
"""Logits in memory at a time (128 MiB of float32)."""
IGNORED = -100
_SCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier",
           "logits_scaling")  # fmt: skip
"""Settings of models whose logits are not simply the product of hidden states and head."""


class LinearLogProb(torch.autograd.Function):
    """Log-probabilities of targets under `softmax(hidden @ weight.T + bias)`.

    The gradient is that of a sum: every log-probability must be given the same gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917, autograd passes them so
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        train: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the values, and the gradients of their sum where they are needed.

        Args:
            ctx: autograd's context.
            hidden: [n, d], float32.
            weight: [vocabulary, d], float32.
            bias: [vocabulary], or None.
            targets: [n], token ids.
            chunk: logits in memory at a time.
            train: compute the gradients.

        Returns:
            Log-probability of each target, entropy (nats) and whether the target is the most
            likely token; each [n].
        """
        inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        grads = [
            torch.zeros_like(one) if needed and train and one is not None else None
            for one, needed in inputs
        ]
        values, entropies, hits = [], [], []
        size = max(1, chunk // len(weight))
        for rows in torch.split(torch.arange(len(targets)), size):
            part, wanted = hidden[rows], targets[rows]
            logits = part @ weight.t() if bias is None else torch.addmm(bias, part, weight.t())
            logs = torch.log_softmax(logits, -1)
            values.append(logs.gather(-1, wanted[:, None])[:, 0])
            hits.append(logs.argmax(-1) == wanted)
            likely = torch.exp(logs, out=logits)
            entropies.append(-torch.linalg.vecdot(likely, logs))
            del logs
            # d log p(target) / d logits = one_hot(target) - p
            if grads[0] is not None:
                grads[0][rows] = weight[wanted] - likely @ weight
            if grads[1] is not None:
                grads[1].addmm_(likely.t(), part, alpha=-1).index_add_(0, wanted, part)
            if grads[2] is not None:
                ones = torch.ones(len(wanted), dtype=weight.dtype)
                grads[2].sub_(likely.sum(0)).index_add_(0, wanted, ones)
        ctx.grads = grads
        entropy, hit = torch.cat(entropies), torch.cat(hits)
        ctx.mark_non_differentiable(entropy, hit)
        return torch.cat(values), entropy, hit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that `forward` computed."""
        factor = grad[:1].sum()  # 0 where no position has a label
        scaled = [None if one is None else one.mul_(factor) for one in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None)


def use_labelled_positions(model: Any, chunk: int = CHUNK) -> None:
    """Replace TRL's fused head of a model by `LinearLogProb` where it runs on a CPU in float32.

    Other devices and dtypes, autocast, mixtures of experts and models that scale their logits keep
    TRL's head.

    Args:
        model: a causal language model that `trl.SFTTrainer` prepared, without PEFT's wrapper.
        chunk: logits in memory at a time.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) is not None for name in _SCALED):
        return
    fused = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head, labels = self.get_output_embeddings(), kwargs.get("labels")
        fits = (
            fused_lm_head
            and labels is not None
            and "shift_labels" not in kwargs
            and head.weight.dtype == torch.float32
            and head.weight.device.type == labels.device.type == "cpu"
            and not torch.is_autocast_enabled("cpu")
            and not getattr(config, "output_router_logits", False)
            and not kwargs.get("output_router_logits")
        )
        if not fits:
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
        labels, count = kwargs.pop("labels")[:, 1:], kwargs.pop("num_items_in_batch", None)
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state[:, :-1]
        mask = labels != IGNORED
        values = LinearLogProb.apply(  # type: ignore[no-untyped-call]
            hidden[mask], head.weight, head.bias, labels[mask],
            chunk, torch.is_grad_enabled(),
        )  # fmt: skip
        spread = [one.new_zeros(mask.shape).masked_scatter(mask, one) for one in values]
        loss = -spread[0].sum() / (mask.sum().clamp(min=1) if count is None else count)
        return FusedCausalLMOutput(
            loss=loss, log_probs=spread[0], entropy=spread[1], is_top1=spread[2], label_mask=mask
        )

    model.forward = types.MethodType(forward, model)
