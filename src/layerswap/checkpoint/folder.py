"""A Hugging Face checkpoint, opened by its configuration and its headers alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLED_ADAPTER,
    ZERO3,
    Adapter,
    LowRank,
)
from layerswap.checkpoint.gguf import Metadata, configuration, read_gguf
from layerswap.checkpoint.header import TensorInfo, Translated, is_gguf, read_header
from layerswap.checkpoint.hub import BESIDE_WEIGHTS, HUB_ID, PROCESSOR_FILES, download
from layerswap.checkpoint.names import (
    COPIED,
    computed_buffers,
    method_of,
    predicting,
    quantised_names,
    renaming,
    text_config,
    unwrapped,
    weight_of,
)
from layerswap.checkpoint.places import (
    Numbered,
    Pattern,
    Place,
    count_layers,
    place_by_number,
    place_tensors,
)
from layerswap.checkpoint.read import (
    FLOAT_DTYPES,
    as_torch,
    narrowed,
    open_file,
    read_floats,
    read_tensor,
)
from layerswap.checkpoint.remote import (
    CONNECTIONS,
    RemoteFile,
    WeightFile,
    find_weights,
)
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import (
    MAX_JSON_BYTES,
    clipped,
    open_source,
    quoted,
    read_json_object,
)
from layerswap.ground.types import PathLike

if TYPE_CHECKING:
    import torch

    from layerswap.checkpoint.read import Floats

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
COPIED_SETTINGS = (
    "generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    *PROCESSOR_FILES,
)  # fmt: skip
"""JSON files that a merge copies unread."""
MODEL_FILES = ("model*.safetensors", INDEX, "pytorch_model*.bin")
"""Forms of the names of a full model's weights."""
NUMBERED = re.compile(r"model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
AGAIN = "a download was interrupted, so download the checkpoint again"
NOT_SAFETENSORS = {
    "*model*.bin": "has only pickled weights (.bin); load the model with transformers and save it "
    "again",
    "global_step*/": "is a checkpoint of DeepSpeed; join its parts with zero_to_fp32.py",
    "*/*.distcp": "is a checkpoint of FSDP; join its parts with `accelerate merge-weights`",
    **{
        f"*.{end}": f"has only weights of another kind (.{end}); convert them to safetensors"
        for end in ("pth", "pt", "ckpt", "h5", "msgpack", "onnx", "npz")
    },
}
"""Patterns of weights in other formats, with the message for each."""
HUB_GGUF = re.compile(
    rf"(?P<id>{HUB_ID.pattern})(?:@(?P<revision>[^/]+))?/(?P<file>[^@]+\.gguf)", re.IGNORECASE
)
"""A GGUF file on the Hub: `owner/name/file.gguf` or `owner/name@revision/file.gguf`."""
HUB_PAGE = re.compile(rf"https?://(?:huggingface\.co|hf\.co)/(?P<id>{HUB_ID.pattern})")
MOST_INDEXED = 500_000
"""Most tensors of a checkpoint; Kimi K2 has 208,000 in its quantised form."""
PLAIN_TYPES = ("llama", "mistral", "qwen2", "gemma", "gemma2", "gemma3_text")
"""Model types whose matrices have the shapes of Llama's, and whose `head_dim` has no default."""
CONV1D_TYPES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt")
"""Model types whose matrices are stored [in, out] (transformers' Conv1D)."""

LAYER_COUNTS = (
    "decoder_layers", "num_decoder_layers",  # BART: the other counts are its encoder's
    "num_hidden_layers", "n_layer", "num_layers", "n_layers",
)  # fmt: skip
"""Configuration keys for the number of layers, the decoder's own first."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, with no tensor loaded.

    Attributes:
        source: name that the user gave: a folder, a file, or a Hub id.
        revision: the Hub commit, None for a local folder.
        folder: folder with the files.
        config: the content of `config.json`.
        tensors: every tensor by name, in the order of files and of bytes within a file. With an
            adapter they are its base's; `low_rank` is added to them.
        places: the place of every tensor.
        adapter: the adapter, if the checkpoint is one over its base.
        low_rank: the adapter's low-rank deltas, by tensor.
        gguf: the metadata of a GGUF file; `folder` is then that file, and `config` comes from its
            header.
        numbered: how layers were identified when names do not reveal every role; else None.
        ignored: tensors that transformers does not load: of multi-token prediction, and buffers.
        notes: remarks on how the files were read.

    Example:
        >>> import layerswap as ls
        >>> expert = ls.open_checkpoint("math-expert")
        >>> expert.tensors["model.norm.weight"].shape
        (64,)
    """

    source: str
    revision: str | None
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, Place]
    adapter: Adapter | None = None
    low_rank: Mapping[str, LowRank] = field(default_factory=dict)
    gguf: Metadata | None = None
    numbered: Numbered | None = None
    ignored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        size = f"{len(self.tensors)} tensors, {self.nbytes / 1e6:,.1f} MB"
        return f"<Checkpoint {self.identity}: {self.layers} layers, {size}>"

    @cached_property
    def layers(self) -> int:
        """Number of transformer layers."""
        return _configured_layers(self.config) or count_layers(self.places)

    @property
    def files(self) -> list[WeightFile]:
        """The weight files; for an adapter, without the base's."""
        tensors = [*self.tensors.values()]
        tensors += [info for low in self.low_rank.values() for info in (low.a, low.b)]
        if self.adapter is not None:
            lows = self.adapter.modules.values()
            tensors = [*(low.a for low in lows), *self.adapter.saved.values()]
        return sorted({tensor.file for tensor in tensors}, key=str)

    @property
    def all_files(self) -> list[WeightFile]:
        """All weight files; for an adapter, with the base's."""
        return sorted({*self.files, *(info.file for info in self.tensors.values())}, key=str)

    @property
    def in_place(self) -> bool:
        """True if weights are read in place, from the Hub."""
        return any(isinstance(file, RemoteFile) for file in self.all_files)

    @cached_property
    def vocabulary_tensors(self) -> tuple[str, ...]:
        """Names of the tensors with one row per token: the embedding, the head and its bias."""
        size = text_config(self.config).get("vocab_size")
        return tuple(
            name
            for name, place in self.places.items()
            if place.role in ("embedding", "head")
            and name in self.tensors
            and self.tensors[name].shape[:1] == (size,)
            and not any(word in name for word in ("position", "wpe"))
        )

    @cached_property
    def quantised(self) -> frozenset[str]:
        """Names of the tensors of quantised weights, which can only be copied."""
        return quantised_names(self.tensors) if method_of(self.config) else frozenset()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding; 0 for a checkpoint opened without tensors."""
        names = self.vocabulary_tensors
        return self.tensors[names[0]].shape[0] if names else 0

    def transposes(self, name: str) -> bool:
        """True for a matrix stored [in, out], as transformers' Conv1D does.

        Embedding and head are never Conv1D, even if the layers are.
        """
        return self.config.get("model_type") in CONV1D_TYPES and self.places[name].layer is not None

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype, for torch; `elements` reads part of a tensor.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.source}: no tensor {name!r}")
        info = self.tensors[name]
        if name not in self.low_rank:
            return as_torch(read_tensor(info), info.dtype)
        whole = narrowed(self.elements(name, 0, info.elements), info.dtype)
        return as_torch(whole, info.dtype).reshape(info.shape)

    def elements(self, name: str, start: int, stop: int) -> Floats:
        """Read elements [start, stop) of a floating-point tensor in row-major order, as a vector.

        The dtype is float32; or float64 for a tensor stored so without an adapter.

        Raises:
            CheckpointError: the file cannot be read.
        """
        info = self.tensors[name]
        with open_file(info.file) as handle:
            stored = read_floats(handle, info, start, stop)
        if name not in self.low_rank:
            return stored
        low = self.low_rank[name]
        delta = low.elements(low.factors(), start, stop)
        delta += stored
        return delta

    @property
    def identity(self) -> str:
        """Name of the checkpoint in messages and records."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


# --- opening ---


def open_checkpoint(
    source: PathLike,
    *,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
    in_place: bool = False,
    quantised: bool = False,
    fetched: tuple[Path, str | None] | None = None,
) -> Checkpoint:
    """Open a checkpoint: a local folder, a GGUF file, or a Hub id that is downloaded first.

    Reads `config.json`, the index and the safetensors headers, or the GGUF header, and checks
    them against each other. No tensor is read.

    Args:
        source: local folder, path of a `.gguf` file, or `owner/name[@revision]` on the Hub, with
            `/file.gguf` behind it for a GGUF file.
        revision: Hub branch, tag or commit; the commit that it resolves to is recorded.
        patterns: places of tensors with names that no built-in layout covers.
        in_place: do not download weights that are not in the local cache, and read spans of them
            as they are needed (see `checkpoint.remote`).
        quantised: open quantised weights too, whose tensors can only be copied.
        fetched: result of `fetch_checkpoint` for the source, if it was fetched already.

    Raises:
        CheckpointError: it does not exist, is incomplete, ambiguous or damaged, or has tensors
            that no layout places.

    Example:
        >>> import layerswap as ls
        >>> opened = ls.open_checkpoint("math-expert")
        >>> opened.layers, opened.places["model.layers.1.mlp.up_proj.weight"]
        (3, Place(layer=1, role='mlp'))
    """
    source = os.fspath(source)
    if is_gguf(source):
        return _open_gguf(source, revision, patterns, in_place=in_place)
    in_place = in_place and not is_folder(source) and not _offline()
    folder, commit = fetched or fetch_checkpoint(source, revision, weights=not in_place)
    name = source.partition("@")[0] if commit else source
    find = find_weights(name, folder, commit) if in_place else folder.joinpath
    try:
        config = _read_config(folder)
        known = COPIED if quantised else ()
        try:
            tensors = _read_tensors(folder, find)
        except CheckpointError:
            _refuse_quantised(folder, config, {}, known)  # the cause, if it is one
            raise
        _refuse_quantised(folder, config, tensors, known)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    with error_context(source):
        plain, wrappers = unwrapped(tensors)
        tensors = {plain[stored]: info for stored, info in tensors.items()}
        _check_shapes(tensors, config)
        predicted = _predicted(tensors, config, patterns)
        places, numbered = _place_all(tensors, predicted, config, patterns)
    return Checkpoint(
        name, commit, folder, config, tensors, places, numbered=numbered,
        ignored=predicted | computed_buffers(tensors, config),
        notes=(*_wrapper_notes(wrappers), *_leftover_notes(folder)),
    )  # fmt: skip


def _open_gguf(
    source: str, revision: str | None, patterns: Sequence[Pattern], *, in_place: bool
) -> Checkpoint:
    folder, commit, find = Path(source).expanduser(), None, None
    file: WeightFile = folder.resolve() if folder.is_symlink() else folder  # as the user named it
    hub = HUB_GGUF.fullmatch(source) if not folder.exists() else None
    in_place = in_place and not _offline()
    if hub is not None:
        folder, commit = download(hub["id"], revision or hub["revision"], weights=False)
        source = f"{hub['id']}/{hub['file']}"
        find = find_weights(hub["id"], folder, commit)
        if not in_place:
            _download_gguf(source, commit)
        try:
            file = find(hub["file"])
        except FileNotFoundError:
            raise CheckpointError(f"{source}: there is no such file") from None
    elif revision is not None:
        raise CheckpointError(f"{source}: a file has no revision; leave it out")
    else:
        _refuse_url(source)
    header = read_gguf(file, find)
    with error_context(source):
        config = configuration(header, any_architecture=bool(patterns))
        places, numbered = _place_all(
            header.tensors, _predicted(header.tensors, config, patterns), config, patterns
        )
    return Checkpoint(
        source, commit, folder if find else Path(str(file)), config, header.tensors, places,
        gguf=header.metadata, numbered=numbered,
    )  # fmt: skip


def _download_gguf(source: str, commit: str) -> Path:
    """Download a GGUF file of the Hub with its other parts; return the repository's folder."""
    hub = HUB_GGUF.fullmatch(source)
    assert hub is not None, "the source of a GGUF file on the Hub"
    parts = re.sub(r"-\d{5}(?=-of-\d{5}\.gguf$)", "-*", hub["file"])
    return download(hub["id"], commit, weights=False, files=[parts])[0]


def open_configuration(source: str, *, revision: str | None = None) -> Checkpoint:
    """Open only a checkpoint's configuration; no weights are downloaded."""
    folder, commit = fetch_checkpoint(source, revision, weights=False)
    name = source.partition("@")[0] if commit else source
    return Checkpoint(name, commit, folder, _read_config(folder), {}, {})


def quantisation_in(folder: Path) -> str | None:
    """Name the quantisation of the weights in a folder; None for plain or missing weights."""
    path = folder / CONFIG
    return method_of(read_json_object(path, infinities=True)) if path.is_file() else None


def downloaded(checkpoint: Checkpoint) -> Checkpoint:
    """Download the weights of a checkpoint that is read in place."""
    if not checkpoint.in_place:
        return checkpoint
    assert checkpoint.revision is not None, "a checkpoint of the Hub"
    if is_gguf(checkpoint.source):
        folder = _download_gguf(checkpoint.source, checkpoint.revision)
    else:
        folder, _ = fetch_checkpoint(checkpoint.source, checkpoint.revision)

    def here(info: TensorInfo) -> TensorInfo:
        file = folder / info.file.name
        if isinstance(info, Translated):
            return replace(info, file=file, stored=here(info.stored))
        return replace(info, file=file)

    return replace(checkpoint, tensors={n: here(i) for n, i in checkpoint.tensors.items()})


def without_unshared(
    experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """Drop ignored tensors that some of the sources lack.

    The Hub's base has layers of multi-token prediction, and its fine-tunes lost them when
    transformers saved them. Older checkpoints store buffers that newer ones compute.
    """
    opened = [c for c in (*experts.values(), *([base] if base else [])) if c.tensors]
    ignored = frozenset[str]().union(*(c.ignored for c in opened))
    unshared = {name for name in ignored if any(name not in c.tensors for c in opened)}
    kept = {name: _without(expert, unshared) for name, expert in experts.items()}
    return kept, base and _without(base, unshared)


def _without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    gone = checkpoint.tensors.keys() & names
    if not gone:
        return checkpoint
    note = (
        f"leaves out {len(gone)} tensors that transformers does not load, such as {min(gone)!r}: "
        "not all sources have them"
    )
    return replace(
        checkpoint,
        tensors={n: info for n, info in checkpoint.tensors.items() if n not in gone},
        places={n: place for n, place in checkpoint.places.items() if n not in gone},
        ignored=checkpoint.ignored - gone,
        notes=(*checkpoint.notes, note),
    )


def renamed_like(checkpoint: Checkpoint, like: Checkpoint) -> Checkpoint:
    """Return a checkpoint with another's names for tensors that transformers reads as the same."""
    if checkpoint.gguf is not None or like.gguf is not None or not like.tensors:
        return checkpoint
    new = renaming(checkpoint.places.keys(), like.places.keys())
    if not new:
        return checkpoint
    first = min(new)
    note = (
        f"{len(new)} names of {checkpoint.identity} are read as in {like.identity} "
        f"({first!r} as {new[first]!r}), as transformers reads them"
    )
    return replace(
        checkpoint,
        tensors={new.get(n, n): info for n, info in checkpoint.tensors.items()},
        places={new.get(n, n): place for n, place in checkpoint.places.items()},
        low_rank={new.get(n, n): low for n, low in checkpoint.low_rank.items()},
        ignored=frozenset(new.get(n, n) for n in checkpoint.ignored),
        notes=(*checkpoint.notes, note),
    )


def is_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter and not a full checkpoint.

    The weights decide: Axolotl writes the base's `config.json` next to an adapter.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    has_adapter = any((folder / name).is_file() for name in (ADAPTER_WEIGHTS, PICKLED_ADAPTER))
    return not (folder / CONFIG).is_file() or (has_adapter and not _has_model(folder))


def _has_model(folder: Path) -> bool:
    """True if a folder holds files with a full model's weights."""
    return any(path for form in MODEL_FILES for path in folder.glob(form))


# --- fetching ---


def fetch_checkpoint(
    source: str, revision: str | None = None, *, weights: bool = True
) -> tuple[Path, str | None]:
    """Return a checkpoint's local folder, and its full Hub commit (None if not from the Hub).

    A Hub id `owner/name[@revision]` is downloaded first; `revision` overrides the one in `source`.
    Without `weights`, only the files next to the weights are downloaded.
    """
    folder, commit = _fetch(source, revision, weights=weights)
    for name in BESIDE_WEIGHTS:  # other libraries open them by their names, and merges copy them
        path = folder / name
        _check_link(path)
        if path.exists() and not path.is_dir():
            with open_source(path) as handle:
                if os.fstat(handle).st_size > MAX_JSON_BYTES:
                    raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
            if name in COPIED_SETTINGS:
                read_json_object(path, infinities=True)
    return folder, commit


def _check_link(path: Path) -> None:
    """Refuse a broken link, which an interrupted download leaves in a cache."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path}: a link to a file that does not exist; {AGAIN}")


def _fetch(source: str, revision: str | None, *, weights: bool) -> tuple[Path, str | None]:
    try:
        folder = Path(source).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except RuntimeError:
        raise CheckpointError(f"{source}: no such user, so no such folder") from None
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error.strerror})") from None
    if is_folder:
        if revision is not None:
            raise CheckpointError(f"{source}: a local folder has no revision; leave it out")
        return folder, None
    if exists:
        raise CheckpointError(f"{source}: {_file_kind(folder)}")
    _refuse_url(source)
    name, _, inline = source.partition("@")
    near = _near_folder(source)
    hint = f"{source}: no such folder; did you mean {near!r}?"
    if not HUB_ID.fullmatch(name):
        if near is not None:
            raise CheckpointError(hint)
        raise CheckpointError(f"{source}: no such folder, and not a Hub id like 'owner/name'")
    try:
        return download(name, revision or inline or None, weights=weights)
    except CheckpointError as error:
        raise error if near is None else CheckpointError(f"{hint} (As a Hub id: {error})") from None


def _file_kind(path: Path) -> str:
    """What a file is in place of a folder, and what to give."""
    start = b""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        return "a GGUF file without the suffix; give a link to it, made with `ln -s`, as x.gguf"
    return "a file; give the folder that holds the checkpoint"


def _refuse_url(source: str) -> None:
    if "://" in source:
        page = HUB_PAGE.match(source)
        what = f"the Hub id: {page['id']}" if page else "a Hub id, or download it and give its path"
        raise CheckpointError(f"{source}: a URL; give {what}")


def _near_folder(source: str) -> str | None:
    """Find a folder with a similar name in the missing folder's parent."""
    path = Path(source).expanduser()
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return None
    close = get_close_matches(path.name, names, n=1)
    return str(path.with_name(close[0])) if close else None


def is_folder(source: str) -> bool:
    """True for the path of an existing folder."""
    try:
        return Path(source).expanduser().is_dir()
    except (OSError, RuntimeError):
        return False


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


# --- the configuration, and the places by it ---


def _refuse_quantised(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    known: Collection[str],
) -> None:
    """Refuse quantised weights, except in the `known` formats, and a wrong `quantization_config`.

    `tensors` is empty if the weights cannot be read.
    """
    method = method_of(config)
    if method is None:
        return
    plain = all(info.dtype in FLOAT_DTYPES for info in tensors.values())
    if tensors and plain and not quantised_names(tensors):
        raise CheckpointError(
            f"{folder}: its weights are not quantised, but {CONFIG} says that they are (some tools "
            "leave this entry after a merge); remove quantization_config from it"
        )
    if method not in known:
        can = "can only be copied by a swap" if method in COPIED else "cannot be merged"
        raise CheckpointError(
            f"{folder}: quantised weights ({clipped(method, 40)}) {can}; use the unquantised "
            "checkpoint"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    if is_adapter(folder):
        raise CheckpointError(f"{folder}: a LoRA adapter, where a full checkpoint is needed")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; {_other_kind(folder)}")
    config = read_json_object(folder / CONFIG, infinities=True)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / CONFIG}: architectures is {quoted(names)}, not a list of class names"
        )
    if not isinstance(config.get("model_type") or "", str):
        raise CheckpointError(
            f"{folder / CONFIG}: model_type is {quoted(config['model_type'])}, not a name"
        )
    return config


def _other_kind(folder: Path) -> str:
    """Describe a folder without a configuration or weights, and name the path to give."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"it holds GGUF files; give one of them, such as {str(ggufs[0])!r}"
    kinds = {
        "checkpoint-*/": "a trainer's folder", "snapshots/*/": "the cache of a Hub repository",
        "*/": "a folder of folders",
    }  # fmt: skip
    for form, kind in kinds.items():
        inner = [path for path in folder.glob(form) if (path / CONFIG).is_file()]
        inner += [path for path in folder.glob(form) if (path / ADAPTER_CONFIG).is_file()]
        if inner:
            newest = max(inner, key=lambda path: (len(path.name), path.name))
            return f"it is {kind}; give a checkpoint in it, such as {str(newest)!r}"
    if any(folder.glob("snapshots/*")) or any(folder.glob(".cache/**/*.incomplete")):
        return "a download that was interrupted; download it again"
    if (folder / CONFIG).is_file():
        return "download its safetensors too, or give the folder that holds them"
    return "not a Hugging Face checkpoint"


def _check_shapes(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Refuse empty tensors, and matrices of another shape than the configuration says."""
    weights = ((name, info) for name, info in tensors.items() if name.endswith("weight"))
    empty = [name for name, info in weights if 0 in info.shape]
    if empty:
        raise CheckpointError(
            f"{len(empty)} of {len(tensors)} tensors have no elements, such as {quoted(empty[0])} "
            f"of shape {list(tensors[empty[0]].shape)}; {ZERO3}"
        )
    expected = expected_shapes(config)
    for name, info in tensors.items() if expected else ():
        shape = expected.get(re.sub(r".*\.layers\.\d+\.", "", name))
        if shape is not None and info.dtype in ("U8", "I8"):
            raise CheckpointError(
                f"{quoted(name)} is {info.dtype}, as quantised weights are; use the unquantised "
                "checkpoint"
            )
        if shape is not None and info.shape != shape:
            raise CheckpointError(
                f"{quoted(name)} is {list(info.shape)}, but by {CONFIG} it is {list(shape)}; the "
                "file is a part of a sharded model, or the configuration is another model's"
            )


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's matrices by their names in it, for plain families."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    given = (config.get(key) for key in keys)
    sizes = [size for size in given if type(size) is int and size > 0]
    if config.get("model_type") not in PLAIN_TYPES or len(sizes) < len(keys):
        return {}
    width, inner, heads, kv = sizes
    head = config.get("head_dim") or width // heads
    queries, keys_values = (heads * head, width), (kv * head, width)
    return {
        "self_attn.q_proj.weight": queries,
        "self_attn.k_proj.weight": keys_values,
        "self_attn.v_proj.weight": keys_values,
        "self_attn.o_proj.weight": queries[::-1],
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def _configured_layers(config: Mapping[str, Any]) -> int | None:
    text = text_config(config)
    for key in LAYER_COUNTS:
        if type(text.get(key)) is int:
            return int(text[key])
    kinds = text.get("layers_block_type")  # Nemotron-H has no other count
    return len(kinds) if isinstance(kinds, list) and kinds else None


def _place_all(
    names: Collection[str],
    predicted: frozenset[str],
    config: Mapping[str, Any],
    patterns: Sequence[Pattern],
) -> tuple[dict[str, Place], Numbered | None]:
    """Place all tensors by patterns and tables; otherwise by the only list of layers.

    Tensors of multi-token prediction have no layer.
    """
    quantised = method_of(config) is not None
    weights = {n: weight_of(n) if quantised else n for n in names if n not in predicted}
    stored = [*dict.fromkeys(weights.values())]
    places, numbered = _place_stored(stored, config, _configured_layers(config), patterns)
    other = Place(None, "other")
    return {name: places.get(weights.get(name, name), other) for name in names}, numbered


def _predicted(
    names: Iterable[str], config: Mapping[str, Any], patterns: Sequence[Pattern]
) -> frozenset[str]:
    """Find the tensors of multi-token prediction that no pattern places."""
    found = predicting(names, _configured_layers(config))
    return frozenset(n for n in found if not any(pattern.place(n) for pattern in patterns))


def _wrapper_notes(words: Sequence[str]) -> tuple[str, ...]:
    """A note on removed words of training wrappers."""
    if not words:
        return ()
    return (f"{', '.join(words)}: a training wrapper's words in its names are left out",)


def _leftover_notes(folder: Path) -> tuple[str, ...]:
    """A note on an adapter that lies next to full weights."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return ()
    return (
        f"its folder also holds an adapter ({ADAPTER_CONFIG}), which is not used; transformers "
        "adds it to the full weights when it loads the folder, so remove it if it is merged",
    )


def _place_stored(
    names: Sequence[str],
    config: Mapping[str, Any],
    layers: int | None,
    patterns: Sequence[Pattern],
) -> tuple[dict[str, Place], Numbered | None]:
    try:
        return place_tensors(names, layers=layers, patterns=patterns), None
    except CheckpointError:
        # An encoder-decoder's configuration does not say whose layers it counts.
        if layers is None or config.get("is_encoder_decoder"):
            raise
        placed = place_by_number(names, layers=layers, patterns=patterns)
        if placed is None:
            raise
        return placed


# --- shards and their index ---

Find = Callable[[str], WeightFile]
"""Finds a weight file by name; raises FileNotFoundError, or returns a path that does not exist."""


def _read_tensors(folder: Path, find: Find) -> dict[str, TensorInfo]:
    index = folder / INDEX
    try:
        single = find(SINGLE)
    except FileNotFoundError:
        single = folder / SINGLE
    if isinstance(single, Path):
        _check_link(single)
    has_single, has_index = isinstance(single, RemoteFile) or single.exists(), index.exists()
    if has_single and has_index:
        raise CheckpointError(
            f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is out of date"
        )
    if has_index:
        return _read_shards(folder, index, find)
    if has_single:
        return read_header(single)
    if names := sorted(path.name for path in folder.glob("*.safetensors")):
        whole = _whole_set(names)
        if whole:
            return {n: i for name in whole for n, i in read_header(folder / name).items()}
        why = f"has {names[0]} but neither {SINGLE} nor {INDEX}; "
        if names == ["consolidated.safetensors"]:
            why += "its names are not those of transformers: download model*.safetensors"
        else:
            unnumbered = len(names) == 1 and not NUMBERED.fullmatch(names[0])
            why += f"if it is the whole model, rename it to {SINGLE}" if unnumbered else AGAIN
    else:
        why = next((why for form, why in NOT_SAFETENSORS.items() if any(folder.glob(form))), "")
        why = why or f"has no weights; {_other_kind(folder)}"
    raise CheckpointError(f"{folder}: {why}")


def _whole_set(names: Iterable[str]) -> list[str]:
    """Return the shard names of a complete set, also without an index; otherwise an empty list."""
    parts = {name: match for name in names if (match := NUMBERED.fullmatch(name))}
    counts = {int(match["count"]) for match in parts.values()}
    numbers = [int(match["number"]) for match in parts.values()]
    return (
        list(parts) if [*counts] == [len(parts)] and numbers == [*range(1, 1 + len(parts))] else []
    )


def _read_shards(folder: Path, index: Path, find: Find) -> dict[str, TensorInfo]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    if len(weight_map) > MOST_INDEXED:
        raise CheckpointError(f"{index}: lists more than {MOST_INDEXED:,} tensors")
    names = sorted({_shard_name(value, index) for value in weight_map.values()})

    listed = Counter(weight_map.values())

    def read(name: str) -> dict[str, TensorInfo]:
        try:
            file = find(name)
            if isinstance(file, Path) and not file.is_file():
                raise FileNotFoundError
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: shard {name}, named by {INDEX}, is missing; {AGAIN}"
            ) from None
        header = read_header(file)
        for tensor in header.values() if len(header) > listed[name] else ():
            _check_indexed(tensor, weight_map.get(tensor.name), index)
        return header

    tensors: dict[str, TensorInfo] = {}
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = list(pool.map(read, names))
    for tensor in (tensor for header in headers for tensor in header.values()):
        _check_indexed(tensor, weight_map.get(tensor.name), index)
        tensors[tensor.name] = tensor
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index}: lists {quoted(absent[0])} in {weight_map[absent[0]]}, which does not hold it"
            + (f" (and {len(absent) - 1} more)" if len(absent) > 1 else "")
            + "; take it out of the index, or download both again"
        )
    return tensors


def _shard_name(value: object, index: Path) -> str:
    """Check that a value of a weight_map is the bare name of a safetensors file."""
    if not isinstance(value, str):
        raise CheckpointError(f"{index}: weight_map has a value that is not text")
    if not value.endswith(".safetensors") or not value.isprintable():
        raise CheckpointError(f"{index}: {quoted(value)} is not the name of a safetensors file")
    # By the rules of both systems: a backslash or a drive must not mean different files.
    if value != PurePosixPath(value).name or value != PureWindowsPath(value).name:
        raise CheckpointError(f"{index}: {quoted(value)} points outside its folder")
    return value


def _check_indexed(tensor: TensorInfo, listed: object, index: Path) -> None:
    name = quoted(tensor.name)
    if listed is None:
        raise CheckpointError(f"{tensor.file}: holds {name}, which {index.name} lacks")
    if listed != tensor.file.name:
        raise CheckpointError(f"{tensor.file}: holds {name}, which {index.name} puts in {listed}")
