"""Metadata of a build: where the repository is, and links that work on an index.

The address is that of ``git remote get-url origin``; in an sdist it is in PKG-INFO.
Without an address on the web, README is taken as it is.
"""

from __future__ import annotations

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryLinks(MetadataHookInterface):
    """Sets ``readme`` and ``urls`` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields."""
        root = Path(self.root)
        text = (root / "README.md").read_text("utf-8")
        address = _from_sdist(root) or _from_git(root)
        if address:
            pictures = r"(!\[[^]]*\]\()(?!https?:)"
            text = re.sub(pictures, rf"\g<1>{address}/raw/main/", text)
            text = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{address}/blob/main/", text)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/main/docs/index.md",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _from_sdist(root: Path) -> str:
    """Return the address that the build of the sdist found."""
    info = root / "PKG-INFO"
    if not info.is_file():
        return ""
    urls = HeaderParser().parsestr(info.read_text("utf-8")).get_all("Project-URL", [])
    return dict(each.split(", ", 1) for each in urls).get("Repository", "")


def _from_git(root: Path) -> str:
    """Return the web address of the remote ``origin``; empty for a folder."""
    command = ("git", "-C", str(root), "config", "--get", "remote.origin.url")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    remote = found.stdout.strip().removesuffix(".git")
    ssh = re.fullmatch(r"(?:ssh://)?git@([^:/]+)[:/](.+)", remote)
    remote = f"https://{ssh[1]}/{ssh[2]}" if ssh else remote
    return remote if re.match(r"https?://[^@]+$", remote) else ""
