"""Memory of a training as `layerswap new` measures it, against the peak of `layerswap train`.

    python bench/memory.py ./gemma-3-270m ./smollm2-135m --text sw.txt --steps 6

Each base is trained in full and by LoRA on the CPU, on rows of 60 to 75 words of a text. Estimate
and training are processes of their own. Needs Linux or macOS.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

ROWS = 200
LABELS = ("sports", "science", "politics")


def write_task(text: Path, path: Path) -> None:
    """Write a table of texts and labels."""
    words, draw = text.read_text("utf-8").split(), random.Random(1)
    lines = ["text\tlabel"]
    for i in range(ROWS):
        start, count = draw.randrange(len(words) - 100), draw.randrange(60, 76)
        lines.append(f"{' '.join(words[start : start + count])}\t{LABELS[i % 3]}")
    path.write_text("\n".join(lines) + "\n", "utf-8")


def estimate(base: str, lora: bool, folder: Path, text: Path, steps: int) -> None:
    """Measure as `layerswap new`, and write the expert that it would train."""
    from layerswap.new.inputs import Request, check_request
    from layerswap.new.machine import measure
    from layerswap.new.study import Settings, expert

    inputs = check_request(Request(
        folder=folder / "study", base=base, languages=["sw"], task=str(folder / "task.tsv"),
        texts={"sw": str(text)}, parallel={}, tests={}, developments={}, device="cpu",
    ))  # fmt: skip
    settings = Settings(1, lora)
    tried = expert(inputs, settings)
    row = inputs.longest_row(tried["hyperparameters"]["max_length"])
    measured = measure(tried, row, "cpu")
    written = expert(inputs, settings._replace(rows=measured.rows))
    rows = [dict(zip(("prompt", "completion"), row, strict=True)) for row in inputs.task.rows(ROWS)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    written |= {"data": {"train": "rows.jsonl"}, "save_every": 10**6}
    written["hyperparameters"] |= {"max_steps": steps}
    (folder / "expert.yaml").write_text(yaml.safe_dump(written), "utf-8")
    print(json.dumps({**asdict(measured), "tokens": inputs.tokens("".join(row))}))


def peak_gb(command: list[str]) -> float:
    """Run a command; returns the peak of its memory."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bases", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", default="full,lora")
    parser.add_argument("--estimate", type=Path)
    given = parser.parse_args()
    if given.estimate:
        lora = given.ways == "lora"
        estimate(given.bases[0], lora, given.estimate, given.text, given.steps)
        return
    print("| base | way | rows x tokens at a time | estimate, GB | peak, GB | estimate / peak |")
    print("|---|---|---|---|---|---|")
    for base in given.bases:
        for way in given.ways.split(","):
            with TemporaryDirectory() as scratch:
                folder = Path(scratch)
                write_task(given.text, folder / "task.tsv")
                asked = [sys.executable, __file__, base, "--text", str(given.text), "--ways", way,
                         "--steps", str(given.steps), "--estimate", scratch]  # fmt: skip
                output = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout
                found = json.loads(output.splitlines()[-1])
                trained = ["train", str(folder / "expert.yaml"), "--out", str(folder / "out")]
                peak = peak_gb([sys.executable, "-m", "layerswap", *trained])
                rows, estimated = f"{found['rows']} x {found['tokens']}", found["memory_gb"]
                cells = [base, way, rows, f"{estimated:.2f}", f"{peak:.2f}"]
                print(f"| {' | '.join(cells)} | {estimated / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
