"""Gives the package's description links that work outside the repository.

The release workflow runs on GitHub, which names the repository and the tag. Elsewhere the
description is the README as it is.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).parent / "README.md"


class Description(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set it, with the links of the repository and tag in the environment."""
        text, repository = README.read_text("utf-8"), os.environ.get("GITHUB_REPOSITORY")
        if repository:
            address = f"{os.environ['GITHUB_SERVER_URL']}/{repository}"
            text = absolute(text, address, os.environ["GITHUB_REF_NAME"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str, tag: str) -> str:
    """Write the links of a page as addresses: of pictures the raw file, of pages the page."""

    def linked(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/{tag}/{path})"

    return re.sub(r"(!?)\[([^]]+)\]\((?!https?:|#)([^)]+)\)", linked, text)
