"""The files of an output against those that the merge writes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerswap.checkpoint import read_header, read_json_object
from layerswap.checkpoint.folder import CONFIG
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.header import is_gguf
from layerswap.errors import CheckpointError
from layerswap.merge.layout import OutputTensor, Shard, index_of
from layerswap.merge.metadata import RECORD, model_card, write_configuration
from layerswap.merge.planner import AdapterPlan, Plan
from layerswap.merge.verification.report import Verification
from layerswap.merge.verification.tensors import TensorPair

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
        wrong.append(f"{path}: lacks {_some(missing)} that the merge writes there")
    if extra := found.keys() - expected.keys():
        wrong.append(f"{path}: holds {_some(extra)} that the merge does not write there")
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


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first!r}" + (f" and {len(rest)} more tensors" if rest else "")
