"""From what the user typed to a local folder: a path, or a Hugging Face Hub id."""

from __future__ import annotations

import re
from pathlib import Path

from layerswap.errors import CheckpointError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""What is downloaded: weights, configuration and tokenizer. Never pickle, never code."""


def fetch_checkpoint(
    source: str, revision: str | None = None, *, weights: bool = True, pickled: bool = False
) -> tuple[Path, str | None]:
    """The local folder that holds `source`, downloaded first when it is a Hub id.

    Args:
        source: a local folder, or a Hub id `owner/name`, optionally `owner/name@revision`.
        revision: branch, tag or commit on the Hub; overrides the one in `source`.
        weights: whether to download the weights too.
        pickled: whether to download pickled weights too.

    Returns:
        The folder, and the full commit hash that the Hub gave (None for a local folder).

    Raises:
        CheckpointError: neither a folder nor a Hub id, or the Hub cannot be reached or refuses.
    """
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
        raise CheckpointError(f"{source}: a file; give the folder that holds the checkpoint")
    name, _, inline = source.partition("@")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{source}: no such folder, and not a Hub id like 'owner/name'")
    allowed = [pattern for pattern in ALLOWED_FILES if weights or pattern != "*.safetensors"]
    allowed += ["*.bin"] if pickled else []
    return _download(name, revision or inline or None, allowed)


def _download(name: str, revision: str | None, allowed: list[str]) -> tuple[Path, str]:
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
