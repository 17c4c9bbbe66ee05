"""Files that a release and a project page need: valid, complete, and in step with the package."""

import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from layerswap import versions
from layerswap.versions import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_project_files_follow_their_schemas(schema):
    files = sorted(map(str, ROOT.glob(SCHEMAS[schema])))
    assert files
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_have_least_permissions_and_publish_only_checked_wheels():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text("utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path.name
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    assert [jobs[name]["needs"] for name in ("publish", "check")] == ["check", "build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}


def test_the_citation_and_the_changelog_name_the_released_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    heading = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heading
    assert f"{__version__}.".startswith(f"{heading[1]}.")


@pytest.mark.slow
def test_links_and_pictures_of_the_built_description_are_addresses_of_files(tmp_path, monkeypatch):
    build = pytest.importorskip("hatchling.build")
    host = {"SERVER_URL": "https://example.org", "REPOSITORY": "a/b", "REF_NAME": "v1"}
    for name, value in host.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
        description = wheel.read(metadata).decode("utf-8").partition("\n\n")[2]
    links = re.findall(r"(!?)\[[^]]+\]\(([^)#]+)", description)
    assert {link.startswith("https://") for _, link in links} == {True}
    ours = [(mark, link) for mark, link in links if link.startswith("https://example.org")]
    assert len(ours) > 10
    for mark, link in ours:
        kind, tag, path = link.removeprefix("https://example.org/a/b/").split("/", 2)
        assert (kind, tag) == ("raw" if mark else "blob", "v1")
        assert (ROOT / path).is_file()


SAYS = ROOT / "src/layerswap/versions.py"


@pytest.mark.parametrize("published", [False, True])
def test_what_pip_is_told_to_install_is_there(monkeypatch, published):
    monkeypatch.setattr(versions, "PUBLISHED", published)
    command = versions.install("eval", "train")
    assert ("layerswap[eval,train]" in command) is published
    assert ('-e ".[eval,train]" in the clone' in command) is not published
    if versions.PUBLISHED:
        return
    patterns = ("README.md", "docs/**/*.md", "docs/**/*.ipynb", "src/**/*.py")
    for page in {page for pattern in patterns for page in ROOT.glob(pattern)} - {SAYS}:
        for told in re.findall(r"pip install[^`&;\n]*", page.read_text("utf-8")):
            assert "layerswap" not in told, page


def test_the_wheel_is_below_8_mb():
    """All files of the package, compressed as a wheel compresses them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in (ROOT / "src").rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                wheel.write(file, file.relative_to(ROOT / "src"))
    assert len(buffer.getvalue()) < 7_900_000


def test_pre_commit_runs_the_linters_of_the_environment():
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repository in settings["repos"] for hook in repository["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff-format", "ruff", "mypy"]
    assert {hook["language"] for hook in hooks} == {"system"}


def test_a_release_is_checked_on_every_python_that_the_package_names():
    classifiers = PROJECT["classifiers"]
    named = [found[1] for one in classifiers if (found := re.search(r":: (3\.\d+)$", one))]
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == named
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]
    assert tests["tests"]["strategy"]["matrix"]["python"] == named


def test_every_lane_runs_on_a_push_and_in_ci():
    lanes = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"][
        "lanes"
    ]
    run = (ROOT / ".ci/run").read_text("utf-8")
    assert lanes["strategy"]["matrix"]["lane"] == re.findall(r"\.ci/lane (\w+)$", run, re.MULTILINE)
    assert "if" not in lanes


NEEDED = ("pyproject.toml", "hatch_build.py", "README.md")
"""Files that a build reads."""


def test_the_image_copies_what_the_build_needs():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)).split()
    assert {*NEEDED, *PROJECT["license-files"], "src"} <= {*copied}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert not {*copied} & {*ignored}
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users
    assert users[-1] != "root"
