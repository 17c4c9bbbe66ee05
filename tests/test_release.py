"""Files that a release and a project page need: valid, complete, and in step with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


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


def test_the_citation_names_the_released_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_image_copies_what_the_build_needs():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)).split()
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "src"} <= {*copied}
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert not {*copied} & {*ignored}
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users
    assert users[-1] != "root"
