"""Verifies an output by its record and its sources, or by those sources that are still there."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerswap._types import Bars, PathLike, no_bars
from layerswap.checkpoint import Checkpoint, TensorInfo, fingerprints, open_checkpoint, sha256_of
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.views import restack
from layerswap.compose.blend import Blend
from layerswap.errors import LayerswapError, RecipeError
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.layout import OutputTensor
from layerswap.merge.metadata import recorded_name
from layerswap.merge.planner import AdapterPlan, GGUFPlan, Plan, make_plan
from layerswap.merge.rounding import LOST_TO_DTYPE
from layerswap.merge.verification.files import (
    CARD,
    Recorded,
    Verification,
    check_files,
    check_saved,
    check_shards,
    plan_again,
    read_record,
    record_hashes,
)
from layerswap.merge.verification.tensors import (
    ComparisonWork,
    TensorPair,
    computed_work,
    differences,
    verbatim_work,
)
from layerswap.merge.writer import measure_model


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
            digests = {recorded_name(f): one for f, one in fingerprints(found.files).items()}
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


@dataclass(frozen=True)
class _Settings:
    full: bool
    share: float
    seed: int
    allow_pickle: bool
    threads: int
    bars: Bars


def verify(
    folder: PathLike,
    *,
    full: bool = False,
    share: float = 0.1,
    seed: int = 0,
    sources: Mapping[str, PathLike] | None = None,
    record: bool = False,
    allow_pickle: bool = False,
    threads: int | None = None,
    progress: Bars | None = None,
) -> Verification:
    """Compare a merged checkpoint with its sources, as its `layerswap.json` says they were merged.

    Looks for every file and every tensor exactly once and for nothing else, with the header,
    index, configuration and tokenizer that the merge writes; compares verbatim tensors bit for
    bit with their sources; computes a sample of the other tensors again, or all of them, and
    compares the bits; and compares the sources with their recorded fingerprints. Memory does not
    grow with the model. Without all sources it compares what can be compared, and says what
    cannot.

    Args:
        folder: an output of `Plan.save` or `layerswap merge`: a folder, or a GGUF file.
        full: compute every tensor again, and measure magnitude weights again.
        share: of the blocks of each computed tensor to compute again, in (0, 1]. One wrong byte
            in a computed tensor is found with at least this probability.
        seed: of the sample.
        sources: where sources are now, by the name that the record has for them.
        record: if all is well, add the SHA-256 of every file to `layerswap.json`; later
            verifications compare them, also when the sources are gone.
        allow_pickle: read pickled weights of sources, as tensors only.
        threads: workers; the number of usable processors when None.
        progress: opens a progress bar.

    Returns:
        What was found; `passed` says whether all is well.

    Raises:
        LayerswapError: the folder has no record that can be read, or `sources` names none of its
            sources.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.soup(["math-expert", "swahili-expert"])
        >>> ls.verify(plan.save("merged", overwrite=True), full=True).passed
        True
    """
    if not 0 < share <= 1:
        raise RecipeError(f"the share of a sample is above 0 and at most 1, not {share:g}")
    target = Path(folder).expanduser()
    if record and is_gguf(target):
        raise RecipeError("a GGUF file cannot hold its own SHA-256; use sha256sum")
    recorded = read_record(target)
    moved = {name: os.fspath(path) for name, path in (sources or {}).items()}
    recorded.recipe_with(moved)
    workers = threads or len(os.sched_getaffinity(0))
    settings = _Settings(
        full, 1.0 if full else share, seed, allow_pickle, workers, progress or no_bars
    )
    report = Verification(target)
    _check_hashes(recorded, report, settings)
    try:
        plan = plan_again(recorded, moved, allow_pickle=allow_pickle)
    except LayerswapError as error:
        report.unverified.append(f"{error}; say where a source is now with --source NAME=PATH")
        pairs = remaining_pairs(recorded, moved, report, allow_pickle=allow_pickle)
        _compare(pairs, None, report, settings)
    else:
        _check_plan(plan, recorded, moved, report, settings)
    if record and report.passed:
        files = [f for f in sorted(target.iterdir()) if f.is_file() and f != recorded.path]
        record_hashes(recorded, files)
        report.notes.append(f"recorded the SHA-256 of {len(files)} files")
    return report


def _check_plan(
    plan: Plan,
    recorded: Recorded,
    moved: Mapping[str, str],
    report: Verification,
    settings: _Settings,
) -> None:
    recorded.check_sources(plan, report)
    recorded.check_content(plan, report)
    if recorded.recipe.weights == "magnitude":
        _check_magnitude(recorded, moved, report, settings)
    if isinstance(plan, AdapterPlan):
        check_saved(plan, report)
        return
    pairs = check_shards(plan, report)
    if not isinstance(plan, GGUFPlan):
        lost = recorded.data.get(LOST_TO_DTYPE)
        check_files(plan, report, card=not moved, lost=lost)
    _compare(pairs, plan, report, settings)


def _check_magnitude(
    recorded: Recorded, moved: Mapping[str, str], report: Verification, settings: _Settings
) -> None:
    weights = recorded.data["magnitude_weights"]
    if not settings.full:
        report.notes.append("magnitude weights are taken from the record; --full measures them")
        return
    recipe = recorded.recipe_with(moved, measure=True)
    found = make_plan(recipe, allow_pickle=settings.allow_pickle).magnitude or {}
    # Another processor may add up in another order.
    same = weights.keys() == found.keys() and all(
        math.isclose(weights[name], found[name], rel_tol=1e-9) for name in found
    )
    if not same:
        report.findings.append(f"{recorded.path}: magnitude_weights are not those of the sources")


def _compare(
    pairs: Sequence[TensorPair], plan: Plan | None, report: Verification, settings: _Settings
) -> None:
    """Compare tensors bit for bit, and count them."""
    known = {} if plan is None else measure_model(plan.tensors, settings.threads)
    copied = verbatim_work(pairs)
    again = computed_work(pairs, share=settings.share, seed=settings.seed, known=known)
    work: list[ComparisonWork] = [*copied, *again]
    for kind, count, part in (
        (True, report.verbatim, copied),
        (False, report.computed, again),
    ):
        chosen = [tensor for tensor, _ in pairs if tensor.verbatim is kind]
        count.tensors, count.nbytes = len(chosen), sum(tensor.nbytes for tensor in chosen)
        count.compared = sum(piece.nbytes for piece in part)
    with settings.bars("verifying", sum(piece.nbytes for piece in work)) as progress:
        found, non_finite = differences(
            work, known=known, threads=settings.threads, progress=progress
        )
    if non_finite:
        report.notes.append(f"NaN or infinity in {some_tensors(non_finite)}, as in the source")
    for tensor, info in pairs:
        if tensor.name in found:
            at = f"from byte {found[tensor.name]} of {info.nbytes} on"
            source = "its source" if tensor.verbatim else "what the recipe gives"
            report.findings.append(f"{info.file}: tensor {info.name!r} is not {source}, {at}")


def _check_hashes(recorded: Recorded, report: Verification, settings: _Settings) -> None:
    """Compare files with their recorded SHA-256."""
    if not recorded.hashes:
        return
    files = {report.folder / name: digest for name, digest in sorted(recorded.hashes.items())}
    there = {file: digest for file, digest in files.items() if file.is_file()}
    total = sum(file.stat().st_size for file in there)
    with settings.bars("hashing", total) as progress:
        for file, digest in there.items():
            if sha256_of(file, progress) == digest:
                report.hashed += 1
            elif file.name == CARD:  # the user's to write
                report.notes.append(f"{CARD} changed since its SHA-256 was recorded")
            else:
                report.findings.append(f"{file}: changed since its SHA-256 was recorded")
    gone = sorted(files.keys() - there.keys() - {report.folder / CARD})
    report.findings += [f"{file}: gone since its SHA-256 was recorded" for file in gone]
