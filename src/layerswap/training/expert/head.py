"""Computes log-probabilities of labels without the logits of a whole batch, on a CPU.

With a vocabulary of 262,144 the logits are the largest cost of a small model. TRL's fused head
skips positions without a label only where Triton runs, and computes every tile again for the
gradient. Here the head sees the labelled positions alone, in chunks, and the gradient of a chunk is
computed while its logits exist: three matrix products instead of four, in constant memory.

Imports torch when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

CHUNK_LOGITS = 1 << 26
"""Number of logits per matrix product: 256 MiB in float32, 128 MiB in bfloat16."""
BLOCK = 1 << 21
"""Number of logits per softmax: 8 MiB in float32, which fits into a processor's cache."""
IGNORED = -100
ADVICE = "use versions of TRL and transformers that docs/support.md names"
_SCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier",
           "logits_scaling")  # fmt: skip
"""Settings of models whose logits are not simply the product of hidden states and head."""


class LinearLogProb(torch.autograd.Function):
    """Log-probabilities of targets under `softmax(hidden @ weight.T + bias)`.

    The gradient assumes a sum: every log-probability must receive the same gradient.
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
        narrow: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the values, and with `train` the gradients of their sum where they are needed.

        `hidden` [n, d], `weight` [vocabulary, d] and `bias` [vocabulary] are float32, `targets` [n]
        are token ids. `narrow` is `weight` in the dtype of the matrix products, as under autocast;
        the rest is float32.

        Returns:
            Log-probability of each target, entropy (nats), and true where the target is the most
            likely token; each [n].
        """
        inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        grads = [
            torch.zeros_like(tensor) if needed and train and tensor is not None else None
            for tensor, needed in inputs
        ]
        values, entropies, hits = [], [], []
        size = max(1, min(chunk // len(weight), len(targets)))
        # The memory is allocated once: fresh pages cost as much as writing to them.
        products = torch.empty(size, len(weight), dtype=narrow.dtype)
        buffers = [hidden.new_empty(max(1, BLOCK // len(weight)), len(weight)) for _ in range(2)]
        for rows in torch.split(torch.arange(len(targets)), size):
            part, product = hidden[rows].to(narrow.dtype), products[: len(rows)]
            torch.mm(part, narrow.t(), out=product)
            blocks = (torch.split(tensor, len(buffers[0])) for tensor in (product, targets[rows]))
            for block, labels in zip(*blocks, strict=True):
                first, second = (memory[: len(block)] for memory in buffers)
                logits = first.copy_(block)
                if bias is not None:
                    logits += bias
                logs = torch.log_softmax(logits, -1, out=second)
                values.append(logs.gather(-1, labels[:, None])[:, 0])
                hits.append(values[-1] == logs.amax(-1))
                probabilities = torch.exp(logs, out=first)
                entropies.append(-logs.mul_(probabilities).sum(-1))
                # d log p(target) / d logits = one_hot(target) - p. Subtract before rounding: near
                # p = 1 only rounding errors would be left of the difference.
                probabilities[torch.arange(len(labels)), labels] -= 1
                block.copy_(probabilities)
                if grads[2] is not None:
                    grads[2].sub_(probabilities.sum(0))
            if grads[0] is not None:
                grads[0][rows] = -(product @ narrow).to(hidden.dtype)
            if grads[1] is not None:
                if product.dtype == torch.float32:
                    grads[1].addmm_(product.t(), part, alpha=-1)
                else:
                    grads[1].sub_(product.t() @ part)
        ctx.grads = grads
        entropy, hit = torch.cat(entropies), torch.cat(hits)
        ctx.mark_non_differentiable(entropy, hit)
        return torch.cat(values), entropy, hit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that `forward` computed."""
        factor = grad[:1].sum()  # 0 where no position has a label
        scaled = [None if stored is None else stored.mul_(factor) for stored in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None, None)


def use_labelled_positions(model: Any, chunk: int = CHUNK_LOGITS) -> Callable[[], bool]:
    """Replace TRL's head of a model by `LinearLogProb` where its weights are float32 on a CPU.

    Other devices and dtypes, mixtures of experts and models that scale their logits keep TRL's
    head, and so does a model whose first batch shows that TRL's head has other results, with a
    warning. Under autocast the matrix products of the head have its dtype. The model is one that
    `trl.SFTTrainer` prepared, without PEFT's wrapper. Returns a function that returns True once TRL
    has asked for its head.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) is not None for name in _SCALED):
        return lambda: True
    fused = model.forward
    kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    asked, equal, output_class = False, True, None

    def narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert the head to a dtype; keep the copy of a frozen head for the next batch."""
        if weight.requires_grad or weight.dtype == dtype:
            kept.clear()  # an optimiser may change the head before it is frozen again
            return weight.detach().to(dtype)
        key = (weight.data_ptr(), dtype)
        if key not in kept:
            kept.clear()
            kept[key] = weight.detach().to(dtype)
        return kept[key]

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal asked, equal, output_class
        asked = asked or "fused_lm_head" in kwargs
        head, labels = self.get_output_embeddings(), kwargs.get("labels")
        fits = (
            kwargs.get("fused_lm_head")
            and equal
            and labels is not None
            and "shift_labels" not in kwargs
            and not isinstance(head.weight, DTensor)  # a shard: FSDP gathers it in the head itself
            and head.weight.dtype == torch.float32
            and head.weight.device.type == labels.device.type == "cpu"
            and not getattr(config, "output_router_logits", False)
            and not kwargs.get("output_router_logits")
        )
        if not fits:
            return fused(*args, **kwargs)
        theirs = None
        if output_class is None:
            # Dropout draws the same numbers for both heads.
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                theirs = fused(*args, **kwargs)
            torch.clear_autocast_cache()  # its weights have no gradients
            output_class = type(theirs)
        labels, count = kwargs["labels"][:, 1:], kwargs.get("num_items_in_batch")
        rest = {**kwargs, "use_cache": False}
        for name in ("fused_lm_head", "labels", "num_items_in_batch"):
            rest.pop(name, None)
        hidden = self.base_model(*args, **rest).last_hidden_state[:, :-1]
        mask = labels != IGNORED
        autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else torch.float32
        values = LinearLogProb.apply(  # type: ignore[no-untyped-call]
            hidden[mask].float(), head.weight, head.bias, labels[mask], chunk,
            torch.is_grad_enabled(), narrowed(head.weight, dtype),
        )  # fmt: skip
        logs, entropy, hit = (
            value.new_zeros(mask.shape).masked_scatter(mask, value) for value in values
        )
        loss = -logs.sum() / (mask.sum().clamp(min=1) if count is None else count)
        fields = {
            "loss": loss, "log_probs": logs, "entropy": entropy, "is_top1": hit, "label_mask": mask,
        }  # fmt: skip
        if theirs is not None and not (equal := _equal(fields, vars(theirs))):
            warnings.warn(
                f"TRL's head for CPUs has other results than ours; {ADVICE}", stacklevel=2
            )
            return fused(*args, **kwargs)
        return output_class(**fields)

    model.forward = types.MethodType(forward, model)
    return lambda: asked


def _equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """True if two outputs have the same fields, labels and, except for rounding, the same loss."""
    rounding = 0.01 if torch.is_autocast_enabled("cpu") else 1e-4
    return (
        ours.keys() == {name for name, value in theirs.items() if value is not None}
        and torch.equal(ours["label_mask"], theirs["label_mask"])
        and torch.allclose(ours["loss"], theirs["loss"], rtol=rounding, atol=rounding)
    )
