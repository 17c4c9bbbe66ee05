"""Plans that save and load: opens the sources of a recipe, checks them, and builds the model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance, Log, PathLike
from layerswap.checkpoint import (
    Adapter,
    Checkpoint,
    adapt,
    is_adapter,
    open_checkpoint,
    open_configuration,
    read_adapter,
)
from layerswap.checkpoint.commit import PARTIAL
from layerswap.checkpoint.folder import INDEX, SINGLE, downloaded, fetch_checkpoint
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.loading import (
    empty_model,
    load_adapter,
    load_causal_lm,
    load_config,
    load_generation_config,
    load_tokenizer,
    load_weights,
)
from layerswap.checkpoint.read import as_torch
from layerswap.compose import Composition, Recipe, read_recipe
from layerswap.compose.blend import Member, Operation
from layerswap.compose.schema import Expert, SwapMethod
from layerswap.deltas.magnitude import magnitude_weights
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.compatibility import check_together, check_tokenizers
from layerswap.merge.fisher import open_fishers
from layerswap.merge.gguf import (
    GGUFMergePlan,
    check_vocabularies,
    check_vocabulary,
    refuse_for_gguf,
)
from layerswap.merge.layout import OutputTensor
from layerswap.merge.lazy_tensors import Thresholds
from layerswap.merge.lora import AdapterMergePlan, write_adapter
from layerswap.merge.metadata import record, tokenizer_folder, write_configuration
from layerswap.merge.plan import MergePlan, check_unchanged, fisher_sources, stamps_of, with_base
from layerswap.merge.trained import along_training
from layerswap.merge.vocabulary import align
from layerswap.merge.writer import compute_tensor, measure_model, write_plan
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


def load_model(plan: MergePlan) -> PreTrainedModel:
    """The merged model on the CPU, in evaluation mode, bit-equal to what `plan.save` writes.

    Raises:
        CheckpointError: transformers has no class for the architecture, or PEFT is not installed.
        MergeError: the model lacks or adds tensors, or a source changed since the plan was made.
    """
    need_extras("a model in memory", "models")
    plan = plan.downloaded()
    check_unchanged(plan.stamps)
    if isinstance(plan, AdapterMergePlan):
        return _load_adapter(plan)
    thresholds = measure_model(plan.tensors)
    return build_model(plan, {t.name: load_tensor(t, thresholds) for t in plan.tensors})


def load_tensor(
    tensor: OutputTensor, thresholds: Mapping[Operation, Thresholds] | None = None
) -> torch.Tensor:
    """One output tensor as a torch tensor on the CPU, bit-equal to what `plan.save` writes.

    Raises:
        MergeError: a blend gave NaN or infinity.
    """
    return as_torch(compute_tensor(tensor, thresholds), tensor.dtype)


def build_model(
    plan: MergePlan, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plan's model around tensors that are already there, which it shares where it can.

    Args:
        plan: gives configuration and generation configuration.
        weights: every tensor of the plan by name, on the CPU.
        dtype: dtype of the model; the configuration's when None.

    Raises:
        LayerswapError: as `load_model`.
    """
    config, generation = _configurations(plan)
    model, loading = load_weights(config, weights, dtype)
    _check_loading(loading)
    if generation is not None:
        model.generation_config = generation
    return model


def build_empty_model(plan: MergePlan) -> PreTrainedModel:
    """A plan's model without data, on torch's `meta` device, for what its configuration says.

    Raises:
        CheckpointError: transformers has no class for the architecture.
    """
    config, generation = _configurations(plan)
    model = empty_model(config)
    if generation is not None:
        model.generation_config = generation
    return model


def _configurations(plan: MergePlan) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        config = load_config(folder, named=plan.reference.source)
        return config, load_generation_config(folder, named=plan.reference.source)


def plan_tokenizer(plan: MergePlan) -> Any:
    """The tokenizer that a plan's output has.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    return load_tokenizer(tokenizer_folder(plan), named=plan.tokenizer_owner.source)


def _load_adapter(plan: AdapterMergePlan) -> PreTrainedModel:
    """The base with the merged adapter on it, as a PEFT model."""
    assert plan.base is not None, "adapters are opened with their base"
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), plan, allow_non_finite=False)
        where = plan.base.source if plan.base.revision else str(plan.base.folder)
        return load_adapter(load_causal_lm(where, revision=plan.base.revision), folder)


def _check_loading(loading: Any) -> None:
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = loading.get(key)
        if names:
            raise MergeError(f"transformers found {key.replace('_', ' ')}: {sorted(names)[:3]}")


class Plan(MergePlan):
    """What a merge will do, decided and checked; nothing has been written.

    `MergePlan` documents the attributes.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.swap(task="math-expert", language="swahili-expert", bottom=1, top=1)
        >>> plan.nbytes == plan.to_dict()["output_bytes"]
        True
        >>> plan.save("merged", overwrite=True).name
        'merged'
    """

    def save(
        self,
        out: PathLike,
        *,
        overwrite: bool = False,
        threads: int | None = None,
        progress: Advance | None = None,
        allow_non_finite: bool = False,
        resume: bool = False,
        log: Log | None = None,
    ) -> Path:
        """Write the merged checkpoint: a folder that transformers and vLLM load.

        Verbatim tensors are copied bit for bit; blends are accumulated in float32 and rounded
        once. The folder appears whole or not at all. A plan over adapters writes an adapter.

        Args:
            out: the folder to create.
            overwrite: overwrite a folder that layerswap wrote.
            threads: workers; the number of usable processors when None.
            progress: called with the number of bytes just written, by any of the workers.
            allow_non_finite: merge experts that hold NaN or infinity.
            resume: resume the same merge where it was killed, with the output files that it
                finished.
            log: told what the output's dtype loses of the experts' changes, where that is much.

        Returns:
            The absolute path of the folder.

        Raises:
            LayerswapError: the output exists, does not fit on the disk or cannot be written, or
                a source holds NaN or infinity, or changed meanwhile.
        """
        return write_plan(
            self,
            out,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
            allow_non_finite=allow_non_finite,
            resume=resume,
            log=log,
        )

    def load(self) -> PreTrainedModel:
        """The merged model in memory, without writing it: the same weights as `save` writes.

        Returns:
            A transformers model on the CPU, in evaluation mode; a PEFT model from a plan over
            adapters.
        """
        return load_model(self)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of `layerswap.json`."""
        return record(self)


class AdapterPlan(Plan, AdapterMergePlan):
    """A plan over adapters only: saves an adapter, and loads a PEFT model."""


class GGUFPlan(Plan, GGUFMergePlan):
    """A plan over GGUF files only: saves a GGUF file, which llama.cpp and Ollama load."""

    def load(self) -> PreTrainedModel:
        """Refused: transformers would dequantise the model.

        Raises:
            MergeError: always.
        """
        raise MergeError("a plan over GGUF files cannot be loaded here; save it for llama.cpp")


@dataclass(frozen=True)
class Sources:
    """What a recipe's sources turned out to be.

    Attributes:
        experts: the experts by name, in the order asked for.
        base: the base, from the recipe or from the adapters.
        adapters_only: whether the merge is of adapters into an adapter.
    """

    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    adapters_only: bool


def open_sources(
    recipe: Recipe, names: Sequence[str], *, allow_pickle: bool = False, in_place: bool = False
) -> Sources:
    """Open the experts of these names, and the base.

    Args:
        recipe: names them.
        names: of the experts.
        allow_pickle: read pickled weights, as tensors only.
        in_place: read full weights where they lie; adapters, which are small, are downloaded.

    Raises:
        LayerswapError: naming the expert that cannot be opened, and why.
    """
    adapters: dict[str, tuple[Adapter, str | None]] = {}
    full: dict[str, Checkpoint] = {}
    for name in names:
        expert = recipe.experts[name]
        if expert.source is None:
            continue
        _refuse_unfinished(name, expert.source, Path(expert.source))
        try:
            folder, commit = Path(expert.source), None
            if not is_gguf(folder):
                folder, commit = fetch_checkpoint(
                    expert.source, expert.revision, weights=not in_place, urls=in_place
                )
            if is_adapter(folder):
                if in_place and commit:
                    folder, commit = fetch_checkpoint(expert.source, commit)
                adapters[name] = read_adapter(folder), commit
            else:
                full[name] = _open(expert, recipe, allow_pickle, in_place, (folder, commit))
            if expert.adapter is not None:
                full[name] = _with_adapter(full, name, expert.adapter, recipe)
        except LayerswapError as error:
            raise error.within(name) from None
        _refuse_unfinished(name, expert.source, folder.resolve())
    only = bool(adapters) and not full and not recipe.bake
    named = {name: adapter for name, (adapter, _) in adapters.items()}
    base = _open_base(recipe, named, only, allow_pickle, in_place)
    if adapters and base is not None and base.gguf is not None:
        raise MergeError("base: adapters cannot be added to a GGUF file; give its safetensors")
    for name, (adapter, commit) in adapters.items():
        assert base is not None, "adapters were opened without their base"
        source = str(recipe.experts[name].source).partition("@")[0 if commit else 2]
        source = source or str(recipe.experts[name].source)
        patterns = recipe.place_patterns
        try:
            full[name] = adapt(base, adapter, source=source, revision=commit, patterns=patterns)
        except LayerswapError as error:
            raise error.within(name) from None
    found = {name: full[name] for name in names if name in full}
    return Sources(*_in_one_layout(found, base), only)


def _in_one_layout(
    experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """GGUF files beside safetensors, under the names of those."""
    opened = [*experts.values(), *([base] if base is not None else [])]
    like = next((one for one in opened if one.gguf is None and one.tensors), None)
    if like is None or all(one.gguf is None for one in opened):
        return dict(experts), base
    from layerswap.checkpoint.views import as_transformers

    def translated(name: str, checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.gguf is None:
            return checkpoint
        try:
            found = as_transformers(checkpoint, like)
        except LayerswapError as error:
            raise error.within(name) from None
        check_vocabulary(name, checkpoint, like)
        return found

    named = {name: translated(name, checkpoint) for name, checkpoint in experts.items()}
    return named, None if base is None else translated("base", base)


def _with_adapter(
    full: Mapping[str, Checkpoint], name: str, adapter: str, recipe: Recipe
) -> Checkpoint:
    """A full checkpoint with an adapter added to it, as one full checkpoint."""
    if name in full and full[name].gguf is not None:
        raise MergeError("adapter: cannot be added to a GGUF file")
    if name not in full:
        raise MergeError("adapter: the source is an adapter itself; give the model as the source")
    model = full[name]
    folder, _ = fetch_checkpoint(adapter)
    if not is_adapter(folder):
        raise MergeError(f"adapter: {adapter} is no LoRA adapter")
    found = adapt(model, read_adapter(folder), source=model.source, patterns=recipe.place_patterns)
    # The record names the model as the source, and the recipe in it the adapter beside.
    return replace(found, revision=model.revision, folder=model.folder, adapter=None)


def _open_base(
    recipe: Recipe,
    adapters: Mapping[str, Adapter],
    adapters_only: bool,
    allow_pickle: bool,
    in_place: bool,
) -> Checkpoint | None:
    if recipe.base is not None and recipe.base.source is not None:
        entry, context = recipe.base, "base"
        _refuse_unfinished("base", str(entry.source), Path(str(entry.source)))
    elif adapters:
        entry, context = _named_base(adapters), "the base that the adapters name"
    else:
        return None
    try:
        if adapters_only and recipe.weights != "magnitude" and not _has_weights(entry):
            return open_configuration(str(entry.source), revision=entry.revision)
        return _open(entry, recipe, allow_pickle, in_place)
    except LayerswapError as error:
        raise error.within(context) from None


def _named_base(adapters: Mapping[str, Adapter]) -> Expert:
    """The one base that all adapters name."""
    named = {name: (a.base, a.base_revision) for name, a in adapters.items()}
    for name, (base, _) in named.items():
        if base is None:
            raise MergeError(f"{name}: the adapter names no base; give one with `base` (--base)")
    first = next(iter(named))
    for name, found in named.items():
        if found != named[first]:
            raise MergeError(
                f"{first} adapts {named[first][0]} and {name} adapts {found[0]}; if they are the "
                "same model, say which to take with `base` (--base)"
            )
    source, revision = named[first]
    return Expert(source=source, revision=revision)


def _has_weights(entry: Expert) -> bool:
    folder = Path(str(entry.source)).expanduser()
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def _open(
    expert: Expert,
    recipe: Recipe,
    allow_pickle: bool,
    in_place: bool,
    fetched: tuple[Path, str | None] | None = None,
) -> Checkpoint:
    return open_checkpoint(
        str(expert.source),
        revision=expert.revision,
        patterns=recipe.place_patterns,
        allow_pickle=allow_pickle,
        in_place=in_place,
        fetched=fetched,
    )


def _refuse_unfinished(name: str, source: str, folder: Path) -> None:
    if PARTIAL in folder.name:
        raise MergeError(f"{name}: {source} is an unfinished merge; merge it again")


def make_plan(
    recipe: Recipe | PathLike,
    *,
    allow_pickle: bool = False,
    follow_training: bool = False,
    in_place: bool = False,
    log: Log | None = None,
) -> Plan:
    """Open the sources of a recipe, check them against each other, and resolve it.

    Reads headers and JSON only, except that magnitude weights read every tensor.

    Args:
        recipe: what to merge, or the path of a recipe file.
        allow_pickle: read pickled weights (`.bin`), as tensors only.
        follow_training: compose a swap that leaves its zones open along the partition that its
            experts were trained on, where their records name one.
        in_place: leave weights at a URL, and those on the Hub that are not in the local cache,
            where they are; saving the plan reads only the spans that it takes. Magnitude weights
            need whole files, which are downloaded.
        log: told how much is downloaded.

    Raises:
        LayerswapError: a source cannot be opened, the sources do not fit together, or the
            recipe does not fit them.

    Example:
        >>> import layerswap as ls
        >>> recipe = ls.parse_recipe("{experts: {a: math-expert}, soup: {experts: [a]}}")
        >>> ls.make_plan(recipe).composition.experts
        ('a',)
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe))
    opened = open_sources(
        recipe, recipe.experts_in_order, allow_pickle=allow_pickle, in_place=in_place
    )
    opened = _on_disk(opened, log) if recipe.weights == "magnitude" else opened
    sources, base = opened.experts, opened.base
    if follow_training:
        recipe = along_training(recipe, sources)
    if recipe.rank is not None and not opened.adapters_only:
        raise RecipeError("rank: only a merge of adapters into an adapter has one; remove it")
    if base is not None and recipe.base is None:
        # The base that adapters name is recorded, or the merge could not be made again.
        named = Expert(source=base.source, revision=base.revision)
        recipe = recipe.model_copy(update={"base": named})
    together = with_base(sources, base)
    stamps = stamps_of(together.values())
    alignment = None
    quantised = all(checkpoint.gguf is not None for checkpoint in together.values())
    if quantised:
        refuse_for_gguf(recipe)
    elif recipe.blend_type is not None:
        raise RecipeError("blend_type: only a merge of GGUF files has one; remove it")
    elif recipe.tokenizer is None and len({c.vocabulary_size for c in together.values()}) == 1:
        check_tokenizers(together)
    else:
        alignment = align(recipe, together, base)
    drop = check_together(together, aligned=alignment is not None)
    if quantised:
        check_vocabularies(together)
    first = next(iter(sources.values()))
    rows = first.vocabulary_tensors if alignment else ()
    magnitude = _measure(recipe, sources, base, drop.union(rows))
    tensors = {name: place for name, place in first.places.items() if name not in drop}
    composition = recipe.resolve(first.layers, magnitude, tensors)
    if composition.moved:
        if opened.adapters_only or any(expert.fisher for expert in recipe.experts.values()):
            raise RecipeError(
                "layers can be moved of full weights alone: no Fisher, and bake: true"
            )
        sources, base = _restacked(composition, sources, base, aligned=alignment is not None)
    fishers = {}
    if any(expert.fisher for expert in recipe.experts.values()):
        fishers = open_fishers(recipe, sources, drop, aligned=alignment is not None)
        stamps |= stamps_of(fisher_sources(fishers).values())
    kind = GGUFPlan if quantised else AdapterPlan if opened.adapters_only else Plan
    return kind(recipe, composition, sources, base, drop, magnitude, stamps, alignment, fishers)


def _restacked(
    composition: Composition,
    sources: Mapping[str, Checkpoint],
    base: Checkpoint | None,
    *,
    aligned: bool,
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """The experts and the base with the layers that a composition takes of each."""
    from layerswap.checkpoint.views import restack

    moved = {name: restack(one, composition.taken_of(name)) for name, one in sources.items()}
    base = restack(base, composition.taken_of("base")) if base is not None else None
    if composition.shifted:
        # Layers of different numbers may be of different kinds, or shapes.
        check_together(with_base(moved, base), aligned=aligned)
    return moved, base


def _on_disk(opened: Sources, log: Log | None) -> Sources:
    """The sources with whole files on the disk, for weights that are measured over all of them."""

    def whole(name: str, checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.in_place and log is not None:
            size = checkpoint.nbytes / 1e9
            log(f"magnitude weights read whole models: downloading {size:.2f} GB of {name}")
        return downloaded(checkpoint)

    experts = {name: whole(name, checkpoint) for name, checkpoint in opened.experts.items()}
    return replace(opened, experts=experts, base=opened.base and whole("base", opened.base))


def _measure(
    recipe: Recipe,
    sources: Mapping[str, Checkpoint],
    base: Checkpoint | None,
    drop: frozenset[str],
) -> dict[str, float] | None:
    if recipe.weights != "magnitude" or base is None:
        return None
    method = recipe.method
    names = (
        [method.task, method.language]
        if isinstance(method, SwapMethod)
        else list(getattr(method, "experts", ()))
    )
    parts = {
        name: [(_checkpoint(sources, part), weight) for part, weight in recipe.flat(name).weights]
        for name in names
    }
    return magnitude_weights(base, parts, skip=drop)


def _checkpoint(sources: Mapping[str, Checkpoint], member: Member) -> Checkpoint:
    if isinstance(member, str):
        return sources[member]
    raise RecipeError(f"weights: the magnitude of {member} cannot be measured; give numbers")
