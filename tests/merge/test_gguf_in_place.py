"""GGUF files in place, from a local Hub."""

import pytest
from gguf_conversion import convert, save_model
from gguf_files import all_of, k_mix, split, tensors_of, write_gguf
from merging import recipe_plan, refusal, weight_bytes

import layerswap as ls
from layerswap.checkpoint import open_checkpoint

TASK, LANGUAGE = "org/quantised/task.gguf", "org/quantised/language.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two experts of one repository."""
    folder = tmp_path_factory.mktemp("quantised")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return {
        "task": write_gguf(folder / "task.gguf", 1, k_mix, base=0),
        "language": write_gguf(folder / "language.gguf", 2, all_of("Q5_0"), base=0),
    }


@pytest.fixture
def quantised(hub, files):
    hub.repositories["org/quantised"] = files["task"].parent
    return hub


def swap(task, language, **settings):
    return ls.swap(task=task, language=language, bottom=1, top=1, **settings)


def test_a_swap_of_gguf_files_on_the_hub_fetches_only_its_spans(quantised, files, tmp_path):
    plan = swap(TASK, LANGUAGE)
    assert [note.split(" of ")[-1] for note in plan.notes[-2:]] == ["task", "language"]
    opened = quantised.sent["org/quantised"]
    assert opened < 0.2 * sum(path.stat().st_size for path in files.values())
    out = plan.save(tmp_path / "out.gguf")
    local = swap(files["task"], files["language"]).save(tmp_path / "local.gguf")
    assert tensors_of(out) == tensors_of(local)
    # The inputs of blends, and each verbatim tensor once.
    assert quantised.sent["org/quantised"] - opened == sum(plan.fetched_bytes.values())
    whole = sum(path.stat().st_size for path in files.values())
    assert sum(plan.fetched_bytes.values()) < 0.8 * whole
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    commit = quantised.commit("org/quantised")
    assert plan.to_dict()["experts"]["task"] == f"{TASK}@{commit}"
    assert ls.verify(out, full=True).passed
    pinned = open_checkpoint(f"org/quantised@{commit}/task.gguf", in_place=True)
    assert (pinned.source, pinned.revision) == (TASK, commit)


def test_commands_that_read_whole_files_download_them(quantised, files, tmp_path):
    opened = open_checkpoint(TASK)
    assert opened.form == "gguf"
    (file,) = opened.files
    assert file.read_bytes() == files["task"].read_bytes()
    in_cache = open_checkpoint(TASK, in_place=True)
    assert not in_cache.in_place
    assert not list((tmp_path / "cache").rglob("language.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_gguf_file_on_the_hub_beside_safetensors(hub, tmp_path, whole):
    """Its rows are in another order; a method over whole models downloads it."""
    pair = [save_model(tmp_path / n, "llama", seed) for seed, n in enumerate(("task", "language"))]
    (tmp_path / "repository").mkdir()
    path = convert(pair[1], tmp_path / "repository" / "language.gguf", "llama", "Q8_0")
    hub.repositories["org/language"] = path.parent

    def plan(language):
        if whole:
            experts = {"task": str(pair[0]), "language": str(language)}
            method = {"method": "ties", "experts": list(experts)}
            return recipe_plan({"experts": experts, "base": str(pair[0]), "merge": method})
        return swap(pair[0], language)

    remote = plan("org/language/language.gguf")
    opened = hub.sent["org/language"]
    out = remote.save(tmp_path / "out")
    assert weight_bytes(out) == weight_bytes(plan(path).save(tmp_path / "local"))
    if not whole:
        assert hub.sent["org/language"] - opened == remote.fetched_bytes["language"]
    assert ls.verify(out, full=True).passed


def test_the_parts_of_a_split_file(quantised, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    split(folder)
    expected = open_checkpoint((folder / "whole.gguf").rename(tmp_path / "whole.gguf"))
    quantised.repositories["org/parts"] = folder
    source = "org/parts/part-00001-of-00003.gguf"
    for opened in (open_checkpoint(source, in_place=True), open_checkpoint(source)):
        assert list(opened.tensors) == list(expected.tensors)
        name = "blk.2.ffn_down.weight"
        assert (opened.elements(name, 0, 500) == expected.elements(name, 0, 500)).all()
    (folder / "part-00002-of-00003.gguf").unlink()
    message = refusal(open_checkpoint, source, in_place=True)
    assert "part-00002-of-00003.gguf: missing; the model is in 3 parts" in message


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("org/quantised/other.gguf", "org/quantised/other.gguf: there is no such file"),
        ("org/nothing/task.gguf", "org/nothing: no such local folder, and no such repos"),
        ("https://huggingface.co/a/b/resolve/main/c.gguf", "a URL; give the Hub id: a/b"),
        ("s3://bucket/c.gguf", "a URL; give a Hub id, or download it and give its path"),
        ("./nothing.gguf", "nothing.gguf: cannot be read (No such file or directory)"),
    ],
)
def test_gguf_files_that_are_not_there(quantised, source, why):
    assert why in refusal(open_checkpoint, source, in_place=True)
