"""Merging against `cp` and mergekit, side by side in one run: seconds, memory, results.

    python bench/merge.py FOLDER                   # 2 GB checkpoints against cp and mergekit
    python bench/merge.py FOLDER --no-mergekit     # without the other tool
    python bench/merge.py sizes FOLDER --gb 0.5 2  # small and large checkpoints against cp
    python bench/merge.py shared FOLDER            # filesystems that share blocks; needs root
    python bench/merge.py gguf FOLDER --model model-Q4_K_M.gguf
    python bench/merge.py ... --write              # into bench/results

Makes synthetic checkpoints in FOLDER, which is created and removed, and runs every command in turn,
round after round, each as a process of its own. FOLDER needs about six times the size of a
checkpoint, and 2 GB for mergekit, which is installed there if `--mergekit` names no script.

Reads come from the page cache. layerswap always waits until its output is on the disk; `cp -r`
is measured without and with that wait, and mergekit waits only with `--sync`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from checkpoints import LAYER_PARAMETERS, OUTSIDE_PARAMETERS, layers_for, make_checkpoints
from runner import LAYERSWAP, Contestant, machine, report, run_rounds, table, times, version

HERE = Path(__file__).resolve().parent
DENSITY = 0.5
FLAGS = ("--async-write", "--write-threads", "2", "--quiet")
"""Flags of mergekit-yaml: writing overlaps computing."""
BARE, COPY, SYNCED = "python with numpy", "cp -r", "cp -r, synced"
UNBLENDED = "layerswap swap, nothing blended"
PAIRS = {
    UNBLENDED: "mergekit passthrough slices",
    "layerswap soup": "mergekit linear",
    "layerswap ties per tensor": "mergekit ties",
}
"""What must give the same tensors."""
TARGETS = (
    ("layerswap swap", SYNCED, "at most 1.3", 1.3),
    (UNBLENDED, SYNCED, "at most 1.3", 1.3),
    ("mergekit passthrough slices", "layerswap swap", "at least 6", -6),
    ("mergekit linear", "layerswap soup", "at least 3.5", -3.5),
    ("mergekit ties", "layerswap ties per tensor", "at least 15", -15),
)
"""First over second, the target in words, and the limit: negative where more is better."""
SETTING = (
    "Every command ran as a process of its own, all in turn, round after round; the numbers are "
    "medians. layerswap waits until its output is on the disk. Peak memory counts mapped file "
    "pages for a tool that maps its inputs, as mergekit does."
)
PROOF = (
    "Every tensor of layerswap's output against mergekit's, element by element, in steps from one "
    "bfloat16 value to the next; a different rounding is one step. mergekit's slices cannot blend "
    "what lies outside the layers, so that pair takes it from the language expert. TIES ran in "
    f"float32 with density {DENSITY:g} per tensor on both sides. Of equal magnitudes at the "
    "threshold, mergekit keeps as many as fill the count, in no particular order; layerswap keeps "
    "all. Where the kept deltas cancel exactly, mergekit takes the positive one; layerswap stays "
    "at the base."
)
FILESYSTEMS = {
    "XFS": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "XFS without reflinks": ["mkfs.xfs", "-q", "-m", "reflink=0"],
    "ext4": ["mkfs.ext4", "-q", "-m", "0"],
}
STEPPED = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "Q4_K": 16, "Q5_K": 48, "Q6_K": 0}
"""The byte of a block at which its numbers begin, for types whose numbers can be stepped."""


def nbytes_of(gigabytes: float) -> int:
    return 2 * (layers_for(gigabytes) * LAYER_PARAMETERS + OUTSIDE_PARAMETERS)


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def floors(source: Path, rounds: int) -> list[Contestant]:
    """Copying the bytes of an output, with and without waiting for the disk, and importing."""
    return [
        Contestant(COPY, f"cp -r '{source}' '{{out}}'", rounds),
        Contestant(SYNCED, f"cp -r '{source}' '{{out}}' && sync '{{out}}'/*", rounds),
        Contestant(BARE, f"'{sys.executable}' -c 'import numpy'", rounds),
    ]


def layerswap(folder: Path, rounds: int, slow: int) -> list[Contestant]:
    """Merges of layerswap; writes their recipes. TIES takes part in `slow` of the rounds."""
    both = {"experts": {name: str(folder / name) for name in ("task", "language")}}
    recipes: dict[str, dict[str, object]] = {
        "swap": {**both, "swap": {}},
        "swap, nothing blended": {**both, "swap": {"outside": "language"}},
        "soup": {**both, "soup": {"experts": list(both["experts"])}},
    }
    for scope in ("tensor", "model") if slow else ():
        method = {"method": "ties", "experts": [*both["experts"]], "density": DENSITY}
        merge = {"base": str(folder / "base"), "merge": {**method, "scope": scope}}
        recipes[f"ties per {scope}"] = {**both, **merge}
    contestants = []
    for name, recipe in recipes.items():
        path = folder / f"layerswap-{slug(name)}.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        command = f"'{LAYERSWAP}' merge '{path}' --out '{{out}}'"
        runs = slow if name.startswith("ties") else rounds
        contestants.append(Contestant(f"layerswap {name}", command, runs))
    return contestants


def mergekit(folder: Path, script: Path, options: argparse.Namespace, *, sync: bool) -> list:
    """The same merges by mergekit; writes their configurations."""
    task, language, base = (str(folder / name) for name in ("task", "language", "base"))
    layers = layers_for(options.gb[0])
    # The paper's 5 and 2 of 32 layers, scaled as layerswap scales them.
    low, high = (max(1, int(count * layers / 32 + 0.5)) for count in (5, 2))
    slices = [(language, 0, low), (task, low, layers - high), (language, layers - high, layers)]
    spans = [{"sources": [{"model": m, "layer_range": [*span]}]} for m, *span in slices]
    half = {"weight": 0.5, "density": DENSITY}
    dense = [{"model": model, "parameters": half} for model in (task, language)]
    linear = [{"model": model, "parameters": {"weight": 0.5}} for model in (task, language)]
    configs: dict[str, dict[str, object]] = {
        "passthrough slices": {"merge_method": "passthrough", "slices": spans, "dtype": "bfloat16"},
        "linear": {"merge_method": "linear", "models": linear, "dtype": "bfloat16"},
        "ties": {"merge_method": "ties", "base_model": base, "models": dense,
                 "dtype": "float32", "out_dtype": "bfloat16"},
    }  # fmt: skip
    contestants = []
    for name, config in configs.items():
        path = folder / f"mergekit-{slug(name)}.yaml"
        path.write_text(json.dumps(config))
        command = f"'{script}' '{path}' '{{out}}' {' '.join(FLAGS)}"
        command += " && sync '{out}'/*" if sync else ""
        runs = options.ties_rounds if name == "ties" else options.rounds
        contestants.append(Contestant(f"mergekit {name}", command, runs))
    return contestants


def install_mergekit(folder: Path, constraints: Path | None) -> Path:
    """A virtual environment with the latest mergekit, and layerswap's torch if it takes it."""
    home = folder / "mergekit-venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
    limits = ["-c", str(constraints)] if constraints else []
    torch = version("torch").split("+")[0]
    subprocess.run([*pip, *limits, f"torch=={torch}"], check=False)
    subprocess.run([*pip, *limits, "mergekit"], check=True)
    return home / "bin" / "mergekit-yaml"


class Proof:
    """Keeps the first outputs of each pair until both are there, and compares them."""

    def __init__(self, folder: Path, sources: Path) -> None:
        self._folder, self._sources = folder, sources
        self._wanted = {name: ours for ours, theirs in PAIRS.items() for name in (ours, theirs)}
        self.counts: dict[str, dict[str, int]] = {}

    def __call__(self, name: str, out: Path) -> None:
        ours = self._wanted.get(name)
        if ours is None:
            return
        kept = self._folder / f"kept-{slug(ours)}"
        if not kept.is_dir():
            out.rename(kept)
            return
        first, second = (out, kept) if name == ours else (kept, out)
        command = [sys.executable, str(HERE / "compare_weights.py"), str(first), str(second)]
        if "ties" in name:
            command += ["--ties", str(self._sources), str(DENSITY)]
        self.counts[ours] = json.loads(subprocess.check_output(command))
        shutil.rmtree(kept)

    def table(self) -> str:
        keys = ("tensors", "elements", "equal", "one step", "further")
        extra = ("at a threshold", "cancel exactly")
        rows = []
        for ours, counts in self.counts.items():
            why = ", ".join(f"{counts[key]:,} {key}" for key in extra if counts.get(key))
            left = counts.get("further", 0) - sum(counts.get(key, 0) for key in extra)
            why += f"; {left:,} unexplained" if counts.get("further") else ""
            rows.append((ours, *(f"{counts.get(key, 0):,}" for key in keys), why))
        return table(("", "tensors", "elements", "equal bits", "one step", "further", "why"), rows)


def against_mergekit(options: argparse.Namespace) -> None:
    """Every tool on checkpoints of one size, and the equality of their results."""
    (size,) = options.gb
    sources = make_checkpoints(options.folder / "sources", size)
    ours = layerswap(sources, options.rounds, options.ties_rounds)
    ordered = floors(sources / "task", options.rounds) + ours
    about = machine(options.folder)
    if options.peer:
        script = options.mergekit or install_mergekit(options.folder, options.constraints)
        python = str(script.with_name("python"))
        names = ("mergekit", "torch", "transformers", "safetensors", "numpy")
        versions = ", ".join(f"{name} {version(name, python)}" for name in names)
        about += f"\n- mergekit's environment: {versions}; flags `{' '.join(FLAGS)}`"
        partners = {theirs: ours for ours, theirs in PAIRS.items()}
        for contestant in mergekit(sources, script, options, sync=options.sync):
            names = [ours.name for ours in ordered]
            if partners[contestant.name] in names:  # TIES may be left out
                ordered.insert(names.index(partners[contestant.name]) + 1, contestant)
    proof = Proof(options.folder, sources)
    run_rounds(ordered, options.folder, proof)
    by_name = {contestant.name: contestant for contestant in ordered}
    rows = []
    for first, second, words, limit in TARGETS:
        if by_name.keys() >= {first, second} and by_name[first].seconds and by_name[second].seconds:
            ratio = by_name[first].median / by_name[second].median
            met = ratio <= limit if limit > 0 else ratio >= -limit
            rows.append((f"{first} / {second}", f"{ratio:.2f}", words, "yes" if met else "**no**"))
    ran = [contestant for contestant in ordered if contestant.seconds]
    parts = [
        "# Merging, measured", made(options), about,
        f"Synthetic Llama-shaped experts of {nbytes_of(size) / 1e9:.2f} GB in bfloat16, "
        f"{layers_for(size)} layers, in files of 1 GB. {SETTING}",
        times(ran, by_name[SYNCED]), "## Against the targets",
        table(("", "measured", "target", "met"), rows),
        *(["## The same tensors?", PROOF, proof.table()] if proof.counts else []),
    ]  # fmt: skip
    report("merge", parts, options)


def small_and_large(options: argparse.Namespace) -> None:
    """Swaps and soups of checkpoints of several sizes against copying with the wait."""
    tables = []
    for size in options.gb:
        sources = make_checkpoints(options.folder / f"{size:g}GB", size, "--experts-alone")
        copying = floors(sources / "task", options.rounds)[1]
        contestants = [copying, *layerswap(sources, options.rounds, 0)]
        run_rounds(contestants, options.folder)
        shutil.rmtree(sources)
        tables.append(times(contestants, copying, title=f"{nbytes_of(size) / 1e9:.2f} GB"))
    about = ["# Merging small and large checkpoints", made(options), machine(options.folder)]
    report("merge-sizes", [*about, SETTING, *tables], options)


@contextmanager
def filesystem(kind: str, folder: Path, nbytes: float) -> Iterator[Path]:
    """A mounted filesystem in a loop file."""
    image, where = folder / "image", folder / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(int(nbytes))
    subprocess.run([*FILESYSTEMS[kind], str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)
        image.unlink()
        where.rmdir()


def used(folder: Path) -> int:
    """Bytes in use, with all of them on the disk."""
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return shutil.disk_usage(folder).used


def shared_blocks(options: argparse.Namespace) -> None:
    """Swaps that share blocks with their experts, on filesystems in a file."""
    (size,) = options.gb
    experts = make_checkpoints(options.folder / "experts", size, "--experts-alone")
    parts = [made(options), machine(options.folder), SETTING]
    for kind in FILESYSTEMS:
        with filesystem(kind, options.folder, (5.5 * size + 0.5) * 1e9) as disk:
            for name in ("task", "language"):
                shutil.copytree(experts / name, disk / name)
            before, new = used(disk), dict[str, int]()
            contestants = on_filesystem(disk, kind, options)

            def look(name: str, out: Path, disk=disk, before=before, new=new) -> None:
                new[name] = used(disk) - before

            run_rounds(contestants, disk, look)
            newly = {"MB newly used": lambda c, new=new: f"{new[c.name] / 1e6:,.2f}"}
            parts.append(times(contestants, contestants[0], newly, title=kind))
            if kind == "XFS" and options.many:
                parts.append(keep_many(disk, options.many, before))
    parts.append("Targets with nothing blended: at most 0.8 s, at most 0.15 of cp "
                 "--reflink=never, a thirtieth of mergekit, at most 8 MB newly used.")  # fmt: skip
    report("merge-shared", ["# Merging on filesystems that share blocks", *parts], options)


def on_filesystem(disk: Path, kind: str, options: argparse.Namespace) -> list[Contestant]:
    """Everything that runs on one filesystem; copying first."""
    swap = f"'{LAYERSWAP}' merge --task '{disk}/task' --language '{disk}/language' --out '{{out}}'"
    copy = f"cp -r --reflink=%s '{disk}/task' '{{out}}' && sync '{{out}}'/*"
    commands = {
        "cp --reflink=never": copy % "never",
        UNBLENDED: f"{swap} --outside task",
        "layerswap swap, embeddings blended": swap,
    }
    if kind == "XFS":
        commands |= {
            "cp --reflink=always": copy % "always",
            f"{UNBLENDED}, --layout plain": f"{swap} --outside task --layout plain",
            "python that imports pydantic, typer and yaml":
                f"'{sys.executable}' -c 'import pydantic.main, typer.main, yaml'",
        }  # fmt: skip
    contestants = [Contestant(name, command, options.rounds) for name, command in commands.items()]
    if options.mergekit and kind == "XFS":
        contestants += mergekit(disk, options.mergekit, options, sync=True)[:1]
    return contestants


def keep_many(disk: Path, count: int, before: int) -> str:
    """Write compositions of the pair side by side; what they take beyond `before` bytes."""
    import layerswap as ls

    started = time.perf_counter()
    plan = ls.swap(task=disk / "task", language=disk / "language", outside="task")
    plans = plan.grid(bottom=range(plan.composition.layers), top=range(10))[:count]
    for number, each in enumerate(plans):
        each.save(disk / f"kept-{number}")
    seconds, new = time.perf_counter() - started, used(disk) - before
    return (
        f"{len(plans)} compositions of the pair, {len(plans) * plan.nbytes / 1e9:.0f} GB of "
        f"weights, were written in {seconds:.1f} s by one process, each flushed to the disk, and "
        f"take {new / 1e6:,.1f} MB."
    )


def gguf_files(options: argparse.Namespace) -> None:
    """Swapping two quantised GGUF files against `cp`."""
    task, language = options.model.resolve(), options.folder / "language.gguf"
    # In a process of its own: what it maps would count as memory of every later child.
    maker = get_context("spawn").Process(target=second_gguf, args=(task, language))
    maker.start()
    maker.join()
    merge = f"'{LAYERSWAP}' merge -q --task '{task}' --language '{language}' --out '{{out}}'"
    contestants = [
        Contestant("cp, sync", f"cp '{task}' '{{out}}' && sync '{{out}}'", options.rounds),
        Contestant(f"{UNBLENDED}", f"{merge} --outside language", options.rounds),
        Contestant("layerswap swap, outside blended", merge, min(options.rounds, 3)),
    ]
    verify = f"{merge} --outside language && '{LAYERSWAP}' verify '{{out}}'"
    contestants.append(Contestant("the swap with nothing blended, and verify", verify, 1))
    run_rounds(contestants, options.folder, out="out.gguf")
    size = f"{task.stat().st_size / 1e9:.2f} GB"
    parts = [machine(options.folder), times(contestants, contestants[0], title=size)]
    report("merge-gguf", ["# Merging GGUF files", made(options), *parts], options)


def second_gguf(source: Path, target: Path) -> None:
    """The file with the lowest bit of a quarter of its numbers flipped, tensor by tensor."""
    import numpy as np

    from layerswap.checkpoint.gguf import read_gguf
    from layerswap.checkpoint.header import block_of

    target.write_bytes(source.read_bytes())
    data = np.memmap(target, np.uint8, "r+")
    draws = np.random.default_rng(0)
    for tensor in read_gguf(target).tensors.values():
        if tensor.dtype in STEPPED:
            size, first = block_of(tensor.dtype)[1], STEPPED[tensor.dtype]
            blocks = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, size)
            last = min(size, first + 16)
            flips = draws.integers(0, 4, (len(blocks), last - first), np.uint8) == 0
            blocks[:, first:last] ^= flips.astype(np.uint8)
    data.flush()


CASES = {
    "mergekit": against_mergekit,
    "sizes": small_and_large,
    "shared": shared_blocks,
    "gguf": gguf_files,
}


def made(options: argparse.Namespace) -> str:
    return f"Made by `python bench/merge.py {options.given}`, in one run."


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES, help="what to measure (mergekit)")
    parser.add_argument("folder", type=Path, help="a folder to create, and to remove at the end")
    parser.add_argument("--gb", type=float, nargs="+", default=[2.0], help="sizes (2)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every command (5)")
    parser.add_argument("--ties-rounds", type=int, default=3, help="runs of TIES (3)")
    parser.add_argument("--sync", action="store_true", help="mergekit waits for the disk too")
    parser.add_argument("--no-mergekit", dest="peer", action="store_false")
    parser.add_argument("--mergekit", type=Path, help="its mergekit-yaml, in its environment")
    parser.add_argument("--constraints", type=Path, help="constraints for pip")
    parser.add_argument("--many", type=int, default=100, help="shared: compositions kept (100)")
    parser.add_argument("--model", type=Path, help="gguf: a quantised model")
    parser.add_argument("--write", action="store_true", help="write into bench/results")
    if not set(arguments) & {*CASES, "-h", "--help"}:
        arguments = ["mergekit", *arguments]
    options = parser.parse_args(arguments)
    given = ["FOLDER" if word == str(options.folder) else word for word in arguments]
    options.given = " ".join(given)
    return options


def main() -> None:
    options = read_options(sys.argv[1:])
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True)
    try:
        CASES[options.case](options)
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
