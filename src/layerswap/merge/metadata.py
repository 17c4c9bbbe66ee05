"""Writes the files next to the weights, such as the card, and lists commands that use a model."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerswap.checkpoint import (
    Checkpoint,
    fingerprints,
    parse_json,
    read_json_object,
    text_config,
)
from layerswap.checkpoint.adapted import OF_LABELS, adapted
from layerswap.checkpoint.adapter import ADAPTER_CONFIG
from layerswap.checkpoint.given import CONFIG
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.hub import BESIDE_WEIGHTS, PROCESSOR_FILES, TOKENIZER_FILES, local_name
from layerswap.checkpoint.loading import IMPLEMENTATIONS, PEFT_TASKS, SPELLINGS
from layerswap.checkpoint.read import FLOAT_CODES
from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.compose.composition import draw
from layerswap.ground import system
from layerswap.ground.commit import write_json
from layerswap.ground.errors import CheckpointError, LayerswapError, visible
from layerswap.ground.strict_json import open_source, quoted, read_source
from layerswap.ground.yaml_file import dump_yaml, parse_yaml
from layerswap.merge.heads import MODULES, embeds, labels_of_head
from layerswap.merge.plan import Plan
from layerswap.merge.target import RECORD
from layerswap.merge.tokenizers import (
    RAW_FILES,
    TEMPLATES,
    TOKEN_ID,
    VOCABULARY_SIZES,
    add_tokens,
)
from layerswap.merge.trained import read_training
from layerswap.merge.writer import LOST_TO_DTYPE, rounding_note
from layerswap.versions import __version__

VOCABULARIES = frozenset({"tokenizer.json", *RAW_FILES})
TOKENIZER = (*TOKENIZER_FILES, f"{TEMPLATES}/*.jinja")
COPIED = (("generation_config.json",), TOKENIZER, PROCESSOR_FILES)
"""Patterns of files that are copied, each group as a whole from the first source that has one of
them, and the first group only from the source of the tokenizer, or its base if that is an adapter.
The base is the last source. Code (`*.py`) is never copied."""
LOST_TO_RANK = "largest_share_lost_to_rank"
"""The key of an adapter's record for the largest error of cutting ranks."""
MODULE_FILES = (MODULES, "config_sentence_transformers.json", "sentence_*_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CODE = (".py", ".pyc")
VERSIONS = re.compile(rb'"__version__":\s*(\{[^}]*\}|"[^"]*")')
UNCOPIED = re.compile(
    r"\..*|__pycache__|layerswap.*|(licen[cs]e|notice|use_policy|requirements)\b.*"
    r"|.*\.(md|png|jpe?g|gif|svg|webp|pdf|ya?ml|log|ipynb|gguf|onnx|h5|msgpack|ot|tflite)"
    r"|(pytorch_)?model[-._].*|.*-of-\d+\..*|adapter_.*|consolidated.*|params\.json"
    r"|original|onnx|openvino|runs|logs|wandb|eval|.*results\.(json|csv|txt)|latest"
    r"|(optimizer|scheduler|scaler|rng_state|train(ing|er)_|events\.|checkpoint-|global_step).*"
    r"|zero_to_fp32\.py",
    re.IGNORECASE,
)
"""Matches files that no output needs: weights in other forms, texts, leftovers of training."""
LONGEST_FRONT = 1 << 16
"""Most bytes of a card that are read."""


def write_documents(
    folder: Path,
    plan: Plan,
    content: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write configuration, tokenizer, generation configuration, card and record.

    `measured` holds values that only writing shows; None if not measured.
    """
    facts = {key: value for key, value in (measured or {}).items() if value is not None}
    write_configuration(folder, plan)
    (folder / "README.md").write_bytes(model_card(plan, lost=facts.get(LOST_TO_DTYPE)).encode())
    write_json(folder / RECORD, {**content, **facts})


def write_configuration(folder: Path, plan: Plan) -> None:
    """Write `config.json`, and copy tokenizer and generation configuration."""
    write_json(folder / CONFIG, _config(plan))
    for group in COPIED:
        _copy_first(folder, plan, group)
    _write_modules(folder, plan)
    if plan.alignment is not None and plan.alignment.added:
        add_tokens(folder, plan.alignment, plan.experts)


def write_adapter_documents(folder: Path, plan: Plan, lost: float) -> None:
    """Write tokenizer, card and record of a merged adapter."""
    _copy_first(folder, plan, TOKENIZER)
    _write_modules(folder, plan)
    (folder / "README.md").write_bytes(model_card(plan, library="peft").encode())
    write_json(folder / RECORD, {**record(plan), LOST_TO_RANK: lost})


def record(plan: Plan) -> dict[str, Any]:
    """Return the content of `layerswap.json`, which reproduces the merge."""
    numbered = plan.reference.numbered
    return {
        "layerswap_version": __version__,
        "recipe": _recipe(plan, recorded_source),
        "magnitude_weights": plan.magnitude,
        "composition": plan.composition.to_dict(),
        **({"layers_by_number": numbered.stack} if numbered else {}),
        "sources": {name: _source(checkpoint) for name, checkpoint in plan.sources.items()},
        # An adapter's tensors are the tensors of the modules that it adapts.
        **({"tensors": plan.account} if plan.format.name != "adapter" else {}),
        **plan.format.layout_facts(plan),
    }


def model_card(
    plan: Plan, *, library: str = "transformers", lost: Mapping[str, Any] | None = None
) -> str:
    """The model card: metadata for the Hub, code for loading, the drawing and the recipe."""
    licences = {name: licence_of(checkpoint) for name, checkpoint in plan.used.items()}
    auto = _auto_class(plan.reference)
    origin = _descent(plan, library)
    metadata = {
        "base_model": origin.pop("base_model", None),
        "language": list(plan.recipe.languages) or None,
        "library_name": library,
        **_licence(licences),
        "pipeline_tag": "text-generation" if plan.reference.writes else None,
        "tags": ["merge", "layerswap"],
        **origin,
    }
    filled = {key: value for key, value in metadata.items() if value}
    front = dump_yaml(filled)
    experts = "\n".join(
        f"- {in_code(name)}: {in_markdown(_card_name(c))} "
        f"(licence: {licences[name] or 'not given'}{_rows_of(c)})"
        for name, c in plan.used.items()
    )
    recipe = dump_yaml(_recipe(plan, _card_name))
    note = rounding_note(lost) if lost else None
    limits = f"## Precision\n\n{note}\n\n" if note else ""
    remark = f" {in_markdown(plan.remark)}" if plan.remark else ""
    title, made = (
        "A layer-swapped model",
        "Recomposed layer by layer from experts of one base with",
    )
    if len(plan.composition.experts) == 1:
        title, made = "A copy of a model", "A copy of one model, written by"
    load = _load_adapter(auto, plan.reference) if library == "peft" else _LOAD.format(auto=auto)
    load += _GENERATE * (library != "peft" and auto.endswith(("CausalLM", "Seq2SeqLM")))
    return (
        f"---\n{front}---\n\n# {title}\n\n{made} layerswap {__version__}."
        f"{remark}\n\n## Use\n\n```python\n{load}```\n\n"
        f"{limits}## Experts\n\n{experts}\n\n"
        f"## Composition\n\n{fenced(draw(plan.composition))}\n\n"
        f"## Recipe\n\n{fenced(recipe, 'yaml')}\n\n"
        "`layerswap.json` holds the whole record.\n"
    )


def in_code(name: str) -> str:
    """Format a name as inline code in Markdown."""
    return f"`{visible(name).replace('`', chr(39))}`"


def in_markdown(name: str) -> str:
    """Escape a name for one line of Markdown."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", visible(name))


def fenced(text: str, language: str = "") -> str:
    """Fence a text as Markdown code that none of its lines can close."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


_LOAD = """\
from transformers import {auto}, AutoTokenizer

folder = "."  # this folder, or the id of this repository
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto}.from_pretrained(folder)
"""
_GENERATE = """\
inputs = tokenizer("2 + 3 =", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
"""
TASK = re.compile(
    r"For((Sequence|Token)Classification|QuestionAnswering|MultipleChoice|MaskedLM|PreTraining)$"
)
"""Matches ends of class names for which transformers has an Auto class."""
NOT_OF_PEFT = re.compile("For(MultipleChoice|MaskedLM|PreTraining)$")
"""Matches the end of an Auto class that PEFT does not have."""


def _auto_class(model: Checkpoint) -> str:
    """The Auto class of transformers for a model."""
    if model.headless:
        return "AutoModel"
    if task := TASK.search(model.class_name or ""):
        return f"AutoModel{task[0]}"
    encodes = model.config.get("is_encoder_decoder")
    return "AutoModelForSeq2SeqLM" if encodes else "AutoModelForCausalLM"


def _load_adapter(auto: str, model: Checkpoint) -> str:
    """Python code that loads an adapter."""
    name = NOT_OF_PEFT.sub("", auto.replace("Auto", "AutoPeft"))
    if task := PEFT_TASKS.get(str(adapted(model).adapter.config.get("task_type"))):
        name = f"AutoPeftModelFor{task[0]}"
    labels = model.config.get("id2label") if model.labelled else None
    count = f", num_labels={len(labels)}" if labels else ""
    return f"""\
from peft import {name}

model = {name}.from_pretrained("."{count})  # or the id of this repository
"""


def _rows_of(checkpoint: Checkpoint) -> str:
    """The card's words for the rows of an expert's training; empty without a readable record."""
    try:
        training = read_training(checkpoint)
    except LayerswapError:
        return ""
    return f"; trained on {training.rows:,} rows" if training and training.rows else ""


LICENCE = re.compile(r"[\w.+-]{1,60}")
"""A name of a licence that the Hub accepts."""


def licence_of(checkpoint: Checkpoint) -> str | None:
    """The licence in a checkpoint's own card; None without a readable one."""
    try:
        with open_source(checkpoint.folder / "README.md") as file:
            buffer = bytearray(LONGEST_FRONT)
            text = buffer[: system.read_at(file, memoryview(buffer), 0)].decode("utf-8", "replace")
        head, front, _ = text.replace("\r\n", "\n").split("---\n", 2)
        metadata = None if head else parse_yaml(front, "README.md")[0]
    except (OSError, ValueError, LayerswapError):
        return None
    name = metadata.get("license") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and LICENCE.fullmatch(name) else None


def _licence(licences: Mapping[str, str | None]) -> dict[str, Any]:
    """The licence of the output: the experts' if they agree; nothing if one is unknown."""
    names = set(licences.values())
    if None in names:
        return {}
    if len(names) == 1:
        return {"license": str(*names)}
    return {"license": "other", "license_name": "mixed"}


def _descent(plan: Plan, library: str) -> dict[str, Any]:
    """Return the Hub's metadata on base models; only sources with a Hub id count."""
    # A GGUF file's name follows its repository's.
    experts = ["/".join(c.source.split("/")[:2]) for c in plan.used.values() if c.revision]
    base = [plan.base.source] if plan.base and plan.base.revision else []
    if library == "peft":
        return {"base_model": base, "base_model_relation": "adapter"} if base else {}
    if experts:
        return {"base_model": experts, "base_model_relation": "merge"}
    return {"base_model": base, "base_model_relation": "finetune"} if base else {}


def tokenizer_folder(plan: Plan) -> Path:
    """The folder of a plan's tokenizer; the base's for an adapter without its own."""
    files = _first(plan, TOKENIZER)
    return files[0].parent if files else plan.tokenizer_owner.folder


def generation_file(plan: Plan) -> Path | None:
    """The generation configuration of the output: of the source of its tokenizer, if it has one."""
    return next(iter(_first(plan, COPIED[0])), None)


def _copy_first(folder: Path, plan: Plan, names: Sequence[str]) -> None:
    """Copy these files from the first source that has one of them."""
    for file in _first(plan, names):
        target = folder / (TEMPLATES if file.parent.name == TEMPLATES else "") / file.name
        target.parent.mkdir(exist_ok=True)
        copy_document(file, target)


def copy_document(source: Path, target: Path) -> None:
    """Copy a file next to the weights; a tokenizer's configuration without references to code."""
    if source.name == "tokenizer_config.json":
        config = read_json_object(source)
        if (clean := without_code(config)) != config:
            write_json(target, clean)
            return
    target.write_bytes(read_source(source))  # not through a link that was planted meanwhile


def _write_modules(folder: Path, plan: Plan) -> None:
    for name, file in copied_modules(plan).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(read_source(file))


def _first(plan: Plan, names: Sequence[str]) -> list[Path]:
    """The files of this group in the first source that has one of them.

    A template or settings alone are no tokenizer: the files come from the first source with a
    vocabulary, and templates from the first source with a template.
    """
    folders = [c.folder for c in (plan.tokenizer_owner, *plan.sources.values())]
    if names is COPIED[0]:  # another model's would stop at another token
        of_base = [plan.base.folder] if plan.base and plan.tokenizer_owner.needs_base else []
        folders = [plan.tokenizer_owner.folder, *of_base]
    groups = [[f for n in names for f in sorted(c.glob(n)) if f.is_file()] for c in folders]
    if names is not TOKENIZER:
        return next((files for files in groups if files), [])
    files = next((files for files in groups if VOCABULARIES & {f.name for f in files}), [])
    alone = [] if files == groups[0] else [f for f in groups[0] if _is_template(f)]
    return [*(f for f in files if not (alone and _is_template(f))), *alone]


def _is_template(file: Path) -> bool:
    return "chat_template" in file.name or file.parent.name == TEMPLATES


def copied_modules(plan: Plan) -> dict[str, Path]:
    """The files of sentence-transformers' modules to copy, by their paths; refuses pickles."""
    owner = _owner(plan)
    files = module_files(owner.folder)
    safe = {file.parent for file in files.values() if file.suffix == ".safetensors"}
    for file in (file for file in files.values() if file.parent not in safe):
        # Pickles are not downloaded, so a module of matrices may have none here.
        if file.suffix in PICKLES or (
            file.name == CONFIG and b'"in_features"' in read_source(file)
        ):
            remedy = f"load {owner.identity} with sentence-transformers and save it again"
            raise CheckpointError(f"{file.parent}: a module without safetensors; {remedy}")
    return files


def _owner(plan: Plan, *, modules: bool = True) -> Checkpoint:
    """The checkpoint that gives the other files: the first expert, or its base if it is baked."""
    first, full = plan.reference, plan.format.name != "adapter"
    bare = first.needs_base and full and not (modules and embeds(first))
    return plan.base if plan.base and bare else first


def module_files(folder: Path) -> dict[str, Path]:
    """The files of sentence-transformers' modules; no code, and no pickles beside safetensors."""
    files = [file for form in MODULE_FILES for file in sorted(folder.glob(form))]
    home, path = folder.resolve(), folder / MODULES
    modules = parse_json(read_source(path), str(path)) if path.is_file() else []
    for module in modules if isinstance(modules, list) else []:
        given = module.get("path") if isinstance(module, dict) else None
        inner = folder / os.path.normpath(str(given or "."))
        if not inner.resolve().is_relative_to(home):
            raise CheckpointError(
                f"{path}: {quoted(given)} leads out of the folder; move the module into it"
            )
        if inner.resolve() != home:
            files += sorted(file for file in inner.rglob("*") if not file.is_dir())
    safe = {file.parent for file in files if file.suffix == ".safetensors"}
    files = [f for f in files if not (f.suffix in PICKLES and f.parent in safe)]
    named = {f.relative_to(folder).as_posix(): f for f in files if f.suffix not in CODE}
    return {name: file for name, file in named.items() if "/." not in name}


def module_notes(plan: Plan) -> list[str]:
    """Note experts whose modules differ from the output's."""
    own, owner, notes = copied_modules(plan), _owner(plan).identity, []
    for name, checkpoint in plan.used.items():
        theirs = module_files(checkpoint.folder)
        if theirs and not own:
            notes.append(f"{name} has modules of sentence-transformers; the output has none")
        elif theirs:
            both = {file: (own.get(file), theirs.get(file)) for file in {**own, **theirs}}
            differ = (f for f, pair in both.items() if len({*map(_unversioned, pair)}) > 1)
            if (file := next(differ, None)) is not None:
                notes.append(f"{name} has another {file}; the output has {owner}'s")
    return notes


def _unversioned(file: Path | None) -> bytes | None:
    """Read a file without the versions of the libraries that wrote it."""
    return VERSIONS.sub(b"", read_source(file)) if file else None


def left_out_notes(plan: Plan) -> list[str]:
    """Note files of the first expert, or of an adapter's base, that the output lacks."""
    first = _owner(plan, modules=False)
    folder = first.tokenizer_folder
    if folder is None:  # a GGUF file holds all of its model
        return []
    made = {TEMPLATES, *BESIDE_WEIGHTS, *(file.name for file in first.all_files)}
    made |= {name.partition("/")[0] for name in module_files(folder)}
    listed = (entry.name for entry in folder.iterdir())
    left = sorted(name for name in listed if name not in made and not UNCOPIED.fullmatch(name))
    python = [name for name in left if name.endswith(".py")]
    texts = {name: read_source(folder / name) for name in (CONFIG, "tokenizer_config.json", MODULES)
             if (folder / name).is_file()}  # fmt: skip
    code = [f"auto_map of its {name}" for name, text in texts.items() if b'"auto_map"' in text]
    notes = []
    if code or any(f'"{name[:-3]}.'.encode() in texts.get(MODULES, b"") for name in python):
        left = [name for name in left if name not in python]
        notes.append(
            f"{first.identity}'s own code is left out, as no code is copied; add it to the output "
            f"({', '.join(code + python)}) unless the libraries have the same classes"
        )
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        names = f"{', '.join(left[:5])}{more} of {first.identity}"
        notes.append(f"left out of the output: {names}; add what it needs")
    return notes


def _config(plan: Plan) -> dict[str, Any]:
    config = without_code(plan.reference.config)
    if labels := labels_of_head(plan.composition, plan.used, plan.reference):
        config = {key: value for key, value in config.items() if key not in OF_LABELS} | labels
    dtypes = {t.dtype for t in plan.tensors if t.dtype in FLOAT_CODES}
    if len(dtypes) == 1 and not plan.reference.quantised:
        set_dtype(config, FLOAT_CODES[dtypes.pop()])
    if plan.alignment is not None:
        text = text_config(config)
        sizes = [key for key in VOCABULARY_SIZES if text.get(key) == text.get("vocab_size")]
        _set_known(config, sizes, plan.alignment.size)
    config = _with_token_ids(config, plan.tokenizer_owner.config)
    if plan.drop:
        config.setdefault("tie_word_embeddings", True)
        _set_known(config, ("tie_word_embeddings",), True)
    return config


def _with_token_ids(config: Mapping[str, Any], owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with another's ids of tokens, at every depth."""
    ids = {key: value for key, value in owner.items() if TOKEN_ID.search(key)}
    inner = {
        key: _with_token_ids(value, theirs)
        for key, value in config.items()
        if isinstance(value, dict) and isinstance(theirs := owner.get(key), dict)
    }
    return {**config, **ids, **inner}


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove references to code, classes, kernels and local folders from a configuration."""
    clean = {key: without_code(v) if isinstance(v, dict) else v for key, v in config.items()
             if not (key.endswith("name_or_path") and Path(str(v)).is_absolute())}  # fmt: skip
    clean.pop("auto_map", None)
    return {k: v for k, v in clean.items() if k not in SPELLINGS or v in IMPLEMENTATIONS}


def set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of the weights in a configuration, under the key that it uses."""
    config.setdefault("dtype" if "torch_dtype" not in config else "torch_dtype", dtype)
    _set_known(config, ("dtype", "torch_dtype"), dtype)


def _set_known(config: dict[str, Any], keys: Sequence[str], value: object) -> None:
    """Set keys that exist, also in the text part of a multimodal configuration."""
    config.update({key: value for key in keys if key in config})
    text = config.get("text_config")
    if isinstance(text, dict):
        config["text_config"] = {**text, **{key: value for key in keys if key in text}}


def _recipe(plan: Plan, name_of: Callable[[Checkpoint], str]) -> dict[str, Any]:
    """The recipe as plain data, sources named by `name_of` and Hub revisions pinned."""
    data = plan.recipe.model_dump(mode="json", exclude_defaults=True)
    opened = [(data["experts"][name], c) for name, c in plan.experts.items()]
    if plan.base:
        opened.append((data["base"], plan.base))
    for entry, checkpoint in opened:
        entry["source"] = name_of(checkpoint)
        if checkpoint.revision:
            entry["revision"] = checkpoint.revision
    for entry in data["experts"].values():
        if name_of is _card_name and "adapter" in entry:
            entry["adapter"] = _last_part(entry["adapter"])
    for name, fisher in plan.fishers.items():
        stored = fisher.stored
        pinned = f"@{stored.revision}" if stored.revision else ""
        data["experts"][name]["fisher"] = name_of(stored) + pinned
    return data


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    remote = [file for file in checkpoint.files if isinstance(file, RemoteFile)]
    local = (file for file in checkpoint.files if isinstance(file, Path))
    return {
        "source": recorded_source(checkpoint),
        "revision": checkpoint.revision,
        "fingerprints": {recorded_name(file): mark for file, mark in fingerprints(local).items()},
        # Files that are read in place are identified by the Hub's hashes.
        **({"etags": {file.name: file.etag for file in remote}} if remote else {}),
    }


def recorded_source(checkpoint: Checkpoint) -> str:
    """A source as it was given; a relative path starts with `./`, unlike a Hub id."""
    source = checkpoint.source
    plain = checkpoint.revision is None and not source.startswith(("/", ".", "~"))
    return f"./{source}" if plain else source


def recorded_name(file: WeightFile) -> str:
    """Return a weight file's name for records; of a GGUF file only its part number."""
    if not is_gguf(file.name):
        return file.name
    return re.sub(r"^.*?(-\d{5}-of-\d{5})?\.gguf$", r"model\1.gguf", file.name, flags=re.DOTALL)


def _card_name(checkpoint: Checkpoint) -> str:
    # A local path is of no use to a reader of the card, and may be private.
    return checkpoint.source if checkpoint.revision else local_name(checkpoint.folder)


def for_upload(folder: Path) -> dict[str, str]:
    """Return the documents of an output that name local folders, without the paths to them."""
    files = [folder / RECORD, folder / ADAPTER_CONFIG]
    texts = {file.name: file.read_text("utf-8") for file in files if file.is_file()}
    record = json.loads(texts[RECORD])
    for entry in (*record["recipe"]["experts"].values(), *record["sources"].values()):
        for given in filter(None, map(entry.get, ("source", "adapter"))):
            path, last = (json.dumps(p, ensure_ascii=False) for p in (given, _last_part(given)))
            texts = {name: text.replace(path, last) for name, text in texts.items()}
    return texts


def _last_part(given: str) -> str:
    local = given.startswith((".", "~")) or Path(given).is_absolute()
    return f"./{local_name(Path(given))}" if local else given


# --- commands that use a model ---

PREFER = ["ask", "prefer", "ANSWERS.tsv", "--models", "A,B", "--out", "asked"]
"""Arguments of the command by which speakers compare answers."""


def uses(
    model: Path,
    play: list[str],
    *,
    push: list[str] | None = None,
    language: str = "LANG",
    gguf: bool = True,
) -> list[list[str]]:
    """List arguments of commands that use a model; a user replaces the words in capitals.

    Args:
        model: the folder of the merged model.
        play: arguments of `play` for its composition.
        push: the command that writes the model, for its upload; None for no upload.
        language: code of its language.
        gguf: its base exists as GGUF; otherwise `deploy` checks the folder.
    """
    text = f"{language}=lines.txt"
    written = ["--like", "BASE.gguf", "--text", text, "--out", "deployed"]
    deploy = ["deploy", str(model), *(written if gguf else [])]
    upload = [[*push, "--push", "OWNER/NAME"]] if push else []
    return [["play", *play], deploy, *upload, PREFER]


def study_uses(root: Path, language: str) -> list[list[str]]:
    """The uses of the selected model of a study in a language."""
    best = root / "best" / f"{language}.yaml"
    return uses(root / "merged" / language, [str(root)],
                push=["merge", str(best), "--out", "best"], language=language)  # fmt: skip


def command_lines(commands: list[list[str]]) -> str:
    """The commands as lines for a shell."""
    return "\n".join(shlex.join(["layerswap", *words]) for words in commands)
