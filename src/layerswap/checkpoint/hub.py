"""From what the user typed to a local folder: a path, or a Hugging Face Hub id."""

from __future__ import annotations

import re
from pathlib import Path

from layerswap.errors import CheckpointError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
"""What is downloaded: weights, configuration and tokenizer. Never pickle, never code."""


def fetch_checkpoint(source: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The local folder that holds `source`, downloaded first when it is a Hub id.

    Args:
        source: a local folder, or a Hub id `owner/name`, optionally `owner/name@revision`.
        revision: branch, tag or commit on the Hub; overrides the one in `source`.

    Returns:
        The folder, and the full commit hash that the Hub gave (None for a local folder).

    Raises:
        CheckpointError: neither a folder nor a Hub id, or the Hub cannot be reached or refuses.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source}: a local folder has no revision; leave it out")
        return folder, None
    if folder.exists():
        raise CheckpointError(f"{source}: a file; give the folder that holds the checkpoint")
    name, _, inline = source.partition("@")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{source}: no such folder, and not a Hub id like 'owner/name'")
    return _download(name, revision or inline or None)


def _download(name: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(ALLOWED_FILES))
    except GatedRepoError:
        why = "the repository is gated; accept its terms on the Hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why = "no such local folder, and no such repository on the Hub (or it is private)"
    except RevisionNotFoundError:
        why = f"the repository has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "no such local folder, not in the local cache, and the Hub cannot be reached"
    except HFValidationError as error:
        why = f"not a valid Hub id ({error})"
    except OSError as error:
        why = f"the Hub cannot be reached ({type(error).__name__})"
    else:
        return Path(folder), Path(folder).name
    raise CheckpointError(f"{name}: {why}")
