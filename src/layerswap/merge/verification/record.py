"""Reading `layerswap.json` back: the recipe, the composition and the sources of an output."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerswap.checkpoint import Checkpoint, read_json_object, sha256_of
from layerswap.checkpoint.commit import PARTIAL, write_json
from layerswap.checkpoint.header import is_gguf
from layerswap.compose import Composition, Recipe
from layerswap.compose.recipe import check_recipe
from layerswap.compose.yaml_file import nearest
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.gguf import read_gguf_record
from layerswap.merge.metadata import RECORD
from layerswap.merge.planner import Plan, make_plan
from layerswap.merge.rounding import LOST_TO_DTYPE
from layerswap.merge.verification.files import same_json
from layerswap.merge.verification.report import Verification

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
