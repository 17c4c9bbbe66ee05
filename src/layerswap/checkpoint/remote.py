"""Remote checkpoints: Hub downloads and uploads, and weight files read in place.

A weight file is read in place on the Hub, a web server, or any fsspec filesystem. Only the spans
that are needed are fetched. A dropped connection resumes at the byte that it reached. A file that
changes between two requests is refused.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from layerswap.checkpoint.hub_inside import client_factory
from layerswap.ground import system
from layerswap.ground.errors import CheckpointError, LayerswapError, MergeError, one_line
from layerswap.ground.strict_json import MAX_JSON_BYTES, clipped

_LOG = logging.getLogger(__name__)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
ETAG = re.compile(r'(?:W/)?"?\w[\w.:+=-]{0,127}"?', re.ASCII)
"""Marks that the Hub's client makes file names of."""
ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
"""Files to download: weights, configuration, tokenizer and card. Never pickles, never code."""
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
"""Files to fetch whole from a URL, if they exist."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""Names of the weights in a merged folder."""
CONNECTIONS = 8
"""Requests at a time."""
STEP_BYTES = 1 << 23
"""Bytes to request at a time from a filesystem that does not stream."""
RETRIES, WAIT_SECONDS, LONGEST_WAIT = 6, 0.5, 8.0
"""Failures in a row without a new byte, and the pauses between them, which double."""
MOST_WAITING = 900
"""Seconds to wait in all because a server asks for it (`Retry-After`)."""
SLOWEST, PERIOD = 1000, 60
"""Fewest bytes a second that a server sends, on average over so many seconds."""
UNREACHED = 2
"""Retries to open a file whose server takes no connection: the address may be wrong."""

# --- the Hub ---


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
        _check_answers()
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed))
    except CheckpointError as error:
        raise error.within(name) from None
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


@cache
def _check_answers() -> None:
    """Make the Hub's client validate every response, in this process."""
    from huggingface_hub import set_client_factory

    make = client_factory()

    def make_checked() -> Any:
        client = make()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}
        return client

    set_client_factory(make_checked)


def _check_answer(response: Any) -> None:
    """Refuse responses with names that could leave the Hub's cache, or with endless waits."""
    headers, url = response.headers, response.request.url
    if response.status_code in BUSY and (asked := _asked_wait(headers)):
        _count_wait(str(url), asked)
    commits, etags = [headers.get("X-Repo-Commit")], []
    location = headers.get("Location", "")
    # The client follows redirects on one server, and takes the ETag of the last answer.
    if commits[0] is not None and (
        response.is_success or urlsplit(location).netloc or "X-Linked-Etag" in headers
    ):
        etags = [headers.get("X-Linked-Etag") or headers.get("ETag")]
    if "/api/models/" in url.path and response.is_redirect:
        commits += [] if "/api/models/" in location else [location]
    elif "/api/models/" in url.path and response.is_success:
        response.read()
        with suppress(ValueError):  # the client explains errors that are not JSON
            data = response.json()
            commits += [data.get("sha")] if isinstance(data, dict) else []
            listed = [e.get("lfs") for e in data if isinstance(e, dict)]
            etags += [lfs.get("oid") for lfs in listed if isinstance(lfs, dict)]
    wrong = [c for c in commits if c is not None and not COMMIT.fullmatch(str(c))]
    wrong += [e for e in etags if e is not None and not ETAG.fullmatch(str(e))]
    if wrong:
        raise CheckpointError(f"the server sent {wrong[0]!r:.80}, not a commit or an ETag")


def check_hub_id(name: str) -> None:
    """Refuse a name that is not of the form `owner/name`."""
    if not HUB_ID.fullmatch(name):
        raise MergeError(f"--push: {name!r} is not a Hub id like 'owner/name'")


@dataclass(frozen=True)
class HubFile:
    """A large file on the Hub, which identifies it by SHA-256."""

    repository: str
    revision: str
    path: str
    size: int
    sha256: str


def hub_file(file: WeightFile, repository: str, revision: str) -> HubFile | None:
    """Return the Hub's record of a weight file, remote or cached; None without a SHA-256."""
    if isinstance(file, Path):
        size, mark = file.stat().st_size, file.resolve().name
    else:
        size, mark = file.size, file.etag
    if not re.fullmatch(r"[0-9a-f]{64}", mark):
        return None
    return HubFile(repository, revision, file.name, size, mark)


def push_folder(
    folder: Path, name: str, *, private: bool = True, stored: Iterable[HubFile] = ()
) -> str:
    """Upload a merged folder to a Hub repository, created if missing; return the commit's URL.

    All files become visible in one commit, after the last one arrived. What an interrupted upload
    sent is not sent again. A file that equals one of `stored` is copied on the Hub. Weights of
    another merge in the repository are removed.
    """
    from huggingface_hub import HfApi

    check_hub_id(name)
    api = HfApi(library_name="layerswap")
    copies = _equal_files(folder, stored)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        try:
            commit = _commit_folder(api, folder, name, copies)
        except Exception:
            if not copies:
                raise
            # Repositories of other regions, and older clients, copy nothing.
            commit = _commit_folder(api, folder, name, {})
    except Exception as error:  # the transports have no common class of errors
        why = f"{type(error).__name__}: {one_line(error, 300)}"
        raise MergeError(
            f"{name}: the upload failed ({why}); {folder} is complete and {name} unchanged; run "
            "the command again with --overwrite to resume the upload"
        ) from None
    return str(commit.commit_url)


def _commit_folder(api: Any, folder: Path, name: str, copies: Mapping[str, HubFile]) -> Any:
    """Upload a folder in one commit; `upload_folder` splits slow uploads into several."""
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

    files = sorted(path for path in folder.iterdir() if path.is_file())
    operations: list[Any] = [
        CommitOperationAdd(path.name, path) for path in files if path.name not in copies
    ]
    operations += [
        CommitOperationCopy(
            file.path, path, file.revision, src_repo_id=file.repository, src_repo_type="model"
        )
        for path, file in copies.items()
    ]
    names = {path.name for path in files}
    old = [path for path in api.list_repo_files(name) if WEIGHTS.fullmatch(path)]
    operations += [CommitOperationDelete(path) for path in old if path not in names]
    return api.create_commit(name, operations, commit_message="Merge with layerswap")


def _equal_files(folder: Path, stored: Iterable[HubFile]) -> dict[str, HubFile]:
    """Find a folder's weight files that the Hub already has, by name."""
    by_size = {(file.size, file.sha256): file for file in stored}
    sizes = {size for size, _ in by_size}
    equal = {}
    for path in sorted(folder.glob("*.safetensors")):
        if (size := path.stat().st_size) in sizes:
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if file := by_size.get((size, digest)):
                equal[path.name] = file
    return equal


# --- files read in place ---


_State = tuple[int, str, str | None]
"""Size, ETag and commit of a whole file, from one answer of its server."""


@dataclass(frozen=True)
class RemoteFile:
    """A weight file that is read in place; `etag` identifies its content."""

    name: str
    url: str
    size: int
    etag: str
    commit: str | None = None
    start: bytes = field(default=b"", compare=False, repr=False)
    """The first bytes, which came with the size."""

    def __str__(self) -> str:
        return self.url

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes [start, stop) in order, in parts as they arrive."""
        position, retry = start, _Retry(self.url)
        while position < stop:
            with retry, _request(self.url, position, stop) as (state, parts):
                self._check(state)
                for part in parts:
                    data = part[: stop - position]
                    if not data:  # a longer answer than requested, possibly endless
                        break
                    position += len(data)
                    retry.advance(len(data))
                    before = time.monotonic()
                    yield data
                    retry.since += time.monotonic() - before  # the reader's own time
                if position < stop:
                    raise ConnectionError(f"the response ended {stop - position} bytes early")

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        if stop <= len(self.start):
            return self.start[start:stop]
        return b"".join(self.stream(start, stop))

    def check_unchanged(self) -> None:
        """Refuse a file that has changed since it was opened."""
        for _ in self.stream(0, min(1, self.size)):
            pass

    def _check(self, state: _State) -> None:
        if state != (self.size, self.etag, self.commit):
            raise CheckpointError(
                f"{self.url}: changed since the merge was planned (it was {self.etag}, "
                f"{self.size} bytes; it is {state[1]}, {state[0]} bytes); plan it again"
            )


WeightFile = Path | RemoteFile
"""A file with tensors, local or remote."""


class RemoteHandle:
    """A remote file that is open for positioned reads.

    Bytes that `holding` has fetched are read locally; all others are fetched when they are read.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._held: dict[int, tuple[int, int]] = {}  # by descriptor: first byte, one past the last

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on."""
        stop = offset + len(buffer)
        for handle, (first, last) in list(self._held.items()):
            if first <= offset and stop <= last:
                done = 0
                while done < len(buffer):
                    done += system.read_at(handle, buffer[done:], offset - first + done)
                return
        for data in self.file.stream(offset, stop):
            buffer[: len(data)] = data
            buffer = buffer[len(data) :]

    @contextmanager
    def holding(self, start: int, stop: int, folder: Path) -> Iterator[None]:
        """Keep bytes [start, stop) in an unnamed temporary file in `folder` during the block."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as kept:
            self.copy_to(kept.fileno(), start, stop, 0)
            self._held[kept.fileno()] = start, stop
            try:
                yield
            finally:
                del self._held[kept.fileno()]

    def copy_to(self, output: int, start: int, stop: int, offset: int) -> None:
        """Write bytes [start, stop) to `offset` of an open file, as they arrive."""
        for data in self.file.stream(start, stop):
            system.write_at(output, data, offset)
            offset += len(data)


def find_weights(source: str, folder: Path, commit: str | None) -> Callable[[str], WeightFile]:
    """Return a function that finds a weight file by name, in the local folder or remotely.

    The function raises FileNotFoundError for a file that is in neither place. `source` is a Hub id
    without its revision, or the URL of a folder, which has no commit.
    """

    @cache
    def find(name: str) -> WeightFile:
        if (folder / name).is_file():  # in the local cache of the Hub
            return folder / name
        if commit is None:
            url = f"{source.rstrip('/')}/{quote(name) if _is_http(source) else name}"
        else:
            from huggingface_hub import hf_hub_url

            url = hf_hub_url(source, name, revision=commit)
        return _open(name, url)

    return find


# --- folders at a URL ---


def is_url(source: str) -> bool:
    """True for `https://…`, `s3://…` and the like."""
    return "://" in source


def check_url(source: str) -> None:
    """Refuse pages of the Hub, and URLs with a password, a query or a fragment."""
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if parts.scheme == "file":
        raise CheckpointError(f"{source}: give the path without file://")
    if parts.hostname in ("huggingface.co", "hf.co"):
        name = "/".join(parts.path.strip("/").split("/")[:2])
        raise CheckpointError(f"{source}: a page of the Hub; give the repository's id: {name}")
    if parts.query or parts.fragment or parts.password or (parts.username and "http" in source):
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise CheckpointError(
            f"{shown}: a checkpoint's URL cannot hold a password, '?' or '#'; give "
            "credentials in the settings of the filesystem's library"
        )


def fetch_beside(url: str) -> Path:
    """Fetch the files next to the weights of a checkpoint; return a folder for this process.

    An adapter is fetched whole.
    """
    folder = Path(tempfile.mkdtemp(prefix="layerswap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        contents = pool.map(lambda name: _fetch_whole(url, name), BESIDE_WEIGHTS)
        files = dict(zip(BESIDE_WEIGHTS, contents, strict=True))
    if files["adapter_config.json"] is not None and files["config.json"] is None:
        weights = "adapter_model.safetensors"
        _fetch_adapter(url, weights, folder)
    for name, data in files.items():
        if data is not None:
            (folder / name).write_bytes(data)
    if not any(folder.iterdir()):
        raise CheckpointError(f"{url}: holds no checkpoint (there is no config.json)")
    return folder


def _fetch_adapter(url: str, name: str, folder: Path) -> None:
    """Fetch the weights of an adapter into a folder, if they exist and there is space."""
    with suppress(FileNotFoundError):
        file = _open(name, f"{url.rstrip('/')}/{name}")
        if file.size > (free := shutil.disk_usage(folder).free):
            raise CheckpointError(f"{file}: needs {file.size:,} bytes, {folder} has {free:,} free")
        with (folder / name).open("wb") as output:
            RemoteHandle(file).copy_to(output.fileno(), 0, file.size, 0)


def _fetch_whole(url: str, name: str) -> bytes | None:
    """Return the bytes of a file in a folder; None if it does not exist."""
    try:
        file = _open(name, f"{url.rstrip('/')}/{name}", MAX_JSON_BYTES)
    except FileNotFoundError:
        return None
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: larger than {MAX_JSON_BYTES} bytes")
    return file.read(0, file.size)


def _open(name: str, url: str, most: int = 8) -> RemoteFile:
    """Ask for a file's size, ETag and first bytes: all of them if they are at most `most`.

    Raises FileNotFoundError if it does not exist.
    """
    retry = _Retry(url, opening=True)
    while True:
        with retry, _request(url, 0, most) as (state, parts):
            start, wanted = bytearray(), state[0] if state[0] <= most else 8
            while len(start) < wanted:
                part = next(parts, b"")
                if not part:
                    raise ConnectionError(f"the response ended {wanted - len(start)} bytes early")
                start += part
            next(parts, None)  # the end, after which the connection can be used again
            return RemoteFile(name, url, *state, bytes(start[:wanted]))


# --- requests ---


class _Retry:
    """Suppresses failed attempts, up to a limit, with a pause after each.

    `opening` is True for the first request of a file; FileNotFoundError then passes through.
    `failures` counts failed attempts in a row without a new byte. `since` is the beginning of the
    present `PERIOD`, in which `received` bytes came.
    """

    def __init__(self, url: str, *, opening: bool = False) -> None:
        self.url, self.opening, self.failures = url, opening, 0
        self.since, self.received = time.monotonic(), 0

    def advance(self, count: int) -> None:
        """Count received bytes; refuse a server that is too slow."""
        self.failures = 0
        self.received += count
        passed = time.monotonic() - self.since
        if passed >= PERIOD:
            if self.received < SLOWEST * passed:
                raise CheckpointError(
                    f"{self.url}: sends less than {SLOWEST:,} bytes/s; try again later, or "
                    "download the checkpoint first"
                )
            self.since, self.received = time.monotonic(), 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self.opening and isinstance(error, FileNotFoundError):
            return False
        self.failures += 1
        retries = UNREACHED if self.opening and _is_unreached(error) else RETRIES
        if self.failures > retries or _is_final(error):
            if isinstance(error, LayerswapError):
                return False
            why = f"{type(error).__name__}: {one_line(error)}"
            raise CheckpointError(f"{self.url}: cannot be fetched ({why})") from None
        asked = error.seconds if isinstance(error, BusyError) else 0.0
        if asked:
            _count_wait(self.url, asked)
        time.sleep(asked or min(LONGEST_WAIT, WAIT_SECONDS * 2 ** (self.failures - 1)))
        self.since += asked
        return True


class BusyError(ConnectionError):
    """A busy server's request to wait, in seconds (0 if unspecified)."""

    def __init__(self, status: int, seconds: float) -> None:
        super().__init__(f"the server answers {status}")
        self.seconds = seconds


_waits: dict[str, tuple[float, float]] = {}
"""By server: the seconds that it was waited for, and the end of the last wait."""
_waits_lock = threading.Lock()


def _count_wait(url: str, seconds: float) -> None:
    """Log a wait; refuse it if the total is too long. Parallel waits count once."""
    server, now = urlsplit(url).netloc, time.monotonic()
    with _waits_lock:
        waited, until = _waits.get(server, (0.0, now))
        waited += max(0.0, now + seconds - max(now, until))
        if waited > MOST_WAITING:
            raise CheckpointError(
                f"{url}: the server asks to wait for {seconds:,.0f} s, but layerswap waits "
                f"at most {MOST_WAITING} s in total; try again later"
            )
        if seconds > LONGEST_WAIT and now >= until:
            _LOG.warning("%s: waits for %.0f s, as the server asks", server, seconds)
        _waits[server] = waited, max(until, now + seconds)


def _asked_wait(headers: Any) -> float:
    """Return the wait that response headers ask for, in seconds."""
    limits = re.findall(r"\br=0;\s*t=(\d{1,15})\b", headers.get("RateLimit", ""))
    seconds = [float(number) for number in limits]
    after = headers.get("Retry-After", "").strip()
    if after.isdecimal():
        seconds.append(float(after[:15]))
    elif after:
        with suppress(ValueError):
            seconds.append(parsedate_to_datetime(after).timestamp() - time.time())
    return max([0.0, *seconds])


def _is_final(error: Exception) -> bool:
    """True if retrying cannot help; the Hub's client has already retried passing errors."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    final = (LayerswapError, HfHubHTTPError, OfflineModeIsEnabled, FileNotFoundError)
    return isinstance(error, (*final, PermissionError, NotImplementedError))


def _is_unreached(error: BaseException | None) -> bool:
    """True if there was no connection: the host does not exist, or refuses connections."""
    while error is not None:  # each transport wraps the socket's error in errors of its own
        if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
            return True
        error = error.__cause__ or error.__context__
    return False


BUSY = (429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
_Answer = tuple[_State, Iterator[bytes]]


def _request(url: str, start: int, stop: int) -> AbstractContextManager[_Answer]:
    """Request bytes [start, stop) of a file once."""
    return (_request_http if _is_http(url) else _request_fsspec)(url, start, stop)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


@contextmanager
def _request_http(url: str, start: int, stop: int) -> Iterator[_Answer]:
    import huggingface_hub.utils
    from huggingface_hub import constants

    utils: Any = huggingface_hub.utils  # its types lack the names that it loads lazily
    # The token of the Hub is for the Hub alone.
    token = None if url.startswith(f"{constants.ENDPOINT}/") else False
    headers = utils.build_hf_headers(token=token, library_name="layerswap")
    headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with utils.get_session().stream(
        "GET", url, headers=headers, follow_redirects=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    ) as response:  # fmt: skip
        if response.status_code in BUSY:
            raise BusyError(response.status_code, _asked_wait(response.headers))
        if response.status_code in (404, 410):
            raise FileNotFoundError(url)
        if response.status_code == 416:  # shorter than before, or empty
            yield _http_state(response, 0), iter(())
            return
        utils.hf_raise_for_status(response)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):  # the bytes differ from the file's
            raise CheckpointError(
                f"{url}: the server sends Content-Encoding {clipped(encoding, 40)!r} "
                "unrequested; download the checkpoint first"
            )
        if response.status_code != 206:
            raise CheckpointError(
                f"{url}: the server sends whole files only; download the checkpoint first"
            )
        span, _, size = response.headers.get("Content-Range", "").partition("/")
        first, _, last = span.removeprefix("bytes ").partition("-")
        if not (first == str(start) and last.isdigit() and size.isdigit()) or int(last) >= stop:
            raise ConnectionError(f"requested bytes {start} to {stop - 1}, got {span or 'others'}")
        yield _http_state(response, int(size)), response.iter_raw()  # as it arrives


def _http_state(response: Any, size: int) -> _State:
    """Return size, ETag and commit; the Hub sends the latter two before it redirects."""
    answers = [*response.history, response]

    def header(*names: str) -> str | None:
        return next((a.headers[n] for n in names for a in answers if n in a.headers), None)

    etag = header("X-Linked-Etag", "ETag", "Last-Modified") or ""
    return size, etag.removeprefix("W/").strip('"'), header("X-Repo-Commit")


@contextmanager
def _request_fsspec(url: str, start: int, stop: int) -> Iterator[_Answer]:
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url}: {one_line(error)}") from None
    filesystem.invalidate_cache()
    info = filesystem.info(path)
    if info.get("type") == "directory":
        raise FileNotFoundError(url)
    keys = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime",
            "modified", "created")  # fmt: skip
    etag = next((info[key] for key in keys if info.get(key)), "")
    size = int(info["size"])

    def parts() -> Iterator[bytes]:
        for first in range(start, min(stop, size), STEP_BYTES):
            yield filesystem.cat_file(path, first, min(first + STEP_BYTES, stop, size))

    yield (size, str(etag).strip('"'), None), parts()
