"""One call from a merged folder to a folder for Ollama, llama.cpp and LM Studio, with its proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import open_checkpoint, refuse_target
from layerswap.checkpoint.given import fetch_checkpoint
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.deploy.convert import LIKE, plan_conversion
from layerswap.deploy.description import stops_of
from layerswap.deploy.modelfile import modelfile
from layerswap.deploy.proof import POSITIONS, Check, Proof, Reference, end_of_turn, prove
from layerswap.ground.commit import atomic_folder, write_json
from layerswap.ground.errors import MergeError
from layerswap.ground.types import Log
from layerswap.merge.target import MergeOptions
from layerswap.reading.files import lines_of
from layerswap.report.tables import Table

if TYPE_CHECKING:
    from layerswap.report.tables import Cell

RECORD = "deploy.json"
"""The findings, in every folder that `deploy` wrote."""
MODELFILE = "Modelfile"


@dataclass(frozen=True)
class Deployed:
    """The outcome of a deployment: proofs by file, notes on differences, and lines to type."""

    proofs: Sequence[Proof]
    notes: Sequence[str]
    commands: Sequence[str]

    @property
    def problems(self) -> list[str]:
        """Every difference between a file and the folder."""
        return [
            f"{Path(proof.file).name}: {line}" for proof in self.proofs for line in proof.problems
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"equal": not self.problems, "notes": list(self.notes),
                "commands": list(self.commands),
                "files": [asdict(proof) for proof in self.proofs]}  # fmt: skip


def deploy(
    source: str,
    out: Path,
    *,
    like: str,
    kinds: Sequence[str] = (LIKE,),
    lines: Mapping[str, Sequence[str]] | None = None,
    positions: int = POSITIONS,
    options: MergeOptions | None = None,
    log: Log = lambda line: None,
) -> Deployed:
    """Write a folder of safetensors as GGUF files, and prove that they answer as it does.

    Args:
        source: a folder or Hub id, such as a merged model.
        out: the folder to write: one file for each type, `Modelfile`, `deploy.json`.
        like: a GGUF file of the base; see `plan_conversion`.
        kinds: types of the files; see `Conversion`.
        lines: texts by language; None for no proof.
        positions: see `prove`.
        options: settings of writing.
        log: called with a line for each step.

    Raises:
        LayerswapError: the two are no pair, a type cannot be written, or `out` is not ours.
            Nothing is written then.
    """
    options = options or MergeOptions()
    refuse_target(out, marker=RECORD, overwrite=options.overwrite)
    kinds = [kind if kind == LIKE else kind.upper() for kind in kinds]
    planned = {kind: plan_conversion(source, like, kind) for kind in dict.fromkeys(kinds)}
    notes = [*dict.fromkeys(note for conversion in planned.values() for note in conversion.notes)]
    folder = next(iter(planned.values())).folder.folder
    names = {kind: "model.gguf" if len(planned) == 1 else f"model-{kind}.gguf" for kind in planned}
    with atomic_folder(out, marker=RECORD, overwrite=options.overwrite) as draft:
        proofs, reference = [], Reference(source)
        for kind, conversion in planned.items():
            log(f"writing {names[kind]}")
            file = conversion.write(draft / names[kind], options)
            if lines is not None:
                proof = prove(reference, file, lines, positions=positions, log=log)
                shown = proof.kind if kind == LIKE else kind
                proofs.append(replace(proof, file=names[kind], kind=shown))
        first = next(iter(names.values()))
        (draft / MODELFILE).write_text(modelfile(folder, first), "utf-8", newline="\n")
        deployed = Deployed(proofs, notes, commands(source, out, first))
        write_json(draft / RECORD, deployed.to_dict())
    return deployed


def check_folder(source: str) -> Deployed:
    """Check that a folder answers and stops in transformers and vLLM, without a GGUF file."""
    folder, _ = fetch_checkpoint(source, None)
    opened = open_checkpoint(source)
    tokenizer = load_tokenizer(folder)
    end, stops = end_of_turn(tokenizer), stops_of(tokenizer, opened)
    problems: tuple[str, ...] = ()
    if end is not None and end not in stops:
        text = tokenizer.convert_ids_to_tokens(end)
        problems = (f"{text!r} ends a turn, but answers end at {sorted(stops)} (`eos_token_id`)",)
    note = "" if tokenizer.chat_template else "the folder has no chat template"
    proof = Proof(source, "safetensors", (Check("stop", 1, problems, note),))
    hint = "a GGUF file needs --like BASE.gguf and --out DIR: nearly every base exists as GGUF"
    return Deployed([proof], [hint], [f"vllm serve {source}"])


def commands(source: str, out: Path, file: str) -> list[str]:
    """Lines to type that serve the file or the folder."""
    return [
        f"ollama create {out.name} -f {out}/{MODELFILE} && ollama run {out.name}",
        f"llama-server -m {out}/{file}",
        f"lms import {out}/{file}    # LM Studio",
        f"vllm serve {source}",
    ]


def agreement_table(proofs: Sequence[Proof]) -> Table:
    """Agreement with the folder, by type and language."""
    rows: list[list[Cell]] = [
        [proof.kind, agreement.language, agreement.positions, agreement.same,
         f"{agreement.divergence_nats:.3f}"]
        for proof in proofs
        for agreement in proof.agreements
    ]  # fmt: skip
    return Table(
        ["type", "language", "positions", "same likeliest token, %", "divergence, nats"], rows,
        "Next-token distributions against the folder in float32.",
    )  # fmt: skip


def checks_table(proofs: Sequence[Proof]) -> Table:
    """What was compared, and the first difference."""
    rows: list[list[Cell]] = [
        [proof.kind, check.name, check.tried,
         check.problems[0] if check.problems else check.note or "equal"]
        for proof in proofs
        for check in proof.checks
    ]  # fmt: skip
    return Table(["type", "compared", "comparisons", "finding"], rows)


def read_lines(path: Path) -> list[str]:
    """Read at most `MOST_LINES` lines of a text file, spread over it.

    Raises:
        LayerswapError: the file is not UTF-8 text, or has no text.
    """
    found = [line for line in lines_of(path) if line.strip()]
    if not found:
        raise MergeError(f"{path}: has no text")
    return found[:: max(1, len(found) // MOST_LINES)][:MOST_LINES]


MOST_LINES = 200
"""Lines of a file that are compared, spread over it."""
