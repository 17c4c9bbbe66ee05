"""FLORES-200's rules: parallel sentences from their published files, corpus BLEU and chrF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerswap.evaluation.suites.folders import DataFolder, Rows, hub_rows
from layerswap.reading.files import lines_of
from layerswap.reading.letters import is_unspaced

if TYPE_CHECKING:
    from sacrebleu import BLEU

HUB = "facebook/flores"
UNSPACED = {"bod_Tibt", "dzo_Tibt"}
"""Languages with a mark after each syllable, for which BLEU counts characters."""
CHINESE = {"zho_Hans", "zho_Hant", "yue_Hant"}
"""Languages that sacrebleu has a tokenizer for."""

Pair = tuple[str, str]
"""A reference and a translation."""


def results(doc: dict[str, Any], written: list[str]) -> dict[str, Any]:
    """Return the values of one sentence for each metric."""
    from sacrebleu import sentence_chrf

    pair = (doc["target"], written[0].strip())
    return {
        "bleu": pair,
        "bleu_reach": pair,
        "chrf": pair,
        "sentence_chrf": sentence_chrf(pair[1], [pair[0]]).score,
    }


def corpus_bleu(pairs: list[Pair], *, target: str) -> float:
    """Compute sacrebleu's corpus BLEU into a language, 0 to 100.

    It counts characters if the references have no spaces between words.
    """
    references, written = zip(*pairs, strict=True)
    return float(_bleu(references, target).corpus_score(written, [references]).score)


def bleu_reach(pairs: list[Pair], *, target: str) -> float:
    """Compute half the width of BLEU's 95% bootstrap interval over sentences, by sacrebleu."""
    from sacrebleu.significance import PairedTest

    references, written = zip(*pairs, strict=True)
    metrics = {"BLEU": _bleu(references, target)}
    test = PairedTest([("", written)], metrics, [references], "bs", n_samples=1000, n_jobs=1)
    return float(test()[1]["BLEU"][0].ci)  # type: ignore[union-attr, arg-type]


def _bleu(references: Sequence[str], target: str) -> BLEU:
    from sacrebleu import BLEU

    unspaced = not target.endswith("_Latn") and is_unspaced("".join(references))
    by_letter = target in UNSPACED or unspaced
    return BLEU(tokenize="zh" if target in CHINESE else "char" if by_letter else "13a")


def corpus_chrf(pairs: list[Pair]) -> float:
    """Compute sacrebleu's corpus chrF, 0 to 100."""
    import sacrebleu

    references, written = zip(*pairs, strict=True)
    return float(sacrebleu.corpus_chrf(written, [references]).score)


def rows(values: Mapping[str, Any], data: DataFolder) -> dict[str, Rows]:
    """Read the sentences of `source` and `target`: `devtest`, and `dev` for exemplars."""
    splits = ["devtest", "dev"] if values["shots"] else ["devtest"]
    return {split: _parallel(values["source"], values["target"], split, data) for split in splits}


def _parallel(source: str, target: str, split: str, data: DataFolder) -> Rows:
    sides = [_sentences(code, split, data) for code in (source, target)]
    return [{"source": a, "target": b} for a, b in zip(*sides, strict=True)]


def _sentences(code: str, split: str, data: DataFolder) -> list[str]:
    path = data.find(f"{split}/{code}.{split}", f"{code}.{split}")
    if path is not None:
        return [_unquoted(line) for line in lines_of(path)]
    wanted = f"{code}.{split} of FLORES-200 (https://github.com/facebookresearch/flores)"
    published = hub_rows(HUB, code, split, data, wanted=wanted)
    return [str(row["sentence"]).strip() for row in published]


def _unquoted(line: str) -> str:
    """Remove the CSV quotes of some published lines."""
    line = line.strip()
    while len(line) > 3 and line.startswith('"""') and line.endswith('"'):
        line = line[1:-1].replace('""', '"')
    return line
