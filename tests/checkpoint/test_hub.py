"""From a path or a Hub id to a folder, offline."""

import huggingface_hub
import pytest
from handmade import EMBEDDING, NORM, QUERY, write_config, write_weights
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from refusals import one_line

from layerswap.checkpoint import open_checkpoint, open_configuration
from layerswap.checkpoint.given import fetch_checkpoint
from layerswap.checkpoint.hub import ALLOWED_FILES
from layerswap.ground.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_download(monkeypatch):
    """Fails the test if anything asks the Hub."""
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked")
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An offline Hub cache that holds `owner/name` at one commit, as the branch `main`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    write_weights(repository / "blobs" / "abc", EMBEDDING, QUERY, NORM)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    write_config(snapshot)
    return tmp_path


def refusal(source, revision=None):
    return one_line(CheckpointError, fetch_checkpoint, source, revision)


# --- local folders ---


def test_a_local_folder_is_taken_as_it_is(tmp_path, no_download):
    assert fetch_checkpoint(str(tmp_path)) == (tmp_path, None)


def test_a_local_folder_comes_before_a_hub_id(tmp_path, monkeypatch, no_download):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    folder, commit = fetch_checkpoint("owner/name")
    assert folder.resolve() == tmp_path / "owner" / "name"
    assert commit is None


def test_the_home_folder(tmp_path, monkeypatch, no_download):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "expert").mkdir()
    assert fetch_checkpoint("~/expert") == (tmp_path / "expert", None)


def test_the_home_folder_of_nobody(no_download):
    source = "~no-such-user-here/expert"
    assert refusal(source) == f"{source}: no such user, so no such folder"


def test_a_local_folder_has_no_revision(tmp_path, no_download):
    expected = f"{tmp_path}: a local folder has no revision; leave it out"
    assert refusal(str(tmp_path), "main") == expected


def test_a_file(tmp_path, no_download):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    assert refusal(str(path)) == f"{path}: a file; give the folder that holds the checkpoint"


@pytest.mark.parametrize(
    "source",
    [
        "/no/such/folder", "no-such-folder", "./expert", "../expert", "../../nothing", ".//nothing",
        "a/b/c", "a//b", "a/", "/a", "@main", "owner/@main", "owner name/x", r"C:\models\expert",
        "owner/name\n", "-owner/name",
    ],
)  # fmt: skip
def test_neither_a_folder_nor_a_hub_id(tmp_path, monkeypatch, no_download, source):
    (tmp_path / "in" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in" / "here")
    shown = source.replace("\n", "\\n")
    assert refusal(source) == f"{shown}: no such folder, and not a Hub id like 'owner/name'"


def test_a_url_is_no_source(no_download):
    page = "https://huggingface.co/owner/name/tree/main"
    assert refusal(page) == f"{page}: a URL; give the Hub id: owner/name"
    why = "a URL; give a Hub id, or download it and give its path"
    assert refusal("s3://bucket/x") == f"s3://bucket/x: {why}"


def test_a_name_too_long_for_the_disk(no_download):
    assert refusal("x" * 300) == f"{'x' * 300}: cannot be read (File name too long)"


# --- the Hub, offline ---


def test_a_cached_checkpoint_resolves_to_its_commit(cache):
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.revision == COMMIT
    assert checkpoint.identity == f"owner/name@{COMMIT}"
    assert checkpoint.folder == cache / "models--owner--name" / "snapshots" / COMMIT
    assert set(checkpoint.tensors) == {EMBEDDING, QUERY, NORM}


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_revision_in_the_id_or_beside_it(cache, revision):
    expected = (cache / "models--owner--name" / "snapshots" / COMMIT, COMMIT)
    assert fetch_checkpoint(f"owner/name@{revision}") == expected
    assert fetch_checkpoint("owner/name", revision) == expected
    assert fetch_checkpoint("owner/name@other", revision) == expected
    assert open_checkpoint(f"owner/name@{revision}").identity == f"owner/name@{COMMIT}"


def test_a_configuration_needs_no_weights_in_the_cache(cache):
    """An earlier plan of adapters downloaded the configuration of their base alone."""
    repository = cache / "models--owner--name"
    (repository / "snapshots" / COMMIT / "model.safetensors").unlink()
    files = dict.fromkeys(("config.json", "model.safetensors"), TreeCacheEntry(1, "0" * 40))
    write_tree_cache(str(repository), COMMIT, files)
    assert open_configuration("owner/name@main").identity == f"owner/name@{COMMIT}"
    assert refusal("owner/name") == f"owner/name: {OFFLINE}"


OFFLINE = "no such local folder, not whole in the local cache, and the Hub cannot be reached"


@pytest.mark.parametrize("source", ["owner/other", "owner/name@v2", f"owner/name@{'f' * 40}"])
def test_what_is_not_in_the_cache(cache, source):
    assert refusal(source) == f"{source.partition('@')[0]}: {OFFLINE}"


@pytest.mark.parametrize("source", ["owner/a--b", "owner/name.git", "owner/a..b", "öwner/name"])
def test_an_id_that_the_hub_does_not_allow(cache, source):
    message = refusal(source)
    assert message.startswith(f"{source}: not a valid Hub id (")
    assert source in message.removeprefix(source)


# --- what the Hub may answer ---


def raising(error):
    def download(*_, **__):
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LocalEntryNotFoundError("Got: X\nand more"), OFFLINE),
        (
            OSError(28, "No space left on device"),
            "the download failed (OSError: [Errno 28] No space left on device)",
        ),
        (
            RuntimeError("a\nb " + "c" * 2000),
            "the download failed (RuntimeError: a b " + "c" * 296 + ")",
        ),
    ],
)
def test_a_failed_download_is_one_line(monkeypatch, error, why):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    assert refusal("owner/nothing-here") == f"owner/nothing-here: {why}"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "GatedRepoError",
            "the repository is gated; accept its terms on the Hub and log in with `hf auth login`",
        ),
        (
            "RepositoryNotFoundError",
            "no such local folder, and no such repository on the Hub (or it is private)",
        ),
        ("RevisionNotFoundError", "the repository has no revision 'v9'"),
    ],
)
def test_an_answer_of_the_hub_is_one_line(monkeypatch, kind, why):
    known = getattr(huggingface_hub.errors, kind)
    error = known.__new__(known)
    Exception.__init__(error, "404\nRequest ID: 1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    assert refusal("owner/nothing-here@v9") == f"owner/nothing-here: {why}"


def test_neither_pickle_nor_code_is_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_checkpoint("owner/nothing-here@v9") == (tmp_path / COMMIT, COMMIT)
    assert asked == {
        "name": "owner/nothing-here",
        "revision": "v9",
        "allow_patterns": list(ALLOWED_FILES),
    }
    fetch_checkpoint("owner/nothing-here@v9", weights=False)
    files = ["a.safetensors", "2_Dense/a.safetensors", "x.bin", "x.py", "x.pt", "x.pkl", "a.json"]
    for allowed, kept in ((ALLOWED_FILES, 3), (asked["allow_patterns"], 2)):
        found = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=list(allowed))
        assert list(found) == ["a.safetensors", "2_Dense/a.safetensors", "a.json"][-kept:]
