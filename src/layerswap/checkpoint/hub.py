"""The Hugging Face Hub: downloads into the local cache, and uploads of merged folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerswap.ground.errors import CheckpointError, MergeError, one_line

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ALLOWED_FILES = (
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md", "[0-9]_*/*.safetensors"
)  # fmt: skip
"""Files to download: weights, configuration, tokenizer and card, but no pickles and no code. The
last pattern is for modules of sentence-transformers (`2_Dense`), if other weights stay remote."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "sentencepiece.bpe.model",
    "spiece.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
)  # fmt: skip
TRAINING = "layerswap-training.json"
"""The record in every folder that `layerswap train` writes."""
BESIDE_WEIGHTS = (
    "config.json", "model.safetensors.index.json", "adapter_config.json", "generation_config.json",
    *TOKENIZER_FILES, *PROCESSOR_FILES, TRAINING, "README.md",
)  # fmt: skip
"""The other files of a checkpoint, which a merge reads or copies."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""Names of the weights in a merged folder."""


def download(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    files: Iterable[str] = (),
) -> tuple[Path, str]:
    """Download a Hub repository; return its folder in the local cache and its full commit.

    `files` are patterns of other files to download.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    allowed = [pattern for pattern in ALLOWED_FILES if weights or pattern != "*.safetensors"]
    allowed += files
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed))
    except GatedRepoError:
        why = "the repository is gated; accept its terms on the Hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why = "no such local folder, and no such repository on the Hub (or it is private)"
    except RevisionNotFoundError:
        why = f"the repository has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "no such local folder, not whole in the local cache, and the Hub cannot be reached"
    except HFValidationError as error:
        why = f"not a valid Hub id ({error})"
    except Exception as error:  # a full disk, a proxy, a broken transfer: no common class
        why = f"the download failed ({type(error).__name__}: {one_line(error, 300)})"
    else:
        return folder, folder.name
    raise CheckpointError(f"{name}: {why}")


def local_name(folder: Path) -> str:
    """Return a local folder's name as the user wrote it, without resolving links."""
    return Path(os.path.abspath(folder)).name  # noqa: PTH100, which would follow the link


def check_hub_id(name: str) -> None:
    """Refuse a name that is not of the form `owner/name`."""
    if not HUB_ID.fullmatch(name):
        raise MergeError(f"--push: {name!r} is not a Hub id like 'owner/name'")


def push_folder(folder: Path, name: str, *, private: bool = True, texts: Mapping[str, str]) -> str:
    """Upload a merged folder to a Hub repository, created if missing; return the commit's URL.

    `texts` replaces the contents of its files. All files become visible in one commit, after the
    last one arrived. What an interrupted upload sent is not sent again. Weights of another merge in
    the repository are removed.
    """
    from huggingface_hub import HfApi

    check_hub_id(name)
    api = HfApi(library_name="layerswap")
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = _commit_folder(api, folder, name, texts)
    except Exception as error:  # the transports have no common class of errors
        why = f"{type(error).__name__}: {one_line(error, 300)}"
        raise MergeError(
            f"{name}: the upload failed ({why}); {folder} is complete and {name} unchanged; run "
            "the command again with --overwrite to resume the upload"
        ) from None
    return str(commit.commit_url)


def _commit_folder(api: Any, folder: Path, name: str, texts: Mapping[str, str]) -> Any:
    """Upload a folder in one commit; `upload_folder` splits slow uploads into several."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    contents: dict[str, Any] = named | {k: v.encode() for k, v in texts.items()}
    operations: list[Any] = [CommitOperationAdd(*entry) for entry in contents.items()]
    old = [path for path in api.list_repo_files(name) if WEIGHTS.fullmatch(path)]
    operations += [CommitOperationDelete(path) for path in old if path not in named]
    return api.create_commit(name, operations, commit_message="Merge with layerswap")
