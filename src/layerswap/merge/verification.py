"""Verifies an output: plans its merge again, and compares the bytes."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, read_header, read_json_object
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.given import CONFIG
from layerswap.checkpoint.header import is_gguf
from layerswap.compose.recipe import Recipe, check_recipe
from layerswap.ground import system
from layerswap.ground.commit import refuse_unfinished
from layerswap.ground.errors import (
    CheckpointError,
    LayerswapError,
    MergeError,
    RecipeError,
    visible,
)
from layerswap.ground.types import Bars, PathLike, no_bars
from layerswap.ground.yaml_file import nearest
from layerswap.merge.api import make_plan
from layerswap.merge.compare import TensorPair, check_share, comparisons, differences, match
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.gguf import read_gguf_record
from layerswap.merge.layout import Shard, write_index
from layerswap.merge.metadata import LOST_TO_RANK, record, write_configuration
from layerswap.merge.plan import Plan
from layerswap.merge.target import RECORD
from layerswap.merge.writer import LOST_TO_DTYPE, SHARED_BYTES, measure_tensors

CARD = "README.md"
"""The card, which the user may edit."""
IGNORED = (".git", ".gitattributes", ".gitignore", ".cache")
"""Files that the Hub and its clients add to a checkpoint."""


@dataclass(frozen=True)
class Recorded:
    """The record of an output: its content, and the recipe in it."""

    path: Path
    data: Mapping[str, Any]
    recipe: Recipe

    @property
    def sources(self) -> Mapping[str, Mapping[str, Any]]:
        """Every source by name, with `source`, `revision` and `fingerprints`."""
        sources: Mapping[str, Mapping[str, Any]] = self.data["sources"]
        return sources

    def recipe_with(self, moved: Mapping[str, str], *, measure: bool = False) -> Recipe:
        """Return the recipe with other locations of its sources."""
        data = copy.deepcopy(dict(self.data["recipe"]))
        for name, where in moved.items():
            if name not in self.sources:
                raise RecipeError(f"no source {name!r}{nearest(name, list(self.sources))}")
            expert = name.removeprefix("fisher of ")
            if name not in data["experts"] and expert in data["experts"]:
                data["experts"][expert]["fisher"] = where
            elif name in data["experts"]:
                entry = {k: v for k, v in data["experts"][name].items() if k != "revision"}
                data["experts"][name] = {**entry, "source": where}
            else:
                data["base"] = {"source": where}
        if not measure and (measured := self.data.get("magnitude_weights")) is not None:
            data["weights"] = measured
        return check_recipe(data, where=str(self.path))

    def plan_again(self, moved: Mapping[str, str]) -> Plan:
        """Plan the recorded recipe over its present sources."""
        plan = make_plan(self.recipe_with(moved), in_place=True)
        if plan.needs_whole:
            plan = plan.downloaded()

        def as_recorded(name: str, checkpoint: Checkpoint) -> Checkpoint:
            if name not in moved:
                return checkpoint
            entry = self.sources[name]
            return replace(checkpoint, source=entry["source"], revision=entry.get("revision"))

        fishers = {
            name: replace(fisher, stored=as_recorded(f"fisher of {name}", fisher.stored))
            for name, fisher in plan.fishers.items()
        }
        base_name = "base" if "base" not in plan.experts else "the base"
        return replace(
            plan,
            recipe=self.recipe,
            magnitude=self.data.get("magnitude_weights"),
            experts={name: as_recorded(name, c) for name, c in plan.experts.items()},
            base=as_recorded(base_name, plan.base) if plan.base else None,
            fishers=fishers,
            layout="shared" if self.data.get("layout") == "shared" else "plain",
        )

    def changed_files(self, name: str, now: Mapping[str, Any]) -> list[str]:
        """List a source's files changed, removed or added since the merge, one per line."""
        then = self.sources[name]
        then_etags, now_etags = then.get("etags", {}), now.get("etags", {})
        expected = {**then["fingerprints"], **then_etags}
        present = {**now["fingerprints"], **now_etags}
        lines = []
        for file in sorted(expected.keys() | present.keys()):
            if file not in present:
                lines.append(f"{name}: {file} is gone since the merge")
            elif file not in expected:
                lines.append(f"{name}: {file} came after the merge")
            # A fingerprint and an ETag, of a file once read in place, cannot be compared.
            elif present[file] != expected[file] and (file in then_etags) == (file in now_etags):
                lines.append(f"{name}: {file} changed since the merge")
        return lines

    def check(self, plan: Plan) -> tuple[list[str], list[str]]:
        """Compare the record with a plan's record; return findings and notes."""
        findings, again = [], record(plan)
        for name in self.sources:
            if name in again["sources"]:
                findings += self.changed_files(name, again["sources"][name])
            else:
                findings.append(f"{self.path}: the merge has no source {name!r}")
        for name in again["sources"].keys() - self.sources.keys():
            findings.append(f"{self.path}: lacks the source {name!r}")
        written, here = self.data.get("layerswap_version"), again["layerswap_version"]
        if written != here:  # whose record may be laid out in another way
            return findings, [f"written by layerswap {written}; this is {here}"]
        for key, what in (
            ("composition", "the composition differs from the recipe's"),
            ("recipe", "the recipe differs from the merge's"),
            ("tensors", "tensors differ from the merge's"),
            ("layout", "layout is neither plain nor shared"),
        ):
            if not same_json(self.data.get(key), again.get(key)):
                findings.append(f"{self.path}: {what}")
        measured = {LOST_TO_RANK, LOST_TO_DTYPE, SHARED_BYTES}
        for key in self.data.keys() - again.keys() - measured:
            findings.append(f"{self.path}: {key!r} is not a key that the merge writes")
        return findings, []

    def check_magnitude(self, moved: Mapping[str, str]) -> list[str]:
        """Measure the magnitude weights again; report a difference as a finding."""
        weights = self.data.get("magnitude_weights") or {}
        measured = make_plan(self.recipe_with(moved, measure=True)).magnitude or {}
        # Another processor may add in another order.
        if weights.keys() == measured.keys() and all(
            math.isclose(weights[name], measured[name], rel_tol=1e-9) for name in measured
        ):
            return []
        return [f"{self.path}: magnitude_weights differ from the sources'"]


def read_record(out: Path) -> Recorded:
    """The record of an output folder, or of a merged GGUF file."""
    path = out / RECORD
    refuse_unfinished(out)
    if out.suffix in (".yaml", ".yml"):
        raise MergeError(f"{out}: a recipe; give a merged folder, or --against MODEL with it")
    if not out.exists():
        raise MergeError(f"{out}: no such folder")
    if out.is_dir() and not path.exists():
        raise MergeError(f"{out}: has no {RECORD}, so layerswap did not write it")
    if is_gguf(out):
        path, data = out, read_gguf_record(out)
    else:
        data = read_json_object(path)
    for key in ("recipe", "composition", "sources"):
        if not isinstance(data.get(key), dict):
            raise MergeError(f"{path}: has no {key}")
    for name, entry in data["sources"].items():
        source = entry if isinstance(entry, dict) else {}
        if not isinstance(source.get("fingerprints"), dict) or "source" not in source:
            raise MergeError(f"{path}: sources.{name} has no source with fingerprints")
    return Recorded(path, data, check_recipe(data["recipe"], where=str(path)))


def same_json(first: object, second: object) -> bool:
    """True for equal values of equal types, in any order of keys: 8 is neither 8.0 nor true."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@dataclass
class Counted:
    """Tensors of one kind: their number, their bytes, and the bytes that were compared."""

    tensors: int = 0
    nbytes: int = 0
    compared: int = 0

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {"tensors": self.tensors, "bytes": self.nbytes, "compared_bytes": self.compared}

    def line(self, kind: str, how: str) -> str:
        """The line for a report."""
        from rich.filesize import decimal

        share = self.compared / max(1, self.nbytes)
        # Never "100%" if some bytes were not compared.
        extent = "all" if share == 1 else f"{min(max(share, 0.001), 0.999):.1%}" if share else "0%"
        return f"{self.tensors} {kind} tensors ({decimal(self.nbytes)}), {extent} {how}"


@dataclass
class Verification:
    """The outcome of `verify`.

    Attributes:
        folder: the output.
        findings: differences and errors, one line each.
        unverified: parts that could not be verified, with the reason, one line each.
        notes: other facts that a careful person would want to know, one line each.
        verbatim: tensors that must have the bytes of one source.
        computed: all other tensors.
    """

    folder: Path
    findings: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verbatim: Counted = field(default_factory=Counted)
    computed: Counted = field(default_factory=Counted)

    @property
    def passed(self) -> bool:
        """True without findings, if all but unsampled blocks was verified."""
        return not self.findings and not self.unverified

    @property
    def outcome(self) -> str:
        """`verified` or `not verified`."""
        return "verified" if self.passed else "not verified"

    @property
    def problems(self) -> list[str]:
        """All findings, then all unverified parts, one line each."""
        return [*self.findings, *(f"not verified: {line}" for line in self.unverified)]

    def to_dict(self) -> dict[str, Any]:
        """The content of `layerswap verify --json`."""
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "findings": self.findings,
            "unverified": self.unverified,
            "notes": self.notes,
            "verbatim": self.verbatim.to_dict(),
            "computed": self.computed.to_dict(),
        }

    def __repr__(self) -> str:
        problems = f", {len(self.problems)} problems" if self.problems else ""
        return f"<Verification of {self.folder}: {self.outcome}{problems}>"

    def __str__(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        if self.verbatim.tensors:
            lines.append(self.verbatim.line("verbatim", "compared with their source"))
        if self.computed.tensors:
            lines.append(self.computed.line("computed", "computed again"))
        return "\n".join(map(visible, [*lines, f"{self.folder}: {self.outcome}"]))


def verify(
    folder: PathLike,
    *,
    full: bool = False,
    share: float = 0.1,
    seed: int = 0,
    sources: Mapping[str, PathLike] | None = None,
    threads: int | None = None,
    progress: Bars | None = None,
) -> Verification:
    """Compare a merged checkpoint with its sources, by the record in `layerswap.json`.

    Checks that every file and every tensor is there exactly once and nothing else is, with the
    header, index, configuration and tokenizer that the merge writes. Compares verbatim tensors bit
    for bit with their sources; computes a sample of the other tensors again, or all of them, and
    compares the bits; compares the sources with their recorded fingerprints. Memory does not grow
    with the model. Without all of its sources, an output is not verified.

    Args:
        folder: an output of `Plan.save` or `layerswap merge`: a folder, or a GGUF file.
        full: compute every tensor again, and measure magnitude weights again.
        share: share of the blocks of each computed tensor to compute again, in (0, 1]. One wrong
            byte in a computed tensor is found with at least this probability.
        seed: seed of the sample.
        sources: new locations of sources, by their names in the record.
        threads: number of workers; the number of usable processors when None.
        progress: opens a progress bar.

    Raises:
        LayerswapError: the folder has no readable record, or `sources` names another source.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.soup(["math-expert", "swahili-expert"])
        >>> ls.verify(plan.save("merged", overwrite=True), full=True).passed
        True
    """
    check_share(share)
    report = Verification(Path(folder).expanduser())
    recorded = read_record(report.folder)
    moved = {name: os.fspath(path) for name, path in (sources or {}).items()}
    recorded.recipe_with(moved)  # refuses an unknown name
    workers = threads or system.processors()
    try:
        plan = recorded.plan_again(moved)
    except LayerswapError as error:
        report.unverified.append(f"{error}; give its new location with --source NAME=PATH")
        return report
    report.findings, report.notes = recorded.check(plan)
    if recorded.recipe.weights == "magnitude":
        if full:
            report.findings += recorded.check_magnitude(moved)
        else:
            note = "magnitude weights are taken from the record; --full measures them"
            report.notes.append(note)
    if plan.format.name == "adapter":
        _check_adapter(report, plan)
        return report
    pairs = _check_shards(report, plan.shards)
    if plan.format.name == "safetensors":
        with tempfile.TemporaryDirectory() as name:
            write_configuration(Path(name), plan)
            write_index(Path(name), plan.shards)
            _check_files(report, Path(name), [shard.file for shard in plan.shards])
    facts = measure_tensors(plan.tensors, workers)
    work = comparisons(pairs, share=1.0 if full else share, seed=seed, facts=facts)
    for verbatim, counted in ((True, report.verbatim), (False, report.computed)):
        sizes = [p.expected.nbytes for p in pairs if p.expected.verbatim is verbatim]
        counted.tensors, counted.nbytes = len(sizes), sum(sizes)
        compared = (
            comparison for comparison in work if comparison.pair.expected.verbatim is verbatim
        )
        counted.compared = sum(comparison.nbytes for comparison in compared)
    bars = progress or no_bars
    with bars("verifying", sum(comparison.nbytes for comparison in work), "bytes") as advance:
        wrong, non_finite = differences(work, facts=facts, threads=workers, progress=advance)
    if non_finite:
        report.notes.append(f"NaN or infinity in {some_tensors(non_finite)}, as in the source")
    for pair in pairs:
        if (at := wrong.get(pair.expected.name)) is not None:
            info = pair.stored
            source = "its source" if pair.expected.verbatim else "the recipe's result"
            what = f"differs from {source}, from byte {at} of {info.nbytes} on"
            report.findings.append(f"{info.file}: tensor {info.name!r} {what}")
    return report


def _check_adapter(report: Verification, plan: Plan) -> None:
    """Compare a merged adapter, which is small, with a second one from the same plan."""
    with tempfile.TemporaryDirectory() as name:
        _check_files(report, plan.save(Path(name) / "again"))
    report.computed = Counted(int(plan.to_dict()["tensors"]), plan.nbytes, plan.nbytes)


def _check_files(report: Verification, again: Path, checked: Iterable[str] = ()) -> None:
    """Find missing, wrong and foreign files by comparison with `again`, a second output."""
    expected = {*checked, RECORD, CARD}
    for file in sorted(again.rglob("*")):
        name = file.relative_to(again).as_posix()
        if name not in expected and file.is_file():
            _compare_file(report, name, file)
        expected.add(name)
    out = report.folder
    folders = [out, *filter(Path.is_dir, (out / name for name in sorted(expected)))]
    present = (path for folder in folders for path in sorted(folder.iterdir()))
    report.findings += [
        f"{path}: not a file that the merge writes"
        for path in present
        if path.relative_to(out).as_posix() not in {*expected, *IGNORED}
    ]


def _check_shards(report: Verification, shards: Sequence[Shard]) -> list[TensorPair]:
    """Check headers; return the tensors with the right dtype and shape."""
    out, pairs = report.folder, list[TensorPair]()
    for shard in shards:
        path = out if is_gguf(out) else out / shard.file
        if not _present(report, path):
            continue
        try:
            stored = read_gguf(path).tensors if is_gguf(path) else read_header(path)
        except CheckpointError as error:
            report.findings.append(str(error))
            continue
        matched, wrong = match([tensor for tensor, _ in shard.tensors], stored)
        with path.open("rb") as file:
            if not wrong and file.read(len(shard.header)) != shard.header:
                wrong = ["the header is not the one that the merge writes"]
        report.findings += [f"{path}: {line}" for line in wrong]
        pairs += matched
    return pairs


def _compare_file(report: Verification, name: str, expected: Path) -> None:
    path = report.folder / name
    if not _present(report, path) or path.read_bytes() == expected.read_bytes():
        return
    try:
        if path.name == CONFIG and same_json(
            *(read_json_object(each, infinities=True) for each in (path, expected))
        ):
            return
    except CheckpointError as error:
        report.findings.append(str(error))
        return
    report.findings.append(f"{path}: not as the merge writes it")


def _present(report: Verification, path: Path) -> bool:
    if not path.is_file():
        report.findings.append(f"{path}: is missing")
    return path.is_file()
