"""Checkpoints elsewhere: downloads from the Hub, uploads to it, and weight files read in place.

A weight file is read in place on the Hub, a web server, or any fsspec filesystem. Only the spans
that are asked for travel. A connection that drops resumes at the byte that it reached. A file that
changes between two requests is refused.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from layerswap._types import Advance
from layerswap.checkpoint.strict_json import MAX_JSON_BYTES
from layerswap.errors import CheckpointError, LayerswapError, MergeError

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


CONNECTIONS = 8
"""Requests at a time."""
STEP_BYTES = 1 << 23
"""Bytes asked for at a time of a filesystem that gives them whole."""
RETRIES, WAIT_SECONDS, LONGEST_WAIT = 6, 0.5, 8.0
"""Attempts in a row without a new byte, and the pauses between them, which double."""
UNREACHED = 2
"""Repeated attempts to open a file whose server takes no connection: the address may be wrong."""
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
"""Files fetched whole from a URL, where they are there."""


@dataclass(frozen=True)
class RemoteFile:
    """A weight file that stays where it lies.

    Attributes:
        name: its name in the checkpoint.
        url: where it is; of the Hub, at one commit.
        size: its length, in bytes.
        etag: what the server says that its content is.
        commit: the Hub commit, None elsewhere.
    """

    name: str
    url: str
    size: int
    etag: str
    commit: str | None = None

    def __str__(self) -> str:
        return self.url

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) in order, in parts as they arrive.

        Raises:
            CheckpointError: the file changed, or cannot be fetched after several attempts.
        """
        position, patience = start, _Patience(self.url)
        while position < stop:
            with patience, _request(self.url, position, stop) as (facts, parts):
                self._check(facts)
                for part in parts:
                    data = part[: stop - position]
                    yield data
                    position += len(data)
                    patience.failures = 0
                if position < stop:
                    raise ConnectionError(f"the answer ended {stop - position} bytes early")

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop).

        Raises:
            CheckpointError: as `stream`.
        """
        return b"".join(self.stream(start, stop))

    def check_unchanged(self) -> None:
        """Refuse a file that changed since it was opened.

        Raises:
            CheckpointError: it did, or cannot be asked for.
        """
        self.read(0, min(1, self.size))

    def _check(self, facts: _Facts) -> None:
        if facts != _Facts(self.size, self.etag, self.commit):
            raise CheckpointError(
                f"{self.url}: changed since the merge was planned (it was {self.etag}, "
                f"{self.size} bytes; it is {facts.etag}, {facts.size} bytes); plan it again"
            )


WeightFile = Path | RemoteFile
"""A file with tensors, on a disk or elsewhere."""


class RemoteHandle:
    """A remote file that is open for positioned reads.

    What `holding` fetched is read from there; anything else is fetched when it is read.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._held: dict[int, tuple[int, int]] = {}  # by descriptor: the first byte, the last + 1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on."""
        stop = offset + len(buffer)
        for handle, (first, last) in list(self._held.items()):
            if first <= offset and stop <= last:
                done = 0
                while done < len(buffer):
                    done += os.preadv(handle, [buffer[done:]], offset - first + done)
                return
        for data in self.file.stream(offset, stop):
            buffer[: len(data)] = data
            buffer = buffer[len(data) :]

    @contextmanager
    def holding(self, start: int, stop: int, folder: Path) -> Iterator[None]:
        """Keep bytes [start, stop) in a nameless file of `folder` until the block is left."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as kept:
            self.copy_to(kept.fileno(), start, stop, 0)
            self._held[kept.fileno()] = start, stop
            try:
                yield
            finally:
                del self._held[kept.fileno()]

    def copy_to(
        self, output: int, start: int, stop: int, offset: int, progress: Advance | None = None
    ) -> None:
        """Write bytes [start, stop) to `offset` of an open file, as they arrive."""
        for data in self.file.stream(start, stop):
            view = memoryview(data)
            while view:
                count = os.pwrite(output, view, offset)
                view, offset = view[count:], offset + count
            if progress is not None:
                progress(len(data))


def is_url(source: str) -> bool:
    """True for `https://…`, `s3://…` and their like."""
    return "://" in source


def check_url(source: str) -> None:
    """Refuse a URL that is not the plain address of a folder.

    Raises:
        CheckpointError: it has a password, a query or a fragment, or is a page of the Hub.
    """
    parts = urlsplit(source)
    if parts.hostname in ("huggingface.co", "hf.co"):
        name = "/".join(parts.path.strip("/").split("/")[:2])
        raise CheckpointError(f"{source}: a page of the Hub; give the repository's id: {name}")
    if parts.query or parts.fragment or parts.password or (parts.username and "http" in source):
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise CheckpointError(
            f"{shown}: the address of a checkpoint folder has no password, '?' or '#'; put "
            "credentials where the filesystem's library looks for them"
        )


def find_weights(source: str, folder: Path, commit: str | None) -> Callable[[str], WeightFile]:
    """A function that finds a weight file by its name: in the local folder, else elsewhere.

    Args:
        source: the Hub id without its revision, or the URL of a folder.
        folder: the local folder that holds the files beside the weights.
        commit: the Hub commit, None for a URL.

    Returns:
        Raises `FileNotFoundError` for a file that is in neither place, and CheckpointError where
        the server cannot be asked.
    """

    def find(name: str) -> WeightFile:
        if (folder / name).is_file():  # in the local cache of the Hub
            return folder / name
        if commit is None:
            url = f"{source.rstrip('/')}/{quote(name) if _is_http(source) else name}"
        else:
            from huggingface_hub import hf_hub_url

            url = hf_hub_url(source, name, revision=commit)
        return _opened(name, url)

    return find


def fetch_beside(url: str) -> Path:
    """A local folder with the files that lie beside the weights of a checkpoint at a URL.

    An adapter is fetched whole. The folder lasts as long as the process.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    check_url(url)
    folder = Path(tempfile.mkdtemp(prefix="layerswap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        contents = pool.map(lambda name: _whole(url, name), BESIDE_WEIGHTS)
        found = dict(zip(BESIDE_WEIGHTS, contents, strict=True))
    if found["adapter_config.json"] is not None and found["config.json"] is None:
        weights = "adapter_model.safetensors"
        found[weights] = _whole(url, weights, limit=None)
    for name, data in found.items():
        if data is not None:
            (folder / name).write_bytes(data)
    if not any(folder.iterdir()):
        raise CheckpointError(f"{url}: holds no checkpoint (there is no config.json)")
    return folder


def _whole(url: str, name: str, limit: int | None = MAX_JSON_BYTES) -> bytes | None:
    """The bytes of a small file of a folder, None where it is not there."""
    try:
        file = _opened(name, f"{url.rstrip('/')}/{name}")
    except FileNotFoundError:
        return None
    if limit is not None and file.size > limit:
        raise CheckpointError(f"{file}: larger than {limit} bytes")
    return file.read(0, file.size)


def _opened(name: str, url: str) -> RemoteFile:
    """A file with the size and the ETag that its server gives.

    Raises:
        FileNotFoundError: the server has none of that name.
        CheckpointError: it cannot be asked.
    """
    patience = _Patience(url, opening=True)
    while True:
        with patience, _request(url, 0, 1) as (facts, parts):
            for _ in parts:
                pass
            return RemoteFile(name, url, facts.size, facts.etag, facts.commit)


class _Patience:
    """Passes over failed attempts at one file, with a pause after each, until they are too many.

    The transports share no class of error.

    Attributes:
        failures: attempts in a row without a new byte.

    Args:
        url: of the file.
        opening: it is asked for the first time; a missing file is then the caller's concern.
    """

    def __init__(self, url: str, *, opening: bool = False) -> None:
        self.url, self.opening, self.failures = url, opening, 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.opening and isinstance(error, FileNotFoundError):
            return False
        self.failures += 1
        tries = UNREACHED if self.opening and _is_unreached(error) else RETRIES
        if self.failures > tries or _is_final(error):
            raise _unreadable(self.url, error) from None
        time.sleep(min(LONGEST_WAIT, WAIT_SECONDS * 2 ** (self.failures - 1)))
        return True


@dataclass(frozen=True)
class _Facts:
    """What an answer says of the whole file."""

    size: int
    etag: str
    commit: str | None


_Answer = tuple[_Facts, Iterator[bytes]]


def _request(url: str, start: int, stop: int) -> AbstractContextManager[_Answer]:
    """Ask once for bytes [start, stop) of a file."""
    return (_over_http if _is_http(url) else _over_fsspec)(url, start, stop)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


@contextmanager
def _over_http(url: str, start: int, stop: int) -> Iterator[_Answer]:
    import huggingface_hub.utils
    from huggingface_hub import constants

    utils: Any = huggingface_hub.utils  # its types do not name what it loads lazily
    # The token of the Hub is for the Hub alone.
    token = None if url.startswith(f"{constants.ENDPOINT}/") else False
    headers = utils.build_hf_headers(token=token, library_name="layerswap")
    headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with utils.http_stream_backoff(
        "GET", url, headers=headers, follow_redirects=True, retry_on_exceptions=(),
        base_wait_time=WAIT_SECONDS, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    ) as response:  # fmt: skip
        if response.status_code in (404, 410):
            raise FileNotFoundError(url)
        if response.status_code == 416:  # shorter than it was, or empty
            yield _facts(response, 0), iter(())
            return
        utils.hf_raise_for_status(response)
        if response.status_code != 206:
            raise CheckpointError(
                f"{url}: the server sends whole files only; download the checkpoint first"
            )
        span, _, size = response.headers.get("Content-Range", "").partition("/")
        first, _, last = span.removeprefix("bytes ").partition("-")
        if not (first == str(start) and last.isdigit() and size.isdigit()) or int(last) >= stop:
            raise ConnectionError(f"asked for bytes {start} to {stop - 1}, got {span or 'others'}")
        yield _facts(response, int(size)), response.iter_raw()  # as it arrives


def _facts(response: Any, size: int) -> _Facts:
    """Size, ETag and commit; the Hub says them before it sends a request on to its storage."""
    answers = [*response.history, response]

    def said(*names: str) -> str | None:
        return next((a.headers[n] for n in names for a in answers if n in a.headers), None)

    etag = said("X-Linked-Etag", "ETag", "Last-Modified") or ""
    return _Facts(size, etag.removeprefix("W/").strip('"'), said("X-Repo-Commit"))


@contextmanager
def _over_fsspec(url: str, start: int, stop: int) -> Iterator[_Answer]:
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url}: {' '.join(str(error).split())[:200]}") from None
    filesystem.invalidate_cache()
    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise FileNotFoundError(url)
    marks = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime")
    mark = next((info[key] for key in (*marks, "modified", "created") if info.get(key)), "")
    size = int(info["size"])

    def parts() -> Iterator[bytes]:
        for first in range(start, min(stop, size), STEP_BYTES):
            yield filesystem.cat_file(path, first, min(first + STEP_BYTES, stop, size))

    yield _Facts(size, str(mark).strip('"'), None), parts()


def _is_final(error: Exception) -> bool:
    """True if to ask again would give the same answer; the client has retried what is passing."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    final = (LayerswapError, HfHubHTTPError, OfflineModeIsEnabled, FileNotFoundError)
    return isinstance(error, (*final, PermissionError, NotImplementedError))


def _is_unreached(error: BaseException | None) -> bool:
    """True if there was no connection at all: no such host, or nobody listens there."""
    while error is not None:  # each transport wraps what the socket says in errors of its own
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unreadable(url: str, error: Exception) -> LayerswapError:
    if isinstance(error, LayerswapError):
        return error
    why = " ".join(str(error).split())[:200]
    return CheckpointError(f"{url}: cannot be fetched ({type(error).__name__}: {why})")
