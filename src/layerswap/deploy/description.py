"""The metadata of a GGUF file for a folder: everything beside the weights.

A GGUF file of the base (`like`) gives the tokenizer, the pre-tokenizer and the hyperparameters.
What the folder has otherwise is taken from it where GGUF can hold it, and refused elsewhere. Every
difference is a line.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from layerswap.checkpoint import Checkpoint, TensorInfo, text_config
from layerswap.checkpoint.gguf import Entry, number_entry, text_entry, texts_entry
from layerswap.checkpoint.gguf_file import DEFAULTS, metadata_of
from layerswap.checkpoint.gguf_view import SETTINGS, as_gguf, check_family
from layerswap.checkpoint.loading import load_generation_config, load_tokenizer
from layerswap.ground.errors import MergeError, error_context
from layerswap.ground.strict_json import clipped, read_json_object
from layerswap.merge.compatibility import rope_settings
from layerswap.merge.gguf import REPLACED, REPLACED_PREFIXES
from layerswap.merge.layout import OutputTensor
from layerswap.merge.target import RECORD_KEY

TAKEN = {
    "rope_theta": "rope.freq_base", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "num_experts_per_tok": "expert_used_count", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
"""Settings that a file may have from the folder; the others of `SETTINGS` decide shapes."""
TEMPLATE = "tokenizer.chat_template"
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
SAMPLING = "general.sampling."
"""Prefix of the sampling settings that llama.cpp uses by default."""
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Their names in `generation_config.json`, where these differ."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's types of tokens."""
ADDED_SCORE = -1000.0
"""The score that llama.cpp's converter gives to added tokens."""
_INT32, _FLOAT32, _BOOL, _ARRAY = 5, 6, 7, 9


@dataclass
class Description:
    """The metadata entries that differ from those of `like`, and a line for each difference."""

    entries: dict[str, Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)  # keys of `like` that the file does not have

    differences: list[str] = field(default_factory=list)  # notes that change a model's answers

    def take(self, entry: Entry, note: str, *, differs: bool = True) -> None:
        """Take an entry from the folder; `differs` if the entry changes the answers."""
        self.entries[entry[0]] = entry
        self.note(note, differs=differs)

    def leave_out(self, key: str, note: str) -> None:
        """Leave out an entry of `like` that changes its answers."""
        self.left_out.add(key)
        self.note(note)

    def note(self, note: str, *, differs: bool = True) -> None:
        """Note a difference."""
        self.notes.append(note)
        if differs:
            self.differences.append(note)


def describe(
    folder: Checkpoint, like: Checkpoint
) -> tuple[dict[str, list[TensorInfo]], Description]:
    """Compare a folder with a GGUF file of its family; returns the file's tensors too (`as_gguf`).

    Raises:
        LayerswapError: a difference that no GGUF file can hold, such as another tokenizer, other
            sizes or another kind of rotary scaling.
    """
    description = Description()
    with error_context(f"{folder.identity} with {like.source}"):
        check_family(like, folder)
    _compare_settings(folder, like, description)
    sources = as_gguf(folder, like)
    tokenizer = load_tokenizer(folder.folder, named=folder.identity)
    rows = sources["token_embd.weight"][0].shape[0]
    _compare_tokens(tokenizer, folder, like, rows, description)
    _compare_merges(tokenizer, like, description)
    _compare_special_tokens(tokenizer, folder, like, description)
    _compare_sampling(folder, like, description)
    _compare_templates(tokenizer, like, description)
    return sources, description


def entries_of(like: Checkpoint, description: Description, name: str, record: str) -> list[Entry]:
    """List the metadata of the file: the entries of `like`, with those of the folder."""
    metadata = metadata_of(like)
    dropped = {*REPLACED, *description.left_out, *description.entries}
    kept = [
        (key, kind, metadata.raw[start:stop])
        for key, (kind, start, stop) in metadata.spans.items()
        if key not in dropped and not key.startswith(REPLACED_PREFIXES)
    ]
    tags = metadata.get("general.tags", [])
    tags = tags if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) else []
    return [
        *kept, *description.entries.values(), text_entry("general.name", name),
        texts_entry("general.tags", [*dict.fromkeys([*tags, "layerswap"])]),
        number_entry("general.quantization_version", 2), text_entry(RECORD_KEY, record),
    ]  # fmt: skip


def main_type(tensors: Iterable[TensorInfo | OutputTensor]) -> str:
    """The type of most elements."""
    counts = Counter[str]()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.elements
    return max(counts, key=counts.__getitem__)


def added_bos(tokenizer: Any) -> str:
    """The BOS that a tokenizer adds to every text; empty if it adds none."""
    adds = tokenizer.bos_token_id is not None
    return str(tokenizer.bos_token) * (
        adds and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    )


def _compare_settings(folder: Checkpoint, like: Checkpoint, description: Description) -> None:
    config, header = text_config(folder.config), like.config
    rope = rope_settings(config)
    config = {**config, "rope_theta": rope.get("rope_theta")}
    architecture = str(metadata_of(like).get("general.architecture"))
    for key, gguf_key in {"num_hidden_layers": "block_count", **SETTINGS, **TAKEN}.items():
        value, stored = config.get(key), header.get(gguf_key, DEFAULTS.get(gguf_key))
        if not isinstance(value, int | float) or not isinstance(stored, int | float):
            continue
        if math.isclose(value, stored, rel_tol=1e-5):
            continue
        if key not in TAKEN:
            raise MergeError(
                f"{like.source}: {gguf_key} is {stored:g}, but `{key}` of {folder.identity} is "
                f"{value:g}; give a GGUF file of the same base"
            )
        entry = _entry_like(f"{architecture}.{gguf_key}", value, stored)
        note = f"{gguf_key}: {value:g} of the folder, in place of {stored:g}"
        description.take(entry, note, differs=key != "max_position_embeddings")
    kind, known = rope.get("rope_type"), header.get("rope.scaling.type")
    scaled = known not in (None, "none") or "rope_freqs.weight" in like.tensors
    if (kind not in (None, "default")) != scaled:
        raise MergeError(
            f"{like.source}: {'has' if scaled else 'has no'} rotary scaling, and the folder's "
            f"`rope_type` is {kind!r}; give a GGUF file of the same base"
        )
    factor, stored = rope.get("factor"), header.get("rope.scaling.factor")
    if isinstance(factor, int | float) and isinstance(stored, float) and factor != stored:
        key = f"{architecture}.rope.scaling.factor"
        note = f"rope.scaling.factor: {factor:g} of the folder, in place of {stored:g}"
        description.take(_entry_like(key, factor, stored), note)


def _compare_tokens(
    tokenizer: Any, folder: Checkpoint, like: Checkpoint, rows: int, description: Description
) -> None:
    """Compare the text of every token, and add the tokens that only the folder has."""
    metadata = metadata_of(like)
    tokens = metadata.get(TOKENS)
    if not isinstance(tokens, list) or "tokenizer.ggml.model" not in metadata:
        raise MergeError(f"{like.source}: has no tokenizer; give a GGUF file of a whole model")
    added = tokenizer.added_tokens_decoder
    texts: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    texts = [*texts[:rows], *[None] * (rows - len(texts))]
    if rows < len(tokens) and any(
        _is_used(metadata, number) for number in range(rows, len(tokens))
    ):
        raise MergeError(
            f"{folder.identity}: has {rows:,} rows, but {like.source} has {len(tokens):,} tokens; "
            "give a GGUF file of the same base"
        )
    changed: dict[int, str] = {}
    for number, text in enumerate(texts):
        stored = tokens[number] if number < len(tokens) else None
        # llama.cpp's converter writes spaces of added tokens as spaces.
        if stored is not None and (text is None or stored in (text, text.replace("\u2581", " "))):
            continue
        if stored is not None and number not in added and _is_used(metadata, number):
            raise MergeError(
                f"{folder.identity}: token {number} is {clipped(repr(text), 40)}, and in "
                f"{like.source} {clipped(repr(stored), 40)}: not the same tokenizer"
            )
        changed[number] = f"[PAD{number}]" if text is None else text
    types = metadata.get(TOKEN_TYPES, [NORMAL] * len(tokens))[:rows]
    wrong = _wrong_types(added, tokens, types) - {*changed}
    if wrong:
        description.note(f"{TOKEN_TYPES}: {len(wrong):,} differ from the folder's added tokens")
    elif not changed and rows == len(tokens):
        return
    whole = [
        changed.get(number, tokens[number] if number < len(tokens) else "")
        for number in range(rows)
    ]
    types = [*types, *[UNUSED] * max(0, rows - len(tokens))]
    types = [NORMAL if number in wrong else kind for number, kind in enumerate(types)]
    for number in added.keys() & {*changed, *wrong}:
        types[number] = CONTROL if added[number].special else USER_DEFINED
    description.entries[TOKENS] = texts_entry(TOKENS, whole)
    description.entries[TOKEN_TYPES] = _list_entry(TOKEN_TYPES, _INT32, "i", types)
    if SCORES in metadata:
        scores = [*metadata[SCORES][:rows], *[ADDED_SCORE] * max(0, rows - len(tokens))]
        description.entries[SCORES] = _list_entry(SCORES, _FLOAT32, "f", scores)
    size = f"{metadata.get('general.architecture')}.vocab_size"
    if size in metadata:
        description.entries[size] = number_entry(size, rows)
    named = [text for number, text in changed.items() if number in added]
    if named:
        shown = ", ".join(map(repr, named[:3])) + (f" and {len(named) - 3} more" * (len(named) > 3))
        description.note(f"added tokens of the folder that {like.source} lacks: {shown}")
    if rows != len(tokens):
        note = f"{rows:,} rows of the folder, in place of {len(tokens):,}"
        description.note(note, differs=False)


def _wrong_types(added: Any, tokens: Sequence[str], types: Sequence[int]) -> set[int]:
    """Find added tokens of the folder that are plain in the file, and the reverse."""
    return {
        number
        for number, (text, kind) in enumerate(zip(tokens, types, strict=False))
        # Runs of spaces, which a converter may set apart, are split alike.
        if (kind == NORMAL if number in added else kind in (CONTROL, USER_DEFINED)) and text.strip()
    }


def _is_used(metadata: Any, number: int) -> bool:
    """True if a token of a GGUF file is no padding."""
    types = metadata.get(TOKEN_TYPES)
    return not (isinstance(types, list) and number < len(types) and types[number] == UNUSED)


def _compare_merges(tokenizer: Any, like: Checkpoint, description: Description) -> None:
    """Compare the merges of a BPE in their order; texts need not reach every one of them."""
    stored = metadata_of(like).get(MERGES)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(stored, list):
        return
    merges = json.loads(backend.to_str())["model"].get("merges", [])
    # llama.cpp's converter shifts a space within a part, since one separates the parts.
    texts = [merge if isinstance(merge, str) else " ".join(p.replace(" ", "\u0120") for p in merge)
             for merge in merges]  # fmt: skip
    if texts != stored:
        wrong = sum(a != b for a, b in zip_longest(texts, stored))
        note = f"{MERGES}: {wrong:,} differ from the folder's"
        description.take(texts_entry(MERGES, texts), note)


def stops_of(tokenizer: Any, folder: Checkpoint) -> set[int]:
    """Return the stop tokens of the folder, by its generation settings and its tokenizer."""
    generation = load_generation_config(folder.folder, named=folder.identity)
    settings = generation.to_dict() if generation else text_config(folder.config)
    given = settings.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return {number for number in (*ids, tokenizer.eos_token_id) if number is not None}


def _compare_sampling(folder: Checkpoint, like: Checkpoint, description: Description) -> None:
    file, metadata = folder.folder / "generation_config.json", metadata_of(like)
    given = read_json_object(file) if file.is_file() else {}
    for key in metadata.spans:
        if key.startswith(SAMPLING):
            name, stored = key.removeprefix(SAMPLING), metadata[key]
            value = given.get(SAMPLING_NAMES.get(name, name))
            if not (isinstance(value, int | float) and f"{value:.5g}" == f"{stored:.5g}"):
                description.leave_out(key, f"{key}: {value} in the folder, in place of {stored}")


def _compare_special_tokens(
    tokenizer: Any, folder: Checkpoint, like: Checkpoint, description: Description
) -> None:
    metadata = metadata_of(like)
    stops = stops_of(tokenizer, folder)
    for name in ("eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        if (stored := metadata.get(key)) is not None and stored not in stops:
            description.leave_out(key, f"{key}: {stored}, at which the folder does not stop")
    for name in ("bos", "eos", "unk", "pad"):
        key = f"tokenizer.ggml.{ {'unk': 'unknown', 'pad': 'padding'}.get(name, name) }_token_id"
        value = getattr(tokenizer, f"{name}_token_id")
        if value is not None and metadata.get(key) != value:
            note = f"{key}: {value} of the folder, in place of {metadata.get(key)}"
            changes = name == "bos" or (name == "eos" and metadata.get(key) not in stops)
            description.take(number_entry(key, value), note, differs=changes)
    ids = tokenizer("a").input_ids
    for name, first in (("bos", ids[:1]), ("eos", ids[-1:])):
        special, key = getattr(tokenizer, f"{name}_token_id"), f"tokenizer.ggml.add_{name}_token"
        adds = special is not None and first == [special]
        stored = metadata.get(key)
        if adds != stored and (adds or stored is not None or name == "bos"):
            words = {True: "true", False: "false", None: "llama.cpp's default"}
            note = f"{key}: {words[adds]} as in the folder, in place of {words.get(stored, stored)}"
            entry = (key, _BOOL, struct.pack("<?", adds))
            if stored is None:
                description.entries[key] = entry
            else:
                description.take(entry, note, differs=False)  # the tokens of texts show it


def _compare_templates(tokenizer: Any, like: Checkpoint, description: Description) -> None:
    """Take the chat templates of the folder."""
    metadata = metadata_of(like)
    there = tokenizer.chat_template
    templates = there if isinstance(there, dict) else {"default": there} if there else {}
    keys = {TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": name for name in templates}
    for key in {key for key in metadata.spans if key.startswith(TEMPLATE)} - {*keys}:
        if key == f"{TEMPLATE}s":  # the list of names
            description.left_out.add(key)
        else:
            name = key.removeprefix(TEMPLATE).replace(".", " ")
            note = f"chat template{name}: none, as in the folder; the file's is left out"
            description.leave_out(key, note)
    for key, name in keys.items():
        stored, entry = metadata.get(key), text_entry(key, templates[name])
        if stored == templates[name]:
            description.entries[key] = entry
        else:
            note = "in place of the file's" if stored else "the file has none"
            description.take(entry, f"chat template{f' {name}' * (name != 'default')}: "
                                    f"the folder's, {note}")  # fmt: skip
    if others := [name for name in templates if name != "default"]:
        description.entries[f"{TEMPLATE}s"] = texts_entry(f"{TEMPLATE}s", others)


def _entry_like(key: str, value: float, stored: float) -> Entry:
    """Return an entry of the stored value's type, an integer or a float32."""
    if isinstance(stored, int):
        return number_entry(key, int(value))
    return key, _FLOAT32, struct.pack("<f", value)


def _list_entry(key: str, kind: int, code: str, values: Sequence[float]) -> Entry:
    return key, _ARRAY, struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)
