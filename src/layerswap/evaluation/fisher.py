"""Estimates the diagonal Fisher information of a checkpoint on a data set."""

from __future__ import annotations

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
from layerswap.ground.commit import write_json
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.ground.types import Bars, no_bars
from layerswap.merge.sources import FISHER_RECORD, FISHER_WEIGHTS
from layerswap.versions import __version__

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def estimate_fisher(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    examples: int = 256,
    max_length: int = 1024,
    seed: int = 0,
    device: str | None = None,
    overwrite: bool = False,
    progress: Bars | None = None,
) -> Path:
    """Estimate the diagonal Fisher of a checkpoint, for Fisher-weighted averaging.

    It is the mean over examples x of `(d log p(y | x) / d theta)^2`, per weight (Matena & Raffel,
    2022). The model's own prediction gives every token y after the tokens of x before it. `log p`
    is the sum over the tokens of an example.

    Examples run one by one, because the square of a sum of gradients is not the sum of their
    squares. Each gradient is squared and freed at once, so memory holds the weights twice in
    float32, and one gradient. Nothing is trained.

    Args:
        model: a full checkpoint: a folder or a Hub id.
        data: `.jsonl` with `text`, or with `prompt` and `completion` (only the completion
            counts); or `.txt` with an example on each line.
        out: folder to create, with `fisher.safetensors` (float32, with the names and shapes of the
            checkpoint's tensors) and `fisher.json` (checkpoint, data and settings).
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
    target = refuse_target(out, marker=FISHER_RECORD, overwrite=overwrite)
    if examples < 1 or max_length < 2:
        raise RecipeError("a Fisher needs at least 1 example, of at least 2 tokens")
    texts = read_examples(Path(data).expanduser())
    checkpoint = open_checkpoint(os.fspath(model))
    fingerprints = {file.name: fingerprint(file) for file in checkpoint.files}
    where = open_device(pick_device(device))
    tokenizer = load_tokenizer(checkpoint.folder, named=checkpoint.identity)
    loaded: Any = load_causal_lm(checkpoint.folder, dtype="float32", named=checkpoint.identity)
    loaded = loaded.to(where).eval()
    chosen = random.Random(seed).sample(texts, min(examples, len(texts)))
    rows = [row for text in chosen if (row := tokenize(text, tokenizer, max_length)).predicted]
    if not rows:
        raise RecipeError(f"{data}: no example has two tokens, so there is nothing to predict")
    with (progress or no_bars)("estimating the Fisher", len(rows), "examples") as step:
        fisher = squared_gradients(loaded, rows, seed=seed, step=step)
    about = {
        "layerswap_version": __version__,
        "checkpoint": {
            "source": checkpoint.source,
            "revision": checkpoint.revision,
            "fingerprints": fingerprints,
        },
        "data": {"file": Path(data).name, "sha256": sha256_of(Path(data).expanduser().resolve())},
        "examples": len(rows),
        "tokens": sum(len(row.predicted) for row in rows),
        "max_length": max_length,
        "seed": seed,
        "norm": _norm(fisher),
    }
    with atomic_folder(target, marker=FISHER_RECORD, overwrite=overwrite) as folder:
        _write(folder, loaded, fisher, checkpoint)
        write_json(folder / FISHER_RECORD, about)
    return target


def squared_gradients(
    model: PreTrainedModel, rows: Sequence[Tokens], *, seed: int, step: Callable[[int], None]
) -> dict[str, torch.Tensor]:
    """Average the squared gradients of the examples' log-likelihoods, per parameter.

    The model is float32 and in evaluation mode. `seed` draws the labels. `step` is called with 1
    after each example. Tensors are float32 on the model's device, and 0 for unused parameters.
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
    generator = torch.Generator().manual_seed(seed)
    for row in rows:
        # Drawn on the CPU, so that every device has the same labels.
        draws = torch.rand(len(row.predicted), dtype=torch.float64, generator=generator)
        value: Any = log_likelihood(model, row, draws)
        value.backward()
        step(1)
    for hook in hooks:
        hook.remove()
    return {name: total.div_(len(rows)).detach() for name, total in fisher.items()}


def log_likelihood(model: PreTrainedModel, row: Tokens, draws: torch.Tensor) -> torch.Tensor:
    """Sum the log-probabilities of tokens drawn from the model's prediction at each position.

    Each is drawn after the example's own tokens before it, by one of `draws`, uniform in [0, 1).
    """
    import torch

    ids = torch.tensor([row.ids], device=model.device)
    predicted = torch.tensor(row.predicted, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, predicted - 1].float()
    drawn = draw_tokens(logits.detach(), draws)
    return torch.log_softmax(logits, -1).gather(-1, drawn[:, None]).sum()


def _write(
    folder: Path, model: PreTrainedModel, fisher: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    draft = folder / "draft"
    with without_progress_bars():
        # transformers may rename and split tensors in memory; saving reverses that.
        model.save_pretrained(draft, state_dict=fisher, max_shard_size="1000TB")
    found = load_file(draft / "model.safetensors")
    # Buffers and stored copies of tied embeddings have no gradient.
    for name, info in checkpoint.tensors.items():
        if info.dtype in FLOAT_DTYPES and name not in found:
            found[name] = torch.zeros(info.shape)
    save_file(found, folder / FISHER_WEIGHTS, {"format": "pt"})
    del found  # it maps the file that is removed
    shutil.rmtree(draft)


def _norm(fisher: dict[str, torch.Tensor]) -> float:
    squares = [float(in_float64(total).square().sum()) for total in fisher.values()]
    norm = math.sqrt(math.fsum(squares))
    if not 0 < norm < math.inf:
        raise MergeError(f"the norm of the Fisher is {norm}; all gradients are 0, or one is NaN")
    return norm
