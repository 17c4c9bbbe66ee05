"""Sources of checkpoints: folders and Hub ids, and mistakes in their place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from layerswap.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PICKLED_ADAPTER
from layerswap.checkpoint.hub import BESIDE_WEIGHTS, HUB_ID, PROCESSOR_FILES, download
from layerswap.checkpoint.places import Pattern
from layerswap.checkpoint.remote import WeightFile, find_weights
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import MAX_JSON_BYTES, open_source, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
COPIED_SETTINGS = (
    "generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json",
    *PROCESSOR_FILES,
)  # fmt: skip
"""JSON files that a merge copies unread."""
MODEL_FILES = ("model*.safetensors", "*-of-*.safetensors", INDEX, "pytorch_model*.bin")
"""Forms of the names of a full model's weights."""
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
HUB_PAGE = re.compile(rf"https?://(?:huggingface\.co|hf\.co)/(?P<id>{HUB_ID.pattern})")


@dataclass(frozen=True)
class Given:
    """The source of a checkpoint, with the settings for opening it.

    Attributes:
        source: local folder, path of a `.gguf` file, or `owner/name[@revision]` on the Hub, with
            `/file.gguf` behind it for a GGUF file.
        revision: Hub branch, tag or commit.
        patterns: places of tensors with names that no built-in layout covers.
        in_place: do not download weights that are not in the local cache.
        whole: a full model is needed, not an adapter.
        plain: weights that can be computed with are needed.
        weights: weights are needed, not only the files next to them.
    """

    source: str
    revision: str | None = None
    patterns: Sequence[Pattern] = ()
    in_place: bool = False
    whole: bool = False
    plain: bool = False
    weights: bool = True

    @cached_property
    def fetched(self) -> tuple[Path, str | None]:
        """The folder, and its commit if it is from the Hub."""
        weights = self.weights and not self._from_hub
        return fetch_checkpoint(self.source, self.revision, weights=weights)

    @property
    def name(self) -> str:
        """The name without the revision, which is recorded apart."""
        return self.source.partition("@")[0] if self.fetched[1] else self.source

    @property
    def find(self) -> Callable[[str], WeightFile]:
        """Finds a weight file by its name, in the folder or on the Hub."""
        folder, commit = self.fetched
        return find_weights(self.name, folder, commit) if self._from_hub else folder.joinpath

    @property
    def _from_hub(self) -> bool:
        return self.in_place and not is_folder(self.source) and not offline()


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
        check_link(path)
        if path.exists() and not path.is_dir():
            with open_source(path) as handle:
                if os.fstat(handle).st_size > MAX_JSON_BYTES:
                    raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
            if name in COPIED_SETTINGS:
                read_json_object(path, infinities=True)
    return folder, commit


def check_link(path: Path) -> None:
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
    refuse_url(source)
    name, _, inline = source.partition("@")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{source}: no such folder, and not a Hub id like 'owner/name'")
    return download(name, revision or inline or None, weights=weights)


def _file_kind(path: Path) -> str:
    """Describe a file in place of a folder, with a remedy."""
    start = b""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        return "a GGUF file without the suffix; give a link to it, made with `ln -s`, as x.gguf"
    return "a file; give the folder that holds the checkpoint"


def refuse_url(source: str) -> None:
    """Refuse a URL, and name the Hub id in it."""
    if "://" in source:
        page = HUB_PAGE.match(source)
        what = f"the Hub id: {page['id']}" if page else "a Hub id, or download it and give its path"
        raise CheckpointError(f"{source}: a URL; give {what}")


def is_folder(source: str) -> bool:
    """True for the path of an existing folder."""
    try:
        return Path(source).expanduser().is_dir()
    except (OSError, RuntimeError):
        return False


def offline() -> bool:
    """True if huggingface_hub may not ask the Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter and not a full checkpoint.

    The weights decide: Axolotl writes the base's `config.json` next to an adapter.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    has_adapter = any((folder / name).is_file() for name in (ADAPTER_WEIGHTS, PICKLED_ADAPTER))
    has_model = any(any(folder.glob(form)) for form in MODEL_FILES)
    return not (folder / CONFIG).is_file() or (has_adapter and not has_model)


def other_kind(folder: Path) -> str:
    """Describe a folder without a configuration or weights, and name the path to give."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"it holds GGUF files; give one of them, such as {str(ggufs[0])!r}"
    if (folder / "modules.json").is_file():  # a module alone would lose the others
        again = "load it with sentence-transformers and save it again, in the layout of today"
        parts = [str(path.parent) for path in sorted(folder.glob("*_Transformer/config.json"))]
        advice = f"; merge its transformers one by one, such as {parts[0]!r}" if parts else ""
        other = f"its first module of sentence-transformers is no transformer{advice}"
        return again if any(folder.glob("0_*/config.json")) else other
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
