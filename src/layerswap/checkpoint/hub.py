"""Checkpoints on the Hugging Face Hub: downloads what a user names, and uploads an output."""

from __future__ import annotations

import re
from pathlib import Path

from layerswap.errors import CheckpointError, MergeError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
"""What is downloaded: weights, configuration, tokenizer and card. Never pickle, never code."""


def download(
    name: str, revision: str | None = None, *, weights: bool = True, pickled: bool = False
) -> tuple[Path, str]:
    """The folder in the local cache that holds a repository of the Hub, and its full commit hash.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit.
        weights: whether to download the weights too.
        pickled: whether to download pickled weights too.

    Raises:
        CheckpointError: the Hub cannot be reached or refuses.
    """
    allowed = [pattern for pattern in ALLOWED_FILES if weights or pattern != "*.safetensors"]
    allowed += ["*.bin"] if pickled else []
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=allowed)
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
    except Exception as error:
        # A full disk, a proxy, a broken transfer: the transports share no class of error.
        why = f"the download failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    else:
        return Path(folder), Path(folder).name
    raise CheckpointError(f"{name}: {why}")


def check_hub_id(name: str) -> None:
    """Refuse what cannot be a repository on the Hub, before any work is done for it.

    Raises:
        MergeError: it is not of the form `owner/name`.
    """
    if not HUB_ID.fullmatch(name):
        raise MergeError(f"--push: {name!r} is not a Hub id like 'owner/name'")


def push_folder(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload a merged folder, creating the repository where there is none.

    Args:
        folder: what `Plan.save` wrote.
        name: `owner/name` on the Hub.
        private: whether only its owner sees a repository that is created.

    Returns:
        The address of the commit.

    Raises:
        MergeError: the Hub cannot be reached, or refuses; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    check_hub_id(name)
    api = HfApi(library_name="layerswap")
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Merge with layerswap"
        )
    except Exception as error:  # the transports share no class of error
        why = " ".join(str(error).split())[:300]
        raise MergeError(
            f"{name}: the upload failed ({type(error).__name__}: {why}); {folder} is whole, upload "
            f"it with `hf upload {name} {folder}`"
        ) from None
    return str(commit.commit_url)
