"""Resuming after a crash keeps finished files and gives the same result as one run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from merging import killed, swap_of, weight_bytes

import layerswap as ls
from layerswap.ground.commit import JOURNAL, Journal, read_journal

SHARDS = 5


def plan_of(experts, bottom: int = 1) -> ls.Plan:
    plan = swap_of(experts, bottom=bottom, top=1, max_shard_size="20KB")
    assert len(plan.shards) >= SHARDS
    return plan


def kill_after(plan: ls.Plan, out: Path, files: int, **settings: bool) -> Path:
    """What is left of a merge that is killed once the journal names some files."""
    return killed(plan, out, lambda journal: len(journal.finished) == files, **settings)


def test_a_killed_merge_resumes_without_redoing_files(experts, tmp_path):
    plan, out = plan_of(experts), tmp_path / "out"
    whole = weight_bytes(plan.save(tmp_path / "whole"))
    left = kill_after(plan, out, 3)
    finished = json.loads((left / JOURNAL).read_text())["finished"]
    assert len(finished) == 3
    inodes = {name: (left / name).stat().st_ino for name in finished}
    done: list[int] = []
    plan_of(experts).save(out, resume=True, progress=done.append)
    assert weight_bytes(out) == whole
    assert {name: (out / name).stat().st_ino for name in finished} == inodes
    assert done[0] == sum(finished.values())
    assert sum(done) == plan.nbytes
    assert {f.name for f in out.iterdir()} == {f.name for f in (tmp_path / "whole").iterdir()}
    assert [f.name for f in tmp_path.iterdir() if "partial" in f.name] == []


def test_without_resume_a_merge_starts_anew(experts, tmp_path):
    plan, out = plan_of(experts), tmp_path / "out"
    left = kill_after(plan, out, 3)
    done: list[int] = []
    plan.save(out, progress=done.append)
    assert not left.exists()
    assert sum(done) == plan.nbytes
    assert max(done) < plan.nbytes / 2


def test_another_merge_does_not_take_over_the_files(experts, tmp_path):
    out = tmp_path / "out"
    left = kill_after(plan_of(experts), out, 3)
    other = plan_of(experts, bottom=2)
    other.save(out, resume=True)
    assert weight_bytes(out) == weight_bytes(other.save(tmp_path / "whole"))
    assert not left.exists()


@pytest.mark.parametrize("spoil", ["shorter", "gone", "journal"])
def test_a_finished_file_that_is_not_whole_is_written_again(experts, tmp_path, spoil):
    plan, out = plan_of(experts), tmp_path / "out"
    left = kill_after(plan, out, 2)
    file = left / f"model-00001-of-{len(plan.shards):05d}.safetensors"
    if spoil == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    elif spoil == "gone":
        file.unlink()
    else:
        (left / JOURNAL).write_text("{")
    plan.save(out, resume=True)
    assert weight_bytes(out) == weight_bytes(plan.save(tmp_path / "whole"))


def test_resuming_many_times_ends_well(experts, tmp_path):
    plan, out = plan_of(experts), tmp_path / "out"
    whole = weight_bytes(plan.save(tmp_path / "whole"))
    kill_after(plan, out, 1)
    for files in (2, 3, 4):
        left = kill_after(plan, out, files, resume=True)
        assert len(json.loads((left / JOURNAL).read_text())["finished"]) == files
    plan.save(out, resume=True)
    assert weight_bytes(out) == whole


def test_a_single_file_has_no_journal(experts, tmp_path):
    plan = swap_of(experts)
    seen = []
    plan.save(
        tmp_path / "out",
        progress=lambda count: seen.extend(
            f.name for d in tmp_path.glob("out.partial-*") for f in d.iterdir()
        ),
    )
    assert JOURNAL not in seen
    assert "model.safetensors" in seen


def test_the_journal_of_other_work_is_ignored(tmp_path):
    def break_off():
        with Journal(tmp_path, "mine") as journal:
            (tmp_path / "file").write_text("data")
            journal.enter("file")
            journal._flushes[0].result()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert read_journal(tmp_path, "mine") == {"file": 4}
    assert read_journal(tmp_path, "other") is None
    assert read_journal(tmp_path / "none", "mine") is None
    (tmp_path / "stray").write_text("unfinished")
    assert Journal(tmp_path, "mine").finished == {"file": 4}
    assert not (tmp_path / "stray").exists()
