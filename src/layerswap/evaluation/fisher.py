"""Estimates the diagonal Fisher information of a checkpoint on a data set."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import (
    Checkpoint,
    atomic_folder,
    fingerprint,
    open_checkpoint,
    read_header,
    refuse_target,
    sha256_of,
)
from layerswap.checkpoint.loading import (
    in_float64,
    load_causal_lm,
    load_tokenizer,
    open_device,
    pick_device,
    without_progress_bars,
)
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.engine.decoding import draw_tokens
from layerswap.evaluation.examples import Tokens, read_examples, tokenize
from layerswap.ground.errors import CheckpointError, MergeError, RecipeError
from layerswap.ground.types import Bars, no_bars
from layerswap.merge.sources import FISHER_RECORD, FISHER_WEIGHTS
from layerswap.versions import __version__

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LABELS = ("model", "data")
"""Sources of the labels."""


def estimate_fisher(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    labels: str = "model",
    examples: int = 256,
    max_length: int = 1024,
    seed: int = 0,
    device: str | None = None,
    overwrite: bool = False,
    progress: Bars | None = None,
) -> Path:
    """Estimate the diagonal Fisher of a checkpoint, for Fisher-weighted averaging.

    It is the mean over examples x of `(d log p(y | x) / d theta)^2`, per weight (Matena & Raffel,
    2022). With `labels="model"`, the paper's Fisher, the model's own prediction gives every token y
    after the tokens of x before it. With `labels="data"`, the *empirical* Fisher, y is the text
    itself. `log p` is the sum over the tokens of an example.

    Examples run one by one, because the square of a sum of gradients is not the sum of their
    squares. Each gradient is squared and freed at once, so memory holds the weights twice in
    float32, and one gradient. Nothing is trained.

    Args:
        model: a full checkpoint: a folder or a Hub id.
        data: `.jsonl` with `text`, or with `prompt` and `completion` (only the completion
            counts); or `.txt` with an example on each line.
        out: folder to create, with `fisher.safetensors` (float32, with the names and shapes of the
            checkpoint's tensors) and `fisher.json` (checkpoint, data and settings).
        labels: source of y.
        examples: number of examples to draw from the data, without replacement; at most all.
        max_length: largest number of tokens of an example; longer ones are cut.
        seed: seed of the examples and of the labels.
        device: device of the model; a GPU if there is one.
        overwrite: overwrite a folder that this function wrote.
        progress: opens a progress bar over examples.

    Returns:
        The folder.

    Raises:
        LayerswapError: the checkpoint or the data cannot be read, the output cannot be written,
            or a gradient is not finite.

    Example: `estimate_fisher("math-expert", "gsm8k.jsonl", "math-fisher")`
    """
    target = Path(os.path.abspath(os.path.expanduser(out)))  # noqa: PTH100, PTH111
    refuse_target(target, marker=FISHER_RECORD, overwrite=overwrite)
    if labels not in LABELS:
        raise RecipeError(f"labels: {labels!r} is not one of {', '.join(LABELS)}")
    if examples < 1 or max_length < 2:
        raise RecipeError("a Fisher needs at least 1 example, of at least 2 tokens")
    texts = read_examples(Path(data).expanduser())
    checkpoint = open_checkpoint(os.fspath(model))
    before = _fingerprints(checkpoint)
    where = open_device(pick_device(device))
    tokenizer = load_tokenizer(checkpoint.folder, named=checkpoint.identity)
    loaded: Any = load_causal_lm(checkpoint.folder, dtype="float32", named=checkpoint.identity)
    loaded = loaded.to(where).eval()
    chosen = sorted(random.Random(seed).sample(range(len(texts)), min(examples, len(texts))))
    rows = [(i, tokenize(texts[i], tokenizer, max_length)) for i in chosen]
    rows = [(i, row) for i, row in rows if row.predicted]
    if not rows:
        raise RecipeError(f"{data}: no example has two tokens, so there is nothing to predict")
    with (progress or no_bars)("estimating the Fisher", len(rows), "examples") as step:
        fisher = squared_gradients(loaded, rows, labels=labels, seed=seed, step=step)
    about = {
        "layerswap_version": __version__,
        "checkpoint": {
            "source": checkpoint.source,
            "revision": checkpoint.revision,
            "fingerprints": before,
        },
        "data": {"file": Path(data).name, "sha256": sha256_of(Path(data).expanduser().resolve())},
        "labels": labels,
        "examples": len(rows),
        "tokens": sum(len(row.predicted) for _, row in rows),
        "max_length": max_length,
        "seed": seed,
        "norm": _norm(fisher),
    }
    with atomic_folder(target, marker=FISHER_RECORD, overwrite=overwrite) as folder:
        _write(folder, loaded, fisher, checkpoint)
        text = json.dumps(about, indent=2, ensure_ascii=False)
        (folder / FISHER_RECORD).write_bytes((text + "\n").encode())
        if _fingerprints(checkpoint) != before:
            raise CheckpointError(f"{checkpoint.identity}: changed while its Fisher was estimated")
    return target


def squared_gradients(
    model: PreTrainedModel,
    rows: Sequence[tuple[int, Tokens]],
    *,
    labels: str,
    seed: int,
    step: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Average the squared gradients of the examples' log-likelihoods, per parameter.

    The model is float32 and in evaluation mode. `rows` are examples with the numbers that seed
    their labels. `step` is called with 1 after each example. Tensors are float32 on the model's
    device, and 0 for unused parameters.
    """
    import torch

    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    hooks = []
    for name, parameter in model.named_parameters():

        def square(parameter: torch.Tensor, total: torch.Tensor = fisher[name]) -> None:
            assert parameter.grad is not None
            total.addcmul_(parameter.grad, parameter.grad)
            parameter.grad = None

        # The hook of a tied weight runs once, on the sum of its gradients.
        register: Any = parameter.requires_grad_().register_post_accumulate_grad_hook
        hooks.append(register(square))
    for number, row in rows:
        value: Any = log_likelihood(model, row, labels=labels, key=f"{seed}/{number}")
        value.backward()
        step(1)
    for hook in hooks:
        hook.remove()
    return {name: total.div_(len(rows)).detach() for name, total in fisher.items()}


def log_likelihood(model: PreTrainedModel, row: Tokens, *, labels: str, key: str) -> torch.Tensor:
    """Sum the log-probabilities of an example's predicted tokens, or of tokens in their place.

    With `labels="model"`, tokens are drawn from the prediction at each position, after the
    example's own tokens before it. `key` seeds the draw, independently of the device and of other
    examples.
    """
    import torch

    ids = torch.tensor([row.ids], device=model.device)
    predicted = torch.tensor(row.predicted, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, predicted - 1].float()
    chosen = ids[0, predicted]
    if labels == "model":
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(number)
        uniform = torch.rand(len(logits), dtype=torch.float64, generator=generator)
        chosen = draw_tokens(logits.detach(), uniform)
    return torch.log_softmax(logits, -1).gather(-1, chosen[:, None]).sum()


def _write(
    folder: Path, model: PreTrainedModel, fisher: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    draft = folder / "draft"
    with without_progress_bars():
        # transformers may rename and split tensors in memory; saving reverses that.
        model.save_pretrained(draft, state_dict=fisher, max_shard_size="1000TB")
    stored = read_header(draft / "model.safetensors")
    expected = {n: t for n, t in checkpoint.tensors.items() if t.dtype in FLOAT_DTYPES}
    extra = sorted(
        n for n, t in stored.items() if n not in expected or t.shape != expected[n].shape
    )
    if extra:
        raise MergeError(
            f"{checkpoint.identity}: transformers has a tensor {extra[0]!r} that the checkpoint "
            "does not; its Fisher cannot be written"
        )
    # Buffers and stored copies of tied embeddings have no gradient.
    missing = {n: torch.zeros(t.shape) for n, t in expected.items() if n not in stored}
    if missing:
        whole = {**load_file(draft / "model.safetensors"), **missing}
        save_file(whole, folder / FISHER_WEIGHTS, {"format": "pt"})
        del whole  # it maps the file that is removed
    else:
        (draft / "model.safetensors").rename(folder / FISHER_WEIGHTS)
    shutil.rmtree(draft)


def _norm(fisher: dict[str, torch.Tensor]) -> float:
    squares = [float(in_float64(total).square().sum()) for total in fisher.values()]
    norm = math.sqrt(math.fsum(squares))
    if not math.isfinite(norm):
        raise MergeError("a gradient is not finite, so there is no Fisher")
    if norm == 0:
        raise MergeError("every gradient is 0, so the Fisher has no information")
    return norm


def _fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    return {file.name: fingerprint(file) for file in checkpoint.files}
