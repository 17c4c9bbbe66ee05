"""Verifies an output: plans its merge again, and compares it with what the writer would write."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap._types import Bars, PathLike, no_bars
from layerswap.checkpoint import (
    Checkpoint,
    fingerprints,
    open_checkpoint,
    read_header,
    read_json_object,
    sha256_of,
)
from layerswap.checkpoint.commit import PARTIAL, write_json
from layerswap.checkpoint.folder import CONFIG
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.remote import WeightFile
from layerswap.checkpoint.views import restack
from layerswap.compose import Composition, Recipe
from layerswap.compose.recipe import check_recipe
from layerswap.compose.yaml_file import nearest
from layerswap.errors import CheckpointError, LayerswapError, MergeError, RecipeError, visible
from layerswap.merge.api import make_plan
from layerswap.merge.compare import Pair, comparisons, differences
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.gguf import read_gguf_record
from layerswap.merge.layout import OutputTensor, Shard, index_of
from layerswap.merge.metadata import model_card, record, recorded_name, write_configuration
from layerswap.merge.plan import Plan
from layerswap.merge.target import RECORD
from layerswap.merge.terms import ModelFacts
from layerswap.merge.writer import LOST_TO_DTYPE, SHARED_BYTES, measure_tensors

HASHES = "sha256"
"""The key of `layerswap.json` under which `layerswap verify --record` keeps hashes of files."""
LOST_TO_RANK = "largest_share_lost_to_rank"
CARD = "README.md"
IGNORED = (".git", ".gitattributes", ".gitignore", ".cache")
"""Files of the Hub and its clients beside a checkpoint."""


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

    @property
    def magnitude(self) -> Mapping[str, float] | None:
        """The measured weights of the merge."""
        return self.data.get("magnitude_weights")

    @cached_property
    def composition(self) -> Composition | None:
        """The recorded composition; None if this version cannot read it."""
        try:
            return Composition.from_dict(self.data["composition"])
        except LayerswapError:
            return None

    def recipe_with(self, moved: Mapping[str, str], *, measure: bool = False) -> Recipe:
        """The recipe with other locations of its sources."""
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
        if self.magnitude is not None and not measure:
            data["weights"] = self.magnitude
        return check_recipe(data, where=str(self.path))

    def plan_again(self, moved: Mapping[str, str]) -> Plan:
        """The plan of the recorded recipe over its sources of today."""
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
            magnitude=self.magnitude,
            experts={name: as_recorded(name, c) for name, c in plan.experts.items()},
            base=as_recorded(base_name, plan.base) if plan.base else None,
            fishers=fishers,
            layout="shared" if self.data.get("layout") == "shared" else "plain",
        )

    def changed_files(self, name: str, source: Mapping[str, Any]) -> list[str]:
        """The files of a source that changed, went or came since the merge, one line each."""
        then, now = self.sources[name], source
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
        """Findings and notes about the record, compared with the record of a plan."""
        findings, again = [], record(plan)
        for name in self.sources:
            if name in again["sources"]:
                findings += self.changed_files(name, again["sources"][name])
            else:
                findings.append(f"{self.path}: the merge has no source {name!r}")
        for name in again["sources"].keys() - self.sources.keys():
            findings.append(f"{self.path}: lacks the source {name!r}")
        written, here = self.data.get("layerswap_version"), again["layerswap_version"]
        same = same_json(self.data["composition"], again["composition"])
        if written != here:  # whose record may be laid out in another way
            same = self.composition in (None, plan.composition)
        if not same:
            findings.append(f"{self.path}: the composition is not that of the recipe")
        if written != here:
            return findings, [f"written by layerswap {written}; this is {here}"]
        if not same_json(self.data["recipe"], again["recipe"]):
            findings.append(f"{self.path}: the recipe is not written as the merge does")
        if self.data.get("layout", "plain") != again.get("layout", "plain"):
            findings.append(f"{self.path}: layout is neither plain nor shared")
        if not same_json(self.data.get("tensors"), again.get("tensors")):
            findings.append(f"{self.path}: tensors are not those of the merge")
        measured = {HASHES, LOST_TO_RANK, LOST_TO_DTYPE, SHARED_BYTES}
        for key in self.data.keys() - again.keys() - measured:
            findings.append(f"{self.path}: {key!r} is no key that the merge writes")
        return findings, []

    def add_hashes(self, files: Sequence[Path]) -> None:
        """Add the SHA-256 of these files to `layerswap.json`, which is replaced in one step."""
        data = {**self.data, HASHES: {file.name: sha256_of(file) for file in sorted(files)}}
        try:
            write_json(self.path, data)
        except OSError as error:
            raise MergeError(f"{self.path}: cannot be written ({error.strerror})") from None


def read_record(out: Path) -> Recorded:
    """The record of an output folder, or of a merged GGUF file."""
    path = out / RECORD
    if PARTIAL in out.resolve().name:
        raise MergeError(f"{out}: an unfinished merge; merge it again")
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
    if not isinstance(data.get(HASHES, {}), dict):
        raise MergeError(f"{path}: {HASHES} is not a mapping")
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
        part = "all" if share == 1 else f"{min(max(share, 0.001), 0.999):.1%}" if share else "0%"
        return f"{self.tensors} {kind} tensors ({decimal(self.nbytes)}), {part} {how}"


@dataclass
class Verification:
    """The outcome of `verify`.

    Attributes:
        folder: the output.
        findings: what is wrong, one line each.
        unverified: what could not be verified and why, one line each.
        notes: other facts that a careful person would want to know, one line each.
        verbatim: tensors that must have the bytes of one source.
        computed: all other tensors.
        hashed: number of files whose recorded SHA-256 is the same.
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
        """True if nothing is wrong and nothing was left out but by sampling."""
        return not self.findings and not self.unverified

    @property
    def outcome(self) -> str:
        """`verified` or `not verified`."""
        return "verified" if self.passed else "not verified"

    @property
    def problems(self) -> list[str]:
        """What is wrong and what could not be verified, one line each."""
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
            "hashed_files": self.hashed,
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
        if self.hashed:
            lines.append(f"{self.hashed} files match their recorded SHA-256")
        return "\n".join(map(visible, [*lines, f"{self.folder}: {self.outcome}"]))


def verify(
    folder: PathLike,
    *,
    full: bool = False,
    share: float = 0.1,
    seed: int = 0,
    sources: Mapping[str, PathLike] | None = None,
    record: bool = False,
    threads: int | None = None,
    progress: Bars | None = None,
) -> Verification:
    """Compare a merged checkpoint with its sources, by the record in `layerswap.json`.

    Checks that every file and every tensor is there exactly once and nothing else is, with the
    header, index, configuration and tokenizer that the merge writes. Compares verbatim tensors bit
    for bit with their sources; computes a sample of the other tensors again, or all of them, and
    compares the bits; compares the sources with their recorded fingerprints. Memory does not grow
    with the model. If a source is gone, compares what comes verbatim from the others, and lists
    what it could not verify.

    Args:
        folder: an output of `Plan.save` or `layerswap merge`: a folder, or a GGUF file.
        full: compute every tensor again, and measure magnitude weights again.
        share: share of the blocks of each computed tensor to compute again, in (0, 1]. One wrong
            byte in a computed tensor is found with at least this probability.
        seed: seed of the sample.
        sources: new locations of sources, by their names in the record.
        record: if all is well, add the SHA-256 of every file to `layerswap.json`. Later
            verifications compare them, also when the sources are gone.
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
    if not 0 < share <= 1:
        raise RecipeError(f"share is {share:g}; write a number above 0 and at most 1")
    target = Path(folder).expanduser()
    if record and is_gguf(target):
        raise RecipeError("a GGUF file cannot hold its own SHA-256; use sha256sum")
    recorded = read_record(target)
    moved = {name: os.fspath(path) for name, path in (sources or {}).items()}
    recorded.recipe_with(moved)  # refuses an unknown name
    workers = threads or len(os.sched_getaffinity(0))
    report = Verification(target)
    verifier = _Verifier(
        recorded, moved, report, 1.0 if full else share, seed, workers,
        progress or no_bars,
    )  # fmt: skip
    verifier.check_hashes()
    try:
        plan = recorded.plan_again(moved)
    except LayerswapError as error:
        report.unverified.append(f"{error}; give its new location with --source NAME=PATH")
        verifier.compare(verifier.remaining_pairs(), {})
    else:
        verifier.check_plan(plan, full=full)
    if record and report.passed:
        files = [f for f in sorted(target.iterdir()) if f.is_file() and f != recorded.path]
        recorded.add_hashes(files)
        report.notes.append(f"recorded the SHA-256 of {len(files)} files")
    return report


@dataclass(frozen=True)
class _Verifier:
    """The steps of a verification; each adds its findings to the report."""

    recorded: Recorded
    moved: Mapping[str, str]
    report: Verification
    share: float
    seed: int
    threads: int
    bars: Bars

    def check_hashes(self) -> None:
        """Compare files with their recorded SHA-256."""
        out, report = self.report.folder, self.report
        hashes = {
            out / name: digest
            for name, digest in sorted(self.recorded.data.get(HASHES, {}).items())
        }
        present = {file: digest for file, digest in hashes.items() if file.is_file()}
        if not hashes:
            return
        with self.bars(
            "hashing", sum(file.stat().st_size for file in present), "bytes"
        ) as progress:
            for file, digest in present.items():
                if sha256_of(file, progress) == digest:
                    report.hashed += 1
                elif file.name == CARD:  # the user may edit the card
                    report.notes.append(f"{CARD} changed since its SHA-256 was recorded")
                else:
                    report.findings.append(f"{file}: changed since its SHA-256 was recorded")
        gone = sorted(hashes.keys() - present.keys() - {out / CARD})
        report.findings += [f"{file}: gone since its SHA-256 was recorded" for file in gone]

    def check_plan(self, plan: Plan, *, full: bool) -> None:
        """Compare record, files and weights with those of the plan."""
        findings, notes = self.recorded.check(plan)
        self.report.findings += findings
        self.report.notes += notes
        if self.recorded.recipe.weights == "magnitude":
            self._check_magnitude(full)
        if plan.format.name == "adapter":
            self._check_adapter(plan)
            return
        pairs = self._check_shards(plan.shards)
        if plan.format.name == "safetensors":
            self._check_files(plan)
        self.compare(pairs, measure_tensors(plan.tensors, self.threads))

    def remaining_pairs(self) -> list[Pair]:
        """Tensors that must have the bytes of a source that is left; lists what the rest needs."""
        recorded, pairs = self.recorded, []
        composition, patterns = recorded.composition, recorded.recipe.place_patterns
        opened, tensors = self._remaining_sources(), {}
        try:
            # The tensors of an adapter are not those of its sources.
            if composition is not None and "tensors" in recorded.data:
                output = open_checkpoint(str(self.report.folder), patterns=patterns)
                tensors = {n: (i, composition.blends.get(output.places[n]))
                           for n, i in output.tensors.items()}  # fmt: skip
        except LayerswapError as error:
            self.report.findings.append(str(error))
        for name, (info, blend) in tensors.items():
            expert = blend.experts[0] if blend is not None and blend.verbatim else None
            source = opened[expert].tensors.get(name) if expert in opened else None
            if source and (source.dtype, source.shape) == (info.dtype, info.shape):
                terms = ((source, 1.0),)
                pairs.append(Pair(OutputTensor(name, info.dtype, info.shape, terms), info))
        gone = ", ".join(name for name in recorded.sources if name not in opened) or "no source"
        self.report.unverified.append(
            f"{len(tensors) - len(pairs)} of {len(tensors)} tensors, which are computed or from "
            f"{gone}; configuration, tokenizer, order of the tensors"
        )
        return pairs

    def _remaining_sources(self) -> dict[str, Checkpoint]:
        recipe, opened = self.recorded.recipe_with(self.moved), {}
        composition = self.recorded.composition
        entries = {**recipe.experts, **({"base": recipe.base} if recipe.base else {})}
        for name in self.recorded.sources:
            entry = entries.get(name)
            if entry is None or entry.source is None or entry.adapter is not None:
                continue
            try:
                source = open_checkpoint(
                    entry.source, revision=entry.revision, patterns=recipe.place_patterns,
                )  # fmt: skip
                if composition is not None and composition.taken is not None:
                    source = restack(source, composition.taken)
            except LayerswapError:  # it is gone, or an adapter
                continue
            opened[name] = source
            marks = {recorded_name(f): one for f, one in fingerprints(source.files).items()}
            self.report.findings += self.recorded.changed_files(name, {"fingerprints": marks})
        return opened

    def _check_magnitude(self, full: bool) -> None:
        weights = self.recorded.magnitude or {}
        if not full:
            note = "magnitude weights are taken from the record; --full measures them"
            self.report.notes.append(note)
            return
        recipe = self.recorded.recipe_with(self.moved, measure=True)
        measured = make_plan(recipe).magnitude or {}
        # Another processor may add in another order.
        same = weights.keys() == measured.keys() and all(
            math.isclose(weights[name], measured[name], rel_tol=1e-9) for name in measured
        )
        if not same:
            self._find(self.recorded.path, "magnitude_weights are not those of the sources")

    def _check_adapter(self, plan: Plan) -> None:
        """Compare a merged adapter, which is small, with a second one from the same plan."""
        with tempfile.TemporaryDirectory() as name:
            again = plan.save(Path(name) / "again", allow_non_finite=True)
            names = {file.name for file in again.iterdir()}
            for file in sorted(again.iterdir()):
                if file.name not in (RECORD, CARD):
                    self._compare_file(file)
        computed = self.report.computed
        computed.tensors = int(plan.to_dict()["tensors"])
        computed.nbytes = computed.compared = plan.nbytes
        self._check_extra(names)

    def _check_files(self, plan: Plan) -> None:
        """Find files beside the weights that are missing, wrong, or not of the merge."""
        expected = {shard.file for shard in plan.shards} | {RECORD, CARD}
        index = index_of(plan.shards)
        if index is not None:
            expected.add(index[0])
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_configuration(folder, plan)
            for file in sorted(folder.iterdir()):
                expected.add(file.name)
                self._compare_file(file)
        if not self.moved:  # the card names sources by their folders
            card = model_card(plan, lost=self.recorded.data.get(LOST_TO_DTYPE))
            path = self.report.folder / CARD
            if not path.is_file() or path.read_text("utf-8", "replace") != card:
                self.report.notes.append(f"{CARD} is not as the merge wrote it")
        self._check_extra(expected)

    def _check_shards(self, shards: Sequence[Shard]) -> list[Pair]:
        """Check headers and index; the tensors that are stored with the right dtype and shape."""
        out, pairs = self.report.folder, []
        for shard in shards:
            path = out if is_gguf(out) else out / shard.file
            if self._present(path):
                pairs += self._check_shard(path, shard)
        index = index_of(shards)
        if index is not None and self._present(path := out / index[0]):
            try:
                if read_json_object(path) != index[1]:
                    self._find(path, "not the index that the merge writes")
            except CheckpointError as error:
                self.report.findings.append(str(error))
        return pairs

    def _check_shard(self, path: Path, shard: Shard) -> list[Pair]:
        try:
            stored = read_gguf(path).tensors if is_gguf(path) else read_header(path)
        except CheckpointError as error:
            self.report.findings.append(str(error))
            return []
        expected = {tensor.name: tensor for tensor, _ in shard.tensors}
        wrong, pairs = [], []
        if missing := expected.keys() - stored.keys():
            wrong.append(f"lacks {some_tensors(missing)} that the merge writes there")
        if extra := stored.keys() - expected.keys():
            wrong.append(f"holds {some_tensors(extra)} that the merge does not write there")
        for name, tensor in expected.items():
            if (info := stored.get(name)) is None:
                continue
            kinds = [f"{t.dtype} {list(t.shape)}" for t in (info, tensor)]
            if kinds[0] == kinds[1]:
                pairs.append(Pair(tensor, info))
            else:
                wrong.append(f"tensor {name!r} is {kinds[0]}; the merge writes {kinds[1]}")
        if not wrong:
            with path.open("rb") as file:
                if file.read(len(shard.header)) != shard.header:
                    wrong.append("the header is not the one that the merge writes")
        for text in sorted(wrong):
            self._find(path, text)
        return pairs

    def _compare_file(self, expected: Path) -> None:
        path = self.report.folder / expected.name
        if not self._present(path) or path.read_bytes() == expected.read_bytes():
            return
        if path.name == CONFIG:
            try:
                if same_json(read_json_object(path), read_json_object(expected)):
                    return
            except CheckpointError as error:
                self.report.findings.append(str(error))
                return
        self._find(path, "not as the merge writes it")

    def _check_extra(self, expected: Iterable[str]) -> None:
        known = {*expected, *IGNORED}
        for path in sorted(self.report.folder.iterdir()):
            if path.name not in known:
                self._find(path, "not a file that the merge writes")

    def _present(self, path: Path) -> bool:
        if not path.is_file():
            self._find(path, "is missing")
            return False
        return True

    def _find(self, path: WeightFile, text: str) -> None:
        self.report.findings.append(f"{path}: {text}")

    def compare(self, pairs: Sequence[Pair], facts: ModelFacts) -> None:
        """Compare tensors bit for bit, and count them."""
        work = comparisons(pairs, share=self.share, seed=self.seed, facts=facts)
        for verbatim, counted in ((True, self.report.verbatim), (False, self.report.computed)):
            sizes = [p.expected.nbytes for p in pairs if p.expected.verbatim is verbatim]
            counted.tensors, counted.nbytes = len(sizes), sum(sizes)
            parts = (part for part in work if part.pair.expected.verbatim is verbatim)
            counted.compared = sum(part.nbytes for part in parts)
        with self.bars("verifying", sum(part.nbytes for part in work), "bytes") as progress:
            wrong, non_finite = differences(
                work, facts=facts, threads=self.threads, progress=progress
            )
        if non_finite:
            note = f"NaN or infinity in {some_tensors(non_finite)}, as in the source"
            self.report.notes.append(note)
        for pair in pairs:
            name, info = pair.expected.name, pair.stored
            if name in wrong:
                at = f"from byte {wrong[name]} of {info.nbytes} on"
                source = "its source" if pair.expected.verbatim else "what the recipe gives"
                self._find(info.file, f"tensor {info.name!r} is not {source}, {at}")
