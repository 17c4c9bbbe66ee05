"""What a verification found, and in which words it says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerswap.errors import visible


@dataclass
class Counted:
    """Tensors of one kind: how many, their bytes, and how many of those were compared."""

    tensors: int = 0
    nbytes: int = 0
    compared: int = 0

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {"tensors": self.tensors, "bytes": self.nbytes, "compared_bytes": self.compared}


@dataclass
class Verification:
    """The outcome of `verify`.

    Attributes:
        folder: what was verified.
        findings: what is wrong, a line each.
        unverified: what could not be verified and why, a line each.
        notes: what a careful person would want to know beside, a line each.
        verbatim: tensors that must have the bytes of one source.
        computed: all other tensors.
        hashed: files whose SHA-256 was recorded and found to be the same.
    """

    folder: Path
    findings: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verbatim: Counted = field(default_factory=Counted)
    computed: Counted = field(default_factory=Counted)
    hashed: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong and nothing was left out but by sampling."""
        return not self.findings and not self.unverified

    @property
    def problems(self) -> list[str]:
        """What is wrong and what could not be verified, a line each."""
        return [*self.findings, *(f"not verified: {line}" for line in self.unverified)]

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap verify --json` prints."""
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "findings": self.findings,
            "unverified": self.unverified,
            "notes": self.notes,
            "verbatim": self.verbatim.to_dict(),
            "computed": self.computed.to_dict(),
            "hashed_files": self.hashed,
        }

    def __str__(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        if self.verbatim.tensors:
            lines.append(_counted("verbatim", "compared with their source", self.verbatim))
        if self.computed.tensors:
            lines.append(_counted("computed", "computed again", self.computed))
        if self.hashed:
            lines.append(f"{self.hashed} files as their recorded SHA-256 says")
        outcome = "verified" if self.passed else "not verified"
        return "\n".join(map(visible, [*lines, f"{self.folder}: {outcome}"]))


def _counted(kind: str, what: str, counted: Counted) -> str:
    from rich.filesize import decimal

    share = counted.compared / max(1, counted.nbytes)
    # Never "100%" of what was not all compared.
    shown = f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.001), 0.999):.1%}"
    part = "all" if share == 1 else shown
    return f"{counted.tensors} {kind} tensors ({decimal(counted.nbytes)}), {part} {what}"
