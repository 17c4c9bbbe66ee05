"""The files beside the weights: configuration, tokenizer, model card and `layerswap.json`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap import __version__
from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.folder import CONFIG
from layerswap.checkpoint.read import open_file, read_into
from layerswap.compose import draw

if TYPE_CHECKING:
    from layerswap.merge.plan import Plan

RECORD = "layerswap.json"
"""The record in every output folder: how it was made, and from what."""
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
"""Files taken over from the first expert that has them. Code (`*.py`) is never among them."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16
"""How many blocks of a weight file its fingerprint reads, and how long each is, in bytes."""


def write_documents(folder: Path, plan: Plan) -> None:
    """Write configuration, tokenizer, generation configuration, card and record."""
    write_configuration(folder, plan)
    (folder / "README.md").write_text(model_card(plan), "utf-8")
    _write_json(folder / RECORD, record(plan))


def write_configuration(folder: Path, plan: Plan) -> None:
    """Write `config.json`, and copy tokenizer and generation configuration."""
    _write_json(folder / CONFIG, _config(plan))
    for name in COPIED:
        donor = next((c for c in plan.experts.values() if (c.folder / name).is_file()), None)
        if donor:
            shutil.copyfile(donor.folder / name, folder / name)


def record(plan: Plan) -> dict[str, Any]:
    """The content of `layerswap.json`: enough to make the same merge again.

    Holds the recipe as written, the composition it resolved to, every source with its Hub
    revision and the fingerprints of its weight files, and the version of layerswap.
    """
    sources = dict(plan.experts)
    if plan.base:
        sources["base"] = plan.base
    return {
        "layerswap_version": __version__,
        "recipe": plan.recipe.model_dump(mode="json", exclude_defaults=True),
        "magnitude_weights": plan.magnitude,
        "composition": plan.composition.to_dict(),
        "sources": {name: _source(checkpoint) for name, checkpoint in sources.items()},
    }


def fingerprint(path: Path) -> str:
    """SHA-256 over a file's length and 64 blocks of 64 KiB spread evenly over it.

    The first block holds the header. It costs 4 MiB of reading whatever the file's size, and
    tells any two fine-tuned checkpoints apart; it is not proof against an edit of single bytes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(path) as handle:
        size = os.fstat(handle).st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        for start in sorted({last * i // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)}):
            block = memoryview(bytearray(min(SAMPLE_BYTES, size - start)))
            read_into(handle, start, block, path)
            digest.update(block)
    return digest.hexdigest()


def model_card(plan: Plan) -> str:
    """The model card: metadata that the Hub reads, the drawing and the recipe."""
    import yaml
    from huggingface_hub import ModelCardData

    bases = [plan.base] if plan.base else list(plan.experts.values())
    metadata = ModelCardData(
        base_model=[_card_name(checkpoint) for checkpoint in bases],
        base_model_relation="merge",
        language=list(plan.recipe.languages) or None,
        library_name="transformers",
        tags=["merge", "layerswap"],
    ).to_yaml()
    experts = "\n".join(f"- `{name}`: {_card_name(c)}" for name, c in plan.experts.items())
    recipe = yaml.safe_dump(
        plan.recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False
    )
    return (
        f"---\n{metadata}\n---\n\n# A layer-swapped model\n\n"
        "Recomposed layer by layer from experts fine-tuned from one base, with "
        f"layerswap {__version__}.\n\n## Experts\n\n{experts}\n\n"
        f"## Composition\n\n```\n{draw(plan.composition)}\n```\n\n"
        f"## Recipe\n\n```yaml\n{recipe}```\n\n"
        "`layerswap.json` holds the whole record.\n"
    )


def _config(plan: Plan) -> dict[str, Any]:
    config = dict(plan.reference.config)
    # Merged weights never run code from a repository.
    config.pop("auto_map", None)
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    dtypes = {t.dtype for t in plan.tensors if t.dtype in names}
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = names[dtypes.pop()]
    return config


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "fingerprints": {file.name: fingerprint(file) for file in files},
    }


def _card_name(checkpoint: Checkpoint) -> str:
    # A local path says nothing to a reader of the card, and may tell more than its owner wants.
    return checkpoint.source if checkpoint.revision else checkpoint.folder.resolve().name


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
