"""Uploading an output folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from layerswap.checkpoint.hub import HUB_ID
from layerswap.errors import MergeError


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
