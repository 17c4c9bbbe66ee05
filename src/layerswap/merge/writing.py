"""Writing a plan: the shards, the documents, and the commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint import atomic_folder
from layerswap.checkpoint.journal import Journal
from layerswap.merge.documents import RECORD, write_documents
from layerswap.merge.engine import Progress, measure_model, write_shard
from layerswap.merge.guard import check_unchanged
from layerswap.merge.outputs import Shard, index_of

if TYPE_CHECKING:
    from layerswap.merge.plan import Plan


def write_plan(
    plan: Plan,
    target: Path,
    *,
    overwrite: bool,
    threads: int,
    progress: Progress,
    allow_non_finite: bool,
    resume: bool,
) -> None:
    """Write the merged checkpoint to `target`; see `Plan.save`."""
    shards = plan.shards()
    # One file is either finished or not: a journal would have nothing to say.
    key = _key(plan, shards, allow_non_finite) if len(shards) > 1 else ""
    with (
        atomic_folder(
            target, marker=RECORD, overwrite=overwrite, resume=key if resume and key else None
        ) as folder,
        Journal(folder, key) as journal,
    ):
        left = [shard for shard in shards if shard.file not in journal.finished]
        if journal.finished:
            progress(sum(shard.nbytes for shard in shards if shard not in left))
        thresholds = measure_model(plan.tensors, threads) if left else {}
        for shard in left:
            write_shard(
                folder / shard.file,
                shard,
                threads=threads,
                progress=progress,
                thresholds=thresholds,
                allow_non_finite=allow_non_finite,
            )
            if key:
                journal.enter(shard.file)
        index = index_of(shards)
        if index:
            (folder / index[0]).write_text(json.dumps(index[1], indent=2) + "\n", "utf-8")
        write_documents(folder, plan)
        check_unchanged(plan.stamps)


def _key(plan: Plan, shards: Sequence[Shard], allow_non_finite: bool) -> str:
    """A hash of all that decides the bytes of the output files."""
    digest = hashlib.sha256(json.dumps([plan.record, allow_non_finite]).encode())
    for shard in shards:
        digest.update(shard.header)
    return digest.hexdigest()
