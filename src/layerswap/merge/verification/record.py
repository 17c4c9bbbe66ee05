"""Reads the record of an output, and plans the same merge again."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, read_json_object, sha256_of
from layerswap.checkpoint.commit import PARTIAL, write_json
from layerswap.checkpoint.header import is_gguf
from layerswap.compose import Composition, Recipe
from layerswap.compose.recipe import check_recipe
from layerswap.compose.yaml_file import nearest
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.api import make_plan
from layerswap.merge.gguf import read_gguf_record
from layerswap.merge.metadata import record
from layerswap.merge.plan import Plan
from layerswap.merge.rounding import LOST_TO_DTYPE
from layerswap.merge.target import RECORD

HASHES = "sha256"
"""The key of `layerswap.json` under which `layerswap verify --record` keeps hashes of files."""
LOST_TO_RANK = "largest_share_lost_to_rank"
"""A key of adapters' records that does not follow from the recipe alone."""


@dataclass(frozen=True)
class Recorded:
    """The record of an output.

    Attributes:
        path: the file.
        data: its whole content.
        recipe: the recipe of the merge.
        composition: the composition of the recipe.
        sources: every source by name, with `source`, `revision` and `fingerprints`.
        hashes: SHA-256 of the output's files by name, if they were recorded.
        magnitude: the measured weights of the merge.
    """

    path: Path
    data: Mapping[str, Any]
    recipe: Recipe
    composition: Composition
    sources: Mapping[str, Mapping[str, Any]]
    hashes: Mapping[str, str]
    magnitude: Mapping[str, float] | None

    def recipe_with(self, moved: Mapping[str, str], *, measure: bool = False) -> Recipe:
        """The recipe with other locations of its sources.

        Args:
            moved: locations by the names of the sources in the record.
            measure: measure magnitude weights again, which reads every byte.
        """
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

    def plan_again(self, moved: Mapping[str, str], *, allow_pickle: bool) -> Plan:
        """The plan of the recorded recipe over its sources of today."""
        plan = make_plan(self.recipe_with(moved), allow_pickle=allow_pickle, in_place=True)
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
        )

    def changed_files(self, name: str, source: Mapping[str, Any]) -> list[str]:
        """The files of a source that changed, went or came since the merge, one line each.

        Args:
            name: name of the source.
            source: its fingerprints, and the ETags of files that are read in place.
        """
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
        findings, notes, again = [], [], record(plan)
        for name in self.sources:
            if name in again["sources"]:
                findings += self.changed_files(name, again["sources"][name])
            else:
                findings.append(f"{self.path}: the merge has no source {name!r}")
        for name in again["sources"].keys() - self.sources.keys():
            findings.append(f"{self.path}: lacks the source {name!r}")
        if self.composition != plan.composition:
            findings.append(f"{self.path}: the composition is not that of the recipe")
        written, here = self.data.get("layerswap_version"), again["layerswap_version"]
        if written != here:
            notes.append(f"written by layerswap {written}; this is {here}")
            return findings, notes
        if not same_json(self.data["recipe"], again["recipe"]):
            findings.append(f"{self.path}: the recipe is not written as the merge does")
        if not same_json(self.data.get("tensors"), again.get("tensors")):
            findings.append(f"{self.path}: tensors are not those of the merge")
        for key in self.data.keys() - again.keys() - {HASHES, LOST_TO_RANK, LOST_TO_DTYPE}:
            findings.append(f"{self.path}: {key!r} is no key that the merge writes")
        return findings, notes

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
    recipe = check_recipe(data["recipe"], where=str(path))
    try:
        composition = Composition.from_dict(data["composition"])
    except LayerswapError as error:
        raise error.within(f"{path}: composition") from None
    magnitude, hashes = data.get("magnitude_weights"), data.get(HASHES, {})
    return Recorded(path, data, recipe, composition, data["sources"], hashes, magnitude)


def same_json(one: object, other: object) -> bool:
    """True for equal values of equal types, in any order of keys: 8 is neither 8.0 nor true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
