"""Checks the files and the record of an output against those that the merge writes, and reports.

The record, `layerswap.json`, gives the recipe, the composition and the sources of an output.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerswap.checkpoint import Checkpoint, read_header, read_json_object, sha256_of
from layerswap.checkpoint.commit import PARTIAL, write_json
from layerswap.checkpoint.folder import CONFIG
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.header import is_gguf
from layerswap.compose import Composition, Recipe
from layerswap.compose.recipe import check_recipe
from layerswap.compose.yaml_file import nearest
from layerswap.errors import CheckpointError, LayerswapError, MergeError, RecipeError, visible
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.gguf import read_gguf_record
from layerswap.merge.layout import OutputTensor, Shard, index_of
from layerswap.merge.metadata import RECORD, model_card, write_configuration
from layerswap.merge.planner import AdapterPlan, Plan, make_plan
from layerswap.merge.rounding import LOST_TO_DTYPE
from layerswap.merge.verification.tensors import TensorPair


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


CARD = "README.md"
IGNORED = (".git", ".gitattributes", ".gitignore", ".cache")
"""What the Hub and its clients put beside a checkpoint."""


def check_shards(plan: Plan, report: Verification) -> list[TensorPair]:
    """Find what is wrong with headers and index.

    Returns:
        The tensors that are there with the right dtype and shape.
    """
    pairs: list[TensorPair] = []
    shards = plan.shards
    for shard in shards:
        path = report.folder if is_gguf(report.folder) else report.folder / shard.file
        pairs += _check_shard(path, shard, report)
    index = index_of(shards)
    if index is not None and _present(report.folder / index[0], report):
        path = report.folder / index[0]
        try:
            if read_json_object(path) != index[1]:
                report.findings.append(f"{path}: not the index that the merge writes")
        except CheckpointError as error:
            report.findings.append(str(error))
    return pairs


def check_files(
    plan: Plan,
    report: Verification,
    *,
    card: bool = True,
    lost: Mapping[str, Any] | None = None,
) -> None:
    """Find files beside the weights that are missing, wrong or not of the merge.

    Args:
        plan: what was merged.
        report: where findings go.
        card: whether to compare the model card, which names sources by their folders.
        lost: what the record says that the output's dtype lost.
    """
    expected = {shard.file for shard in plan.shards}
    index = index_of(plan.shards)
    expected |= {RECORD, CARD, *([index[0]] if index else [])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configuration(folder, plan)
        for file in sorted(folder.iterdir()):
            expected.add(file.name)
            _compare_file(file, report.folder / file.name, report)
    if card:
        _check_card(model_card(plan, lost=lost), report)
    _check_extra(expected, report)


def check_saved(plan: AdapterPlan, report: Verification) -> None:
    """Compare a merged adapter, which is small, with a second one made by the same plan."""
    with tempfile.TemporaryDirectory() as name:
        again = plan.save(Path(name) / "again", allow_non_finite=True)
        names = {file.name for file in again.iterdir()}
        for file in sorted(again.iterdir()):
            if file.name not in (RECORD, CARD):
                _compare_file(file, report.folder / file.name, report)
    report.computed.tensors = int(plan.to_dict()["tensors"])
    report.computed.nbytes = report.computed.compared = plan.nbytes
    _check_extra(names, report)


def _check_shard(path: Path, shard: Shard, report: Verification) -> list[TensorPair]:
    if not _present(path, report):
        return []
    try:
        found = read_gguf(path).tensors if is_gguf(path) else read_header(path)
    except CheckpointError as error:
        report.findings.append(str(error))
        return []
    expected = {tensor.name: tensor for tensor, _ in shard.tensors}
    wrong = []
    if missing := expected.keys() - found.keys():
        wrong.append(f"{path}: lacks {some_tensors(missing)} that the merge writes there")
    if extra := found.keys() - expected.keys():
        wrong.append(f"{path}: holds {some_tensors(extra)} that the merge does not write there")
    pairs: list[TensorPair] = []
    for name in expected.keys() & found.keys():
        if _kind(expected[name]) == (kind := f"{found[name].dtype} {list(found[name].shape)}"):
            pairs.append((expected[name], found[name]))
        else:
            wrong.append(
                f"{path}: tensor {name!r} is {kind}; the merge writes {_kind(expected[name])}"
            )
    if not wrong:
        with path.open("rb") as file:
            if file.read(len(shard.header)) != shard.header:
                wrong.append(f"{path}: the header is not the one that the merge writes")
    report.findings += sorted(wrong)
    order = {tensor.name: i for i, (tensor, _) in enumerate(shard.tensors)}
    return sorted(pairs, key=lambda pair: order[pair[0].name])


def _kind(tensor: OutputTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _compare_file(expected: Path, path: Path, report: Verification) -> None:
    if not _present(path, report) or path.read_bytes() == expected.read_bytes():
        return
    if path.name == CONFIG:
        try:
            if same_json(read_json_object(path), read_json_object(expected)):
                return
        except CheckpointError as error:
            report.findings.append(str(error))
            return
    report.findings.append(f"{path}: not as the merge writes it")


def same_json(one: object, other: object) -> bool:
    """True for equal values of equal kinds, in any order of keys: 8 is neither 8.0 nor true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _check_card(text: str, report: Verification) -> None:
    path = report.folder / CARD
    if not path.is_file() or path.read_text("utf-8", "replace") != text:
        report.notes.append(f"{CARD} is not as the merge wrote it")


def _check_extra(expected: Iterable[str], report: Verification) -> None:
    known = {*expected, *IGNORED}
    for path in sorted(report.folder.iterdir()):
        if path.name not in known:
            report.findings.append(f"{path}: not a file that the merge writes")


def _present(path: Path, report: Verification) -> bool:
    if not path.is_file():
        report.findings.append(f"{path}: is missing")
        return False
    return True


HASHES = "sha256"
"""The key of `layerswap.json` under which `layerswap verify --record` keeps hashes of files."""
LOST = "largest_share_lost_to_rank"
"""A key of adapters' records that does not follow from the recipe alone."""


@dataclass(frozen=True)
class Recorded:
    """What an output says of itself.

    Attributes:
        path: the file.
        data: its whole content.
        recipe: the recipe it was made by.
        composition: what the recipe resolved to.
    """

    path: Path
    data: Mapping[str, Any]
    recipe: Recipe
    composition: Composition

    @property
    def sources(self) -> Mapping[str, Mapping[str, Any]]:
        """Every source by name, with `source`, `revision` and `fingerprints`."""
        found: Mapping[str, Mapping[str, Any]] = self.data["sources"]
        return found

    @property
    def hashes(self) -> Mapping[str, str]:
        """SHA-256 of the output's files by name, if they were recorded."""
        found: Mapping[str, str] = self.data.get(HASHES, {})
        return found

    def recipe_with(self, moved: Mapping[str, str], *, measure: bool = False) -> Recipe:
        """The recipe, with sources that are elsewhere now.

        Args:
            moved: where, by the name that the record has for them.
            measure: leave magnitude weights to be measured again, which reads every byte.

        Raises:
            RecipeError: there is no source of that name.
        """
        data = copy.deepcopy(dict(self.data["recipe"]))
        for name, where in moved.items():
            if name not in self.sources:
                raise RecipeError(f"no source {name!r}{nearest(name, list(self.sources))}")
            whose = name.removeprefix("fisher of ")
            if name not in data["experts"] and whose in data["experts"]:
                data["experts"][whose]["fisher"] = where
            elif name in data["experts"]:
                entry = {k: v for k, v in data["experts"][name].items() if k != "revision"}
                data["experts"][name] = {**entry, "source": where}
            else:
                data["base"] = {"source": where}
        if self.data["magnitude_weights"] is not None and not measure:
            data["weights"] = self.data["magnitude_weights"]
        return check_recipe(data, where=str(self.path))

    def check_sources(self, plan: Plan, report: Verification) -> None:
        """Find sources that are not those of the merge."""
        found = plan.record["sources"]
        for name in self.sources:
            if name in found:
                marks = found[name].get("etags", {})
                self.check_fingerprints(name, found[name]["fingerprints"], report, marks)
            else:
                report.findings.append(f"{self.path}: the merge has no source {name!r}")
        for name in found.keys() - self.sources.keys():
            report.findings.append(f"{self.path}: lacks the source {name!r}")

    def check_fingerprints(
        self,
        name: str,
        found: Mapping[str, str],
        report: Verification,
        etags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Find files of a source that changed, went or came since the merge.

        Args:
            name: of the source.
            found: its files' fingerprints.
            report: what is found is added to it.
            etags: of its files that are read in place.
        """
        marks = self.sources[name].get("etags", {})
        expected = {**self.sources[name]["fingerprints"], **marks}
        found = {**found, **etags}
        # Read in place then and from the disk now, or the other way: nothing to compare.
        either = {file for file in expected if (file in marks) != (file in etags)}
        for file in sorted((expected.keys() | found.keys()) - (either & found.keys())):
            if file not in found:
                report.findings.append(f"{name}: {file} is gone since the merge")
            elif file not in expected:
                report.findings.append(f"{name}: {file} came after the merge")
            elif found[file] != expected[file]:
                report.findings.append(f"{name}: {file} changed since the merge")

    def check_content(self, plan: Plan, report: Verification) -> None:
        """Find what the record says beside its recipe and does not follow from it."""
        if self.composition != plan.composition:
            report.findings.append(f"{self.path}: the composition is not that of the recipe")
        made, here = self.data.get("layerswap_version"), plan.record["layerswap_version"]
        if made != here:
            report.notes.append(f"written by layerswap {made}; this is {here}")
            return
        if not same_json(self.data["recipe"], plan.record["recipe"]):
            report.findings.append(f"{self.path}: the recipe is not written as the merge does")
        if not same_json(self.data.get("tensors"), plan.record.get("tensors")):
            report.findings.append(f"{self.path}: tensors are not those of the merge")
        for key in self.data.keys() - plan.record.keys() - {HASHES, LOST, LOST_TO_DTYPE}:
            report.findings.append(f"{self.path}: {key!r} is no key that the merge writes")


def read_record(folder: Path) -> Recorded:
    """The record of an output folder, or of a merged GGUF file.

    Raises:
        LayerswapError: there is none, or it is not one that layerswap wrote.
    """
    path = folder / RECORD
    if PARTIAL in folder.resolve().name:
        raise MergeError(f"{folder}: an unfinished merge; merge it again")
    if folder.is_dir() and not path.exists():
        raise MergeError(f"{folder}: has no {RECORD}, so layerswap did not write it")
    if is_gguf(folder):
        path, data = folder, read_gguf_record(folder)
    else:
        data = read_json_object(path)
    for key, kind in (("recipe", dict), ("composition", dict), ("sources", dict)):
        if not isinstance(data.get(key), kind):
            raise MergeError(f"{path}: has no {key}")
    for name, entry in data["sources"].items():
        found = entry if isinstance(entry, dict) else {}
        if not isinstance(found.get("fingerprints"), dict) or "source" not in found:
            raise MergeError(f"{path}: sources.{name} has no source with fingerprints")
    if not isinstance(data.get(HASHES, {}), dict):
        raise MergeError(f"{path}: {HASHES} is not a mapping")
    data.setdefault("magnitude_weights", None)
    recipe = check_recipe(data["recipe"], where=str(path))
    try:
        composition = Composition.from_dict(data["composition"])
    except LayerswapError as error:
        raise error.within(f"{path}: composition") from None
    return Recorded(path, data, recipe, composition)


def plan_again(recorded: Recorded, moved: Mapping[str, str], *, allow_pickle: bool) -> Plan:
    """The plan that the record says the output was made by, over its sources of today.

    Raises:
        LayerswapError: a source cannot be opened, or they do not fit together any more.
    """
    plan = make_plan(recorded.recipe_with(moved), allow_pickle=allow_pickle, in_place=True)
    if plan.needs_whole:
        plan = plan.downloaded()

    def as_recorded(name: str, checkpoint: Checkpoint) -> Checkpoint:
        if name not in moved:
            return checkpoint
        entry = recorded.sources[name]
        return replace(checkpoint, source=entry["source"], revision=entry.get("revision"))

    fishers = {
        name: replace(fisher, stored=as_recorded(f"fisher of {name}", fisher.stored))
        for name, fisher in plan.fishers.items()
    }
    base_name = "base" if "base" not in plan.experts else "the base"
    return replace(
        plan,
        recipe=recorded.recipe,
        magnitude=recorded.data["magnitude_weights"],
        experts={name: as_recorded(name, c) for name, c in plan.experts.items()},
        base=as_recorded(base_name, plan.base) if plan.base else None,
        fishers=fishers,
    )


def record_hashes(recorded: Recorded, files: Sequence[Path]) -> None:
    """Add the SHA-256 of these files to `layerswap.json`, which is replaced in one step.

    Raises:
        MergeError: the folder cannot be written.
    """
    data = {**recorded.data, HASHES: {file.name: sha256_of(file) for file in sorted(files)}}
    try:
        write_json(recorded.path, data)
    except OSError as error:
        raise MergeError(f"{recorded.path}: cannot be written ({error.strerror})") from None
