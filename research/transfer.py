"""The tables of docs/real.md, from the recorded scores of `topic-transfer` and `headline-transfer`.

    python -m research.topic                  # prints Markdown; nothing is trained or evaluated
    python -m research.topic --study FOLDER   # first records a finished study, by its name

Recorded are one score per document and condition, and the seconds and versions of every step.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from layerswap.study.journal import read_journal
from layerswap.study.results import RESULTS, study_results

HERE = Path(__file__).parent
HEADINGS = {
    "topic-transfer": "Topics of sentences: the finished task expert",
    "topic-transfer/earlier": "Topics of sentences: the task expert of the lowest validation loss",
    "headline-transfer": "Topics of headlines",
}
"""By the folder that holds the scores of a study."""
SCORES = "scores.parquet"


def record(study: Path) -> None:
    """Copy the scores of a finished study, and what its steps took."""
    journal = read_journal(study)
    folder = HERE / journal.graph["tables"].settings["name"]
    facts = {}
    for step in journal.graph:
        found = journal.record(step.name)
        if found is None:
            continue
        facts[step.name] = {"seconds": found.seconds, "versions": found.versions}
        if step.kind == "evaluate":
            kept = folder / step.name.partition("/")[2] / RESULTS
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(journal.folder(step.name) / RESULTS / SCORES, kept / SCORES)
    (folder / "steps.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, help="folder of a finished study to record")
    given = parser.parse_args()
    if given.study is not None:
        record(given.study)
    for name, heading in HEADINGS.items():
        found = sorted((HERE / name).glob(f"*/{RESULTS}/{SCORES}"))
        folders = [path.parents[1] for path in found]
        results = study_results({folder.name: folder for folder in folders}, 0.5)
        print(f"# {heading}\n\n{results.summary.markdown()}")
        for title, table in results.tables.items():
            print(f"\n## {title}\n\n{table.markdown()}\n")


if __name__ == "__main__":
    main()
