"""Deploying a folder of 2 GB as GGUF against `cp`: seconds and peak memory.

    python bench/deploy.py FOLDER [--gb 2] [--rounds 3] [--write]

Makes a synthetic Llama in bfloat16 and a GGUF file of its form in FOLDER, which is created and
removed, and runs every command in turn, round after round. Nothing is proved (no `--text`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

from runner import LAYERSWAP, Contestant, machine, report, run_rounds, times

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
HIDDEN, INNER = 2048, 5632
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 512 + 3 * HIDDEN * INNER
"""Parameters of a layer without its norms."""
TYPES = ("Q8_0", "BF16", "Q4_0")
GUARD = 4.0
"""Bound of Q8_0 over `cp -r`, synced; and 0.5 GB of memory."""


def make(folder: Path, gb: float) -> None:
    """A Llama with random weights, and a GGUF file of its form in float16."""
    import torch
    import transformers
    from deployed import save_tokenizer, write_like

    model = folder / "model"
    model.mkdir(parents=True)
    tokenizer = save_tokenizer(model)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=max(1, round(gb * 1e9 / 2 / LAYER)), num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(config)
    made = whole.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    made.save_pretrained(model, max_shard_size="100GB")
    write_like(model, folder / "like.gguf", kind="F16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    # In a process of its own: a child's peak begins at the memory of its parent.
    maker = get_context("spawn").Process(target=make, args=(folder, given.gb))
    maker.start()
    maker.join()
    try:
        model, like = folder / "model", folder / "like.gguf"
        contestants = [Contestant("cp -r, synced", f"cp -r {model} {{out}} && sync -f {{out}}/*",
                                  given.rounds)]  # fmt: skip
        contestants += [
            Contestant(f"layerswap deploy --type {kind}",
                       f"{LAYERSWAP} deploy {model} --like {like} --type {kind} --out {{out}}",
                       given.rounds)
            for kind in TYPES
        ]  # fmt: skip
        run_rounds(contestants, folder)
        copy, first = contestants[:2]
        bound = (
            f"{first.name}: {first.median / copy.median:.1f} times `cp` (bound {GUARD:g}), "
            f"{max(first.peaks) / 1e6:.0f} MB of memory (bound 500)"
        )
        report("deploy", [machine(folder), times(contestants, copy, title="what"), bound], given)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
