"""What of an output can be verified when some of its sources are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from layerswap.checkpoint import Checkpoint, TensorInfo, fingerprint, open_checkpoint
from layerswap.checkpoint.views import restack
from layerswap.compose.blend import Blend
from layerswap.errors import LayerswapError
from layerswap.merge.layout import OutputTensor
from layerswap.merge.metadata import recorded_name
from layerswap.merge.verification.record import Recorded
from layerswap.merge.verification.report import Verification
from layerswap.merge.verification.tensors import TensorPair


def remaining_pairs(
    recorded: Recorded, moved: Mapping[str, str], report: Verification, *, allow_pickle: bool
) -> list[TensorPair]:
    """Tensors of the output that must have the bytes of a source which is still there.

    Opens the output and its sources one by one; notes what cannot be verified without the rest.
    """
    opened: dict[str, Checkpoint] = {}
    recipe = recorded.recipe_with(moved)
    origins = {n: (e.source, e.revision) for n, e in recipe.experts.items()}
    if recipe.base is not None:
        origins.setdefault("base", (recipe.base.source, recipe.base.revision))
    for name in recorded.sources:
        source, revision = origins.get(name, (None, None))
        try:
            found = _open(source, revision, recorded, allow_pickle)
            composition = recorded.composition
            if found is not None and composition.moved:
                found = restack(found, composition.taken_of(name))
        except LayerswapError:
            continue
        if found is not None:
            opened[name] = found
            digests = {recorded_name(file): fingerprint(file) for file in found.files}
            recorded.check_fingerprints(name, digests, report)
    try:
        output = open_checkpoint(str(report.folder), patterns=recorded.recipe.place_patterns)
    except LayerswapError as error:
        report.findings.append(str(error))
        return []
    if output.layers != recorded.composition.layers:
        report.findings.append(f"{report.folder}: not the layers of its composition")
        return []
    return list(_pairs(output, opened, recorded, report))


def _pairs(
    output: Checkpoint,
    opened: Mapping[str, Checkpoint],
    recorded: Recorded,
    report: Verification,
) -> list[TensorPair]:
    pairs: list[TensorPair] = []
    left: Counter[str] = Counter()
    for name, info in output.tensors.items():
        blend = recorded.composition[output.places[name]]
        source = _source(blend, name, info, opened)
        if source is not None:
            pairs.append((OutputTensor(name, info.dtype, info.shape, ((source, 1.0),)), info))
        else:
            left[_why(blend, opened)] += 1
    for why, count in sorted(left.items()):
        report.unverified.append(f"{count} of {len(output.tensors)} tensors, {why}")
    report.unverified.append("configuration, tokenizer and order of the tensors")
    return pairs


def _source(
    blend: Blend, name: str, info: TensorInfo, opened: Mapping[str, Checkpoint]
) -> TensorInfo | None:
    """The stored tensor whose bytes an output tensor must have, if that is sure."""
    if not blend.verbatim or blend.experts[0] not in opened:
        return None
    source = opened[blend.experts[0]].tensors.get(name)
    same = source is not None and (source.dtype, source.shape) == (info.dtype, info.shape)
    return source if same else None


def _why(blend: Blend, opened: Mapping[str, Checkpoint]) -> str:
    gone = [name for name in blend.experts if name not in opened]
    if gone:
        return f"which need {' and '.join(gone)}"
    return "which are computed" if not blend.verbatim else "which are converted or aligned"


def _open(
    source: str | None, revision: str | None, recorded: Recorded, allow_pickle: bool
) -> Checkpoint | None:
    if source is None:
        return None
    return open_checkpoint(
        source,
        revision=revision,
        patterns=recorded.recipe.place_patterns,
        allow_pickle=allow_pickle,
    )
