"""FLORES-200 (NLLB Team et al., 2022): translation both ways, 1,012 sentences, BLEU and chrF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import language_name
from layerswap.evaluation.suites.folders import DataFolder, Function, TaskFolder, hub_rows

ENGLISH = "eng_Latn"
FLORES_HUB = "facebook/flores"
UNSPACED = {"jpn_Jpan", "tha_Thai", "lao_Laoo", "khm_Khmr", "mya_Mymr", "bod_Tibt", "dzo_Tibt"}
"""Written without spaces between words: BLEU counts characters there, and words elsewhere."""
CHINESE = {"zho_Hans", "zho_Hant", "yue_Hant"}
PROMPT = "Translate this sentence from {source} to {target}.\n{source}: {{{{source}}}}\n{target}:"

Pair = tuple[str, str]
"""A reference and what was written."""


def write_flores(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> list[str]:
    """Write translation from English and into English.

    The papers do not give their prompt; this one names both languages in English. BLEU is
    sacrebleu's over the whole corpus, with its tokenizer for Chinese, over characters where a
    language has no spaces, and with 13a otherwise. chrF is given for corpus and sentence; the
    latter is what two models are compared by.

    Args:
        code: of FLORES-200, such as `swh_Latn`.
        shots: exemplars in the prompt, from the development sentences.
        data: where published files may be: `{code}.devtest`, and `{code}.dev` for exemplars.
        tasks: where the tasks go.

    Returns:
        Names of the two tasks.

    Raises:
        EvaluationError: the data cannot be had, or the files are not parallel.
    """
    names = []
    for source, target in ((ENGLISH, code), (code, ENGLISH)):
        name = f"flores_{source}-{target}_{shots}shot"
        splits = {"devtest": _parallel(source, target, "devtest", data)}
        if shots:
            splits["dev"] = _parallel(source, target, "dev", data)
        tasks.module(
            f"flores_{target}",
            "from functools import partial\n\n"
            "from layerswap.evaluation.suites import flores\n\n"
            "results = flores.results\ncorpus_chrf = flores.corpus_chrf\n"
            f"corpus_bleu = partial(flores.corpus_bleu, target={target!r})\n",
        )
        prompt = PROMPT.format(source=language_name(source), target=language_name(target))
        bleu = {"metric": "bleu", "aggregation": Function(f"flores_{target}.corpus_bleu")}
        chrf = {"metric": "chrf", "aggregation": Function(f"flores_{target}.corpus_chrf")}
        sentence = {"metric": "sentence_chrf", "aggregation": "mean"}
        names.append(tasks.task(name, {
            **tasks.rows(name, splits),
            "output_type": "generate_until",
            "test_split": "devtest",
            **({"fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}} if shots else {}),
            "num_fewshot": shots,
            "doc_to_text": prompt,
            "doc_to_target": "{{target}}",
            "process_results": Function(f"flores_{target}.results"),
            "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 256},
            "metric_list": [
                {**metric, "higher_is_better": True} for metric in (bleu, chrf, sentence)
            ],
            "metadata": {"version": 1},
        }))  # fmt: skip
    return names


def results(doc: dict[str, Any], written: list[str]) -> dict[str, Any]:
    """What one sentence gives to the metrics."""
    from sacrebleu import sentence_chrf

    pair = (doc["target"], written[0].strip())
    return {"bleu": pair, "chrf": pair, "sentence_chrf": sentence_chrf(pair[1], [pair[0]]).score}


def corpus_bleu(pairs: list[Pair], *, target: str) -> float:
    """Sacrebleu's corpus BLEU into a language, 0 to 100."""
    import sacrebleu

    tokenizer = "char" if target in UNSPACED else "zh" if target in CHINESE else "13a"
    references, written = zip(*pairs, strict=True)
    return float(sacrebleu.corpus_bleu(written, [references], tokenize=tokenizer).score)


def corpus_chrf(pairs: list[Pair]) -> float:
    """Sacrebleu's corpus chrF, 0 to 100."""
    import sacrebleu

    references, written = zip(*pairs, strict=True)
    return float(sacrebleu.corpus_chrf(written, [references]).score)


def _parallel(source: str, target: str, split: str, data: DataFolder) -> list[dict[str, str]]:
    sides = [_sentences(code, split, data) for code in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise EvaluationError(
            f"FLORES {split}: {source} has {len(sides[0])} sentences and {target} {len(sides[1])}; "
            "they must be parallel"
        )
    return [{"source": a, "target": b} for a, b in zip(*sides, strict=True)]


def _sentences(code: str, split: str, data: DataFolder) -> list[str]:
    path: Path | None = data.find(f"{split}/{code}.{split}", f"{code}.{split}")
    if path is not None:
        return [_unquoted(line) for line in path.read_text("utf-8").splitlines()]
    wanted = f"{code}.{split} of FLORES-200 (https://github.com/facebookresearch/flores)"
    rows = hub_rows(FLORES_HUB, code, split, data, wanted=wanted)
    return [str(row["sentence"]).strip() for row in rows]


def _unquoted(line: str) -> str:
    """A sentence without the CSV quotes that some published lines carry."""
    line = line.strip()
    while len(line) > 3 and line.startswith('"""') and line.endswith('"'):
        line = line[1:-1].replace('""', '"')
    return line
