"""The papers' benchmarks from their published files: prompts, answers, and missing data."""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu
from refusals import one_line

from layerswap.evaluation.harness import load_tasks
from layerswap.evaluation.sandbox import programs_allowed
from layerswap.evaluation.settings import Asked
from layerswap.evaluation.statistics import Interval
from layerswap.evaluation.suites import flores, mbpp, mgsm, suite_names, suites
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.mgsm import last_number, number_filter
from layerswap.evaluation.suites.suites import WrittenTask, parts_of, write_suite
from layerswap.experiment.answers import whole_score
from layerswap.ground.errors import EvaluationError, LayerswapError, RecipeError

DATA = Path(__file__).parents[1] / "data"
EXEMPLARS = json.loads((DATA / "mgsm" / "exemplars.json").read_text())
PROGRAMS = [json.loads(row) for row in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
ANSWERS = ["11", "29", "39", "9", "33", "8", "8", "5"]

TOPICS = "index_id\tcategory\ttext\n1\ttravel\tSafari njema.\n2\thealth\t Daktari \n"
ARTICLES = (
    "category\theadline\ttext\turl\n"
    "sports\tSimba yashinda \tIlishinda jana.\tx\nreligion\tA\tB\tx\n"
)
TWEETS = 'tweet\tlabel\n"Asema ""sawa"""\tpositive\nSipendi\tnegative\nNani?\tmixed\n'
ENGLISH_TWEETS = "text\tlabel\nGreat!\tpositive\nBad.\tnegative\nIt rains\tneutral\n"


@pytest.fixture
def allowed():
    with programs_allowed():
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Every benchmark in Swahili: excerpts of the published files, or rows in their form."""
    root = tmp_path_factory.mktemp("published")
    for name in ("mgsm", "mbpp", "flores"):
        shutil.copytree(DATA / name, root / name)
    for name, codes, text in (
        ("sib200", ("swh_Latn", "eng_Latn"), TOPICS),
        ("masakhanews", ("swa", "eng"), ARTICLES),
        ("afrisenti", ("swa",), TWEETS),
        ("tweeteval", ("sentiment",), ENGLISH_TWEETS),
    ):
        (root / name).mkdir()
        for code in codes:
            for split in ("train", "dev", "test"):
                (root / name / f"{code}.{split}.tsv").write_text(text)
    write_belebele(root / "belebele")
    write_mmlu(root / "CohereLabs" / "Global-MMLU" / "sw")
    return DataFolder(root)


def write_belebele(folder):
    rows = [
        {"link": "l", "question_number": i, "flores_passage": f"Kifungu {i}", "question": f"Q{i}?",
         "mc_answer1": "a", "mc_answer2": "b", "mc_answer3": "c", "mc_answer4": "d",
         "correct_answer_num": str(1 + i % 4), "dialect": "swh_Latn", "ds": "2023"}
        for i in range(8)
    ]  # fmt: skip
    folder.mkdir()
    (folder / "swh_Latn.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_mmlu(folder):
    folder.mkdir(parents=True)
    for split, count in (("dev", 5), ("test", 4)):
        rows = [
            {"sample_id": f"{subject}/{i}", "subject": subject, "subject_category": "STEM",
             "question": f"{split} {subject} {i}", "option_a": "1", "option_b": "2",
             "option_c": "3", "option_d": "4", "answer": "ABCD"[i % 4]}
            for subject in ("anatomy", "virology") for i in range(count)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def tasks(tmp_path):
    return TaskFolder(tmp_path / "tasks [1]")  # no pattern


def loaded(asked, tasks):
    """The lm-eval task of each written task, with its requests built."""
    found = load_tasks([one.name for one in asked], include=[tasks.root])["tasks"]
    for task in found.values():
        task.build_all_requests(rank=0, world_size=1)
    return found


def prompt_of(task, document=0):
    (first,) = {one.args[0] for one in task.instances if one.doc_id == document}
    return first


# --- prompts -----------------------------------------------------------------------------------

PUBLISHED_PROMPTS = {
    "afrisenti_swa_0shot": "fccaa27a267e8e9a",
    "afrisenti_swa_0shot_dev": "fccaa27a267e8e9a",
    "belebele_swh_Latn_0shot": "6e0d917719f43aea",
    "belebele_swh_Latn_5shot": "c91c0c4b1a1641ce",
    "flores_eng_Latn-swh_Latn_0shot": "ee1d7761feac618c",
    "flores_swh_Latn-eng_Latn_0shot": "9a3dda8323546c7a",
    "masakhanews_swa_0shot": "5c5253afa5765b79",
    "masakhanews_swa_0shot_dev": "5c5253afa5765b79",
    "mbpp_en_0shot": "1bf0eef669345026",
    "mgsm_sw_2shot": "24860348b6fd6069",
    "mgsm_sw_8shot": "1d71c16d96d2d855",
    "mmlu_sw_0shot_anatomy": "a6e4697dc6f8b1cd",
    "mmlu_sw_0shot_virology": "412f77ee9acaa064",
    "mmlu_sw_5shot_anatomy": "4f723af73aff9de3",
    "mmlu_sw_5shot_virology": "502da863286a61d1",
    "sib200_swh_Latn_0shot": "f096d3a089b5e9b1",
    "sib200_swh_Latn_0shot_dev": "f096d3a089b5e9b1",
}
"""First 16 digits of the SHA-256 of the first document's prompt, as behind published numbers."""


@pytest.mark.parametrize("suite", ["layer-swapping", "unreasonable", "sib200", "masakhanews",
                                   "afrisenti"])  # fmt: skip
def test_prompts_are_those_of_the_published_numbers(suite, published, tasks):
    """In Swahili, and English programs: MBPP's translations were not published."""
    skipped = []
    asked = write_suite(
        suite, ["sw"], tasks, data=published, allow_code=True, skip=skipped.append, development=True
    )
    if suite == "layer-swapping":
        (reason,) = skipped
        assert "MBPP in sw: its translations were not published" in reason
        asked += write_suite("mbpp", ["en"], tasks, data=published, allow_code=True)
    found = {
        name: hashlib.sha256(prompt_of(task).encode()).hexdigest()[:16]
        for name, task in loaded(asked, tasks).items()
    }
    assert found == {name: PUBLISHED_PROMPTS[name] for name in found}
    assert len(found) == {"layer-swapping": 7, "unreasonable": 4}.get(suite, 2)


def test_mgsm_without_shots_needs_no_exemplars(tasks, tmp_path):
    (tmp_path / "mgsm_sw.tsv").write_text("Swali gani?\t1,000\n")
    asked = write_suite("mgsm", ["sw"], tasks, data=DataFolder(tmp_path), shots=0)
    (task,) = loaded(asked, tasks).values()
    assert prompt_of(task).endswith("Swali gani?\nJibu la Hatua kwa Hatua:")
    with pytest.raises(EvaluationError, match=r"has no exemplars\.py \(or exemplars\.json\)"):
        write_suite("mgsm", ["sw"], tasks, data=DataFolder(tmp_path), shots=2)
    asked = write_suite("mgsm", ["sw"], tasks, data=DataFolder(DATA), shots=9)
    with pytest.raises(EvaluationError, match="has 8 documents for exemplars, not 9; give --num-f"):
        loaded(asked, tasks)


def test_flores_reads_csv_quotes(published, tasks):
    asked = write_suite("flores", ["bn"], tasks, data=published)
    task = loaded(asked, tasks)["flores_eng_Latn-ben_Beng_0shot"]
    doc = task.eval_docs[0]
    assert doc["target"].startswith('"আমাদের এখন')
    assert '""' not in doc["target"]
    assert prompt_of(task).endswith("\nBangla:")
    assert task.process_results(doc, [doc["target"]])["sentence_chrf"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("suite", "name", "prompt"),
    [
        ("sib200", "sib200_swh_Latn_2shot", "Text: Safari njema.\nTopic: travel\n\n"
         "Text: Daktari\nTopic: health\n\nText: Daktari\nTopic:"),
        ("afrisenti", "afrisenti_swa_2shot", "Tweet: Great!\nSentiment: positive\n\n"
         "Tweet: Bad.\nSentiment: negative\n\nTweet: Sipendi\nSentiment:"),
    ],
)  # fmt: skip
def test_classifications_have_english_exemplars_of_each_label(
    suite, name, prompt, published, tasks
):
    (asked,) = write_suite(suite, ["Swahili"], tasks, data=published, shots=2)
    assert asked.name == name
    assert prompt_of(loaded([asked], tasks)[name], document=1) == prompt


def test_rows_of_other_labels_are_left_out(published, tasks):
    asked = write_suite("masakhanews", ["sw"], tasks, data=published, development=True)
    assert [one.name for one in asked] == ["masakhanews_swa_0shot", "masakhanews_swa_0shot_dev"]
    for task in loaded(asked, tasks).values():
        (only,) = task.test_docs()  # English has no articles on religion
        assert only == {"text": "Simba yashinda", "label": "sports"}
    (asked,) = write_suite("afrisenti", ["sw"], tasks, data=published)
    task = loaded([asked], tasks)[asked.name]
    assert [doc["text"] for doc in task.test_docs()] == ['Asema "sawa"', "Sipendi"]
    assert task.doc_to_choice(task.eval_docs[0]) == ["negative", "neutral", "positive"]


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "language", "number"),
    [
        ("৳১,২৫০.৫০", "bn", "1250.5"), ("উত্তর হল ২,১২৫।", "bn", "2125"),
        ("సమాధానం ౧౧౪,౨౦౦", "te", "114200"), ("答えは１，２３４です。", "ja", "1234"),
        ("共４２個", "zh", "42"), ("๑๒", "th", "12"), ("٣٬٤٥٦", "ar", "3456"),
        ("1.000 €", "de", "1000"), ("1,000", "de", "1000"), ("0,125", "de", "0.125"),
        ("1.234.567,89", "de", "1234567.89"), ("1,234,567.89", "en", "1234567.89"),
        ("2.125", "en", "2.125"), ("1 234,5", "fr", "1234.5"), ("3 234 pommes", "fr", "3234"),
        ("1\u202f234", "fr", "1234"), ("between 3 234", "en", "234"), ("1,00,000", "bn", "100000"),
        ("Jibu ni 18.", "sw", "18"), ("5 + 6 = 11.", "en", "11"), ("23-15 = 8", "en", "8"),
        ("from 23-15", "en", "15"), ("it is -5", "en", "-5"), ("−5", "en", "-5"),
        ("$1,050.00", "en", "1050"), ("3.50", "sw", "3.5"), ("1'000", "de-CH", "1000"),
        ("10%", "ru", "10"), ("-0", "en", "0"), ("none", "en", None), ("", "te", None),
        ("25 m²", "sw", "25"), ("18 m s⁻²", "sw", "18"), ("40 ml za H₂O", "sw", "40"),
        ("Jibu ni 2½", "sw", "2.5"), ("5/8", "en", "0.625"), ("2 3/4 au", "sw", "2.75"),
        ("-1/3", "en", "-1/3"), ("12/5/2001", "en", "2001"), ("36/2 = 18", "en", "18"),
        (r"\boxed{9{,}500}", "en", "9500"), (r"80\,000", "en", "80000"), ("1 000", "en", "1000"),
        (r"80\text{,}000", "en", "80000"), (r"\boxed{18 \text{ m}^2}", "en", "18"),
        (r"\frac{1}{2}", "en", "0.5"), ("9" * 40, "en", "9" * 40),
        (".5", "en", "0.5"), ("it is -.25", "en", "-0.25"), ("...5", "en", "5"),
        ("\N{EN DASH}7", "en", "-7"), ("10\N{EN DASH}12", "en", "12"), ("4\u200b2", "en", "42"),
        ("\u200e\u2212\u200e\u06f5", "fa", "-5"), ("\u200f\u061c-\u0665\u200f", "ar", "-5"),
        ("x=1.", "es", "1"), ("70.000 dólares", "es", "70000"), ("۱۲", "fa", "12"),
    ],
)  # fmt: skip
def test_numbers_of_every_language(text, language, number):
    assert last_number(text, language) == number


@pytest.mark.parametrize("code", EXEMPLARS)
def test_the_worked_answers_of_mgsm_end_in_their_number(code):
    answers = [[EXEMPLARS[code][str(n)]["a"]] for n in range(1, 9)]
    assert number_filter(code)(answers, None) == [[answer] for answer in ANSWERS]


@pytest.mark.parametrize("code", ["bn", "de", "ja", "te"])
def test_answers_with_separators_are_read_as_published(code):
    rows = mgsm.rows({"code": code, "shots": 8}, DataFolder(DATA))["test"]
    numbers = ["18", "3", "70000", "2125", "114200"]
    assert [row["answer_number"] for row in rows] == numbers
    assert all(row["answer"] is None for row in rows)


@pytest.mark.parametrize("code", EXEMPLARS)
def test_worked_exemplars_keep_their_first_letter(code, tasks, tmp_path):
    """lm-eval cuts one letter of the Japanese and Chinese ones."""
    (tmp_path / f"mgsm_{code}.tsv").write_text("q\t1\n")
    shutil.copy(DATA / "mgsm" / "exemplars.json", tmp_path)
    (written,) = write_suite("mgsm", [code], tasks, data=DataFolder(tmp_path), allow_code=True)
    (task,) = load_tasks([written.name], include=[tasks.root])["tasks"].values()
    answer = EXEMPLARS[code]["1"]["a"]
    label, _, rest = answer.replace("：", ":").partition(":")
    assert task.doc_to_target({"answer": answer}) == answer[len(label) + 1 :].strip()
    assert rest.strip()


def test_exemplars_can_be_the_published_python_file(tmp_path):
    (tmp_path / "mgsm").mkdir()
    (tmp_path / "mgsm" / "mgsm_sw.tsv").write_text("Swali gani?\t1,000\n")
    source = f"import os\nMGSM_EXEMPLARS = {EXEMPLARS!r}\nos._exit(9)\n"
    (tmp_path / "mgsm" / "exemplars.py").write_text(source)
    rows = mgsm.rows({"code": "sw", "shots": 8}, DataFolder(tmp_path))
    assert [row["answer_number"] for row in rows["train"]] == ANSWERS
    assert rows["test"] == [{"question": "Swali gani?", "answer": None, "answer_number": "1000"}]


def test_bleu_is_sacrebleus_with_the_tokenizer_of_the_language():
    pairs = [("a b c d e f", "a b c d e g"), ("one two three four", "one two three four")]
    references, written = zip(*pairs, strict=True)
    expected = sacrebleu.corpus_bleu(written, [references]).score
    assert flores.corpus_bleu(pairs, target="swh_Latn") == expected
    ja = [("彼は今日学校へ行きます", "彼は今日学校へ行った")]
    bleu = {target: flores.corpus_bleu(ja, target=target) for target in ("swh_Latn", "jpn_Jpan")}
    assert bleu["swh_Latn"] < 10 < bleu["jpn_Jpan"]
    shan = "မိူင်းတႆးပဵၼ်မိူင်းဢၼ်မီးဝႆႉတီႈပွတ်းဢွၵ်ႇမိူင်းမၢၼ်ႈ"
    by_letter = sacrebleu.corpus_bleu([shan[:-1]], [[shan]], tokenize="char").score
    assert flores.corpus_bleu([(shan, shan[:-1])], target="shn_Mymr") == by_letter
    assert flores.corpus_chrf(pairs) == sacrebleu.corpus_chrf(written, [references]).score


def test_the_interval_of_bleu_is_that_of_resampled_sentences():
    draw = Random(0)
    references = [" ".join(draw.choices("abcdefg", k=12)) for _ in range(60)]
    written = [text if draw.random() < 0.5 else text[::-1] for text in references]
    reach = flores.bleu_reach([*zip(references, written, strict=True)], target="swh_Latn")
    drawn = []
    for _ in range(120):
        rows = draw.choices(range(60), k=60)
        texts = ([texts[i] for i in rows] for texts in (references, written))
        drawn.append(flores.corpus_bleu([*zip(*texts, strict=True)], target="swh_Latn"))
    assert reach == pytest.approx(1.96 * np.std(drawn), rel=0.3)
    task, samples = WrittenTask("t", "t", "sw", ("bleu", "none")), {"t": [{}] * 60}
    result = {"results": {"t": {"bleu,none": 31.0, "bleu_reach,none": 4.0}}, "samples": samples}
    assert whole_score(result, task) == Interval(31.0, 27.0, 35.0, 60)


def test_mbpp_runs_the_published_programs_in_the_sandbox(allowed):
    for row in PROGRAMS[:3]:
        assert mbpp.results(row, [row["code"] + "\n[DONE] and more"]) == {"pass_at_1": 1.0}
        assert mbpp.results(row, [f"Sure:\n```python\n{row['code']}\n```\nDone."])["pass_at_1"] == 1
        assert mbpp.results(row, ["def nothing(): pass"]) == {"pass_at_1": 0.0}
    assert mbpp.results(PROGRAMS[0], ["import os; os._exit(0)"]) == {"pass_at_1": 0.0}


def test_programs_run_only_if_the_caller_allows_it():
    with pytest.raises(EvaluationError, match="run only with --allow-code"):
        mbpp.results(PROGRAMS[0], [PROGRAMS[0]["code"]])


def passes(row):
    with programs_allowed():  # in each thread
        return mbpp.results(row, [row["code"]])["pass_at_1"]


@pytest.mark.slow
def test_all_published_solutions_of_mbpp_pass():
    path = DataFolder.given(None).find("mbpp.jsonl")
    if path is None:
        pytest.skip("needs mbpp.jsonl in the folder that LAYERSWAP_DATA names")
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(passes, rows)
        failed = [row["task_id"] for row, score in zip(rows, passed, strict=True) if not score]
    assert not failed


def test_mbpp_takes_translations(tasks, tmp_path):
    shutil.copy(DATA / "mbpp" / "mbpp.jsonl", tmp_path)
    lines = [json.dumps({"task_id": r["task_id"], "text": f"Andika {r['task_id']}"})
             for r in PROGRAMS]  # fmt: skip
    (tmp_path / "mbpp_sw.jsonl").write_text("\n".join(lines))
    asked = write_suite("mbpp", ["swh"], tasks, data=DataFolder(tmp_path), allow_code=True)
    (task,) = loaded(asked, tasks).values()
    assert [doc["task_id"] for doc in task.eval_docs] == list(range(11, 25))
    assert "here is your task: Andika 11 Your code" in prompt_of(task)
    (tmp_path / "mbpp_sw.jsonl").write_text("\n".join(lines[:5]))
    with pytest.raises(EvaluationError, match="lacks 12 tasks, the first is 13"):
        write_suite("mbpp", ["sw"], tasks, data=DataFolder(tmp_path), allow_code=True)


# --- missing data ------------------------------------------------------------------------------


def test_benchmarks_without_data_are_left_out(tasks, tmp_path):
    write_belebele(tmp_path / "belebele")
    reasons = []
    asked = write_suite(
        "unreasonable", ["sw"], tasks, data=DataFolder(tmp_path), skip=reasons.append
    )
    assert [one.benchmark for one in asked] == ["belebele"]
    assert len(reasons) == 2
    assert re.search(r"mgsm_sw\.tsv and exemplars\.py .*url-nlp", reasons[0])
    assert "hf download --repo-type dataset CohereLabs/Global-MMLU" in reasons[1]


@pytest.mark.parametrize(
    ("suite", "language", "message"),
    [
        ("mgsm", "la", "mgsm does not have la"),
        ("flores", "en", "flores does not have en"),
        ("afrisenti", "en", "afrisenti does not have en"),
        ("mgms", "sw", "no suite 'mgms'; did you mean 'mgsm'"),
        ("unreasonable", "la", "unreasonable: no benchmark of it is available in la"),
        ("mbpp", "en", "mbpp runs programs that a model writes; allow it with --allow-code"),
    ],
)
def test_suites_and_languages_that_do_not_exist(suite, language, message, tasks):
    with pytest.raises(EvaluationError, match=message):
        write_suite(suite, [language], tasks, data=DataFolder(DATA), skip=lambda line: None)


def test_a_table_without_its_columns_is_refused(tasks, tmp_path):
    (tmp_path / "sib200").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "sib200" / f"swh_Latn.{split}.tsv").write_text("text\nHabari.\n")
    with pytest.raises(EvaluationError, match=r"swh_Latn\.dev\.tsv: has no column 'category'"):
        write_suite("sib200", ["sw"], tasks, data=DataFolder(tmp_path), development=True)


def test_data_may_be_named_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERSWAP_DATA", str(DATA))
    assert DataFolder.given(None).find("mgsm_sw.tsv") == DATA / "mgsm" / "mgsm_sw.tsv"
    monkeypatch.delenv("LAYERSWAP_DATA")
    assert DataFolder.given(None).find("mgsm_sw.tsv") is None
    with pytest.raises(EvaluationError, match="no such folder"):
        DataFolder(tmp_path / "nowhere")


# --- files of benchmarks and suites ------------------------------------------------------------


def test_suites_and_languages_are_those_of_the_papers():
    shots = {
        suite: {part.benchmark.name: part.shots for part in parts_of(suite)}
        for suite in suite_names()
    }
    papers = {
        "layer-swapping": {"mgsm": 8, "belebele": 5, "flores": 0, "mbpp": 0, "mmlu": 5},
        "unreasonable": {"mgsm": 2, "belebele": 0, "mmlu": 0},
    }
    assert {suite: shots[suite] for suite in papers} == papers
    languages = {
        suite: parts[0].benchmark.languages
        for suite in suite_names() if len(parts := parts_of(suite)) == 1
    }  # fmt: skip
    assert {name: len(codes) for name, codes in languages.items() if codes != "any"} == {
        "afrisenti": 14, "belebele": 122, "flores": 121, "masakhanews": 16, "mgsm": 11,
        "mmlu": 42, "sib200": 122,
    }  # fmt: skip
    assert languages["mbpp"] == "any"


def test_a_development_split_is_optional(tasks, tmp_path):
    (tmp_path / "masakhanews").mkdir()
    (tmp_path / "masakhanews" / "ibo.test.tsv").write_text(ARTICLES)
    data, lines = DataFolder(tmp_path), []
    for development in (False, True):
        asked = write_suite("masakhanews", ["ig"], tasks, data=data, skip=lines.append,
                            development=development)  # fmt: skip
        assert [one.name for one in asked] == ["masakhanews_ibo_0shot"]
    assert lines == ["masakhanews in ig: no development split"]
    (tmp_path / "masakhanews" / "ibo.dev.tsv").write_text(ARTICLES)
    asked = write_suite("masakhanews", ["ig"], tasks, data=data, development=True)
    assert [one.name for one in asked] == ["masakhanews_ibo_0shot", "masakhanews_ibo_0shot_dev"]


@pytest.fixture
def greetings(tmp_path):
    """The benchmark of docs/evaluation.md, with a few rows."""
    page = (DATA.parents[1] / "docs" / "evaluation.md").read_text()
    path = tmp_path / "greetings.yaml"
    path.write_text(page.partition("```yaml\n# my-benchmark.yaml")[2].partition("\n")[2]
                    .partition("```")[0])  # fmt: skip
    (tmp_path / "greetings").mkdir()
    rows = "sentence\ttone\nHujambo\tpolite\nToka\trude\nSasa\tneither\n"
    (tmp_path / "greetings" / "sw.test.tsv").write_text(rows)
    return path


def test_a_benchmark_of_ones_own_is_one_file(greetings, tasks):
    data = DataFolder(greetings.parent)
    with pytest.warns(UserWarning, match=r"1 of 3 rows are left out: .* found 'neither'"):
        (asked,) = write_suite(str(greetings), ["Swahili"], tasks, data=data)
    assert (asked.name, asked.benchmark, asked.language) == (
        "greetings_sw_0shot", "greetings", "sw"
    )  # fmt: skip
    task = loaded([asked], tasks)[asked.name]
    assert [prompt_of(task, document) for document in (0, 1)] == [
        "Hujambo\nThis is", "Toka\nThis is"
    ]  # fmt: skip
    assert task.doc_to_choice(task.eval_docs[0]) == ["polite", "rude"]
    with pytest.raises(EvaluationError, match=r"no greetings/en\.test\.tsv beside greetings"):
        write_suite(str(greetings), ["en"], tasks, data=data)


@pytest.mark.parametrize(
    "labels",
    ["-1/0/1", "1/2/3/4/5", "01/02", "१/२", "[1]/[2]", "True/None", "!function os.getcwd/!!int 3"],
)
def test_labels_are_texts_and_no_positions(greetings, tasks, labels):
    names = labels.split("/")
    lines = "".join(f"{100 + i}\t{label}\n" for i, label in enumerate([*names, names[0]]))
    (greetings.parent / "greetings" / "sw.test.tsv").write_text("sentence\ttone\n" + lines)
    text = greetings.read_text().replace("[polite, rude]", str(names))
    greetings.write_text(text.replace('"{{text}}\\nThis is"', '"{{text}}"'))
    (asked,) = write_suite(str(greetings), ["sw"], tasks, data=DataFolder(greetings.parent))
    task = loaded([asked], tasks)[asked.name]
    assert [task.doc_to_target(document) for document in task.eval_docs] == [*names, names[0]]
    assert task.doc_to_choice(task.eval_docs[0]) == names
    assert prompt_of(task, 1) == "101"
    scored = [task.process_results(document, [(-i, False) for i in range(len(names))])["acc"]
              for document in task.eval_docs]  # fmt: skip
    assert scored == [1.0, *[0.0] * (len(names) - 1), 1.0]


def test_answers_and_choices_reach_lm_eval_as_they_are(greetings, tasks):
    text = greetings.read_text().replace("labels: [polite, rude]\n", "")
    text = text.replace("{text: sentence, label: tone}", "[text, options, answer]")
    text = text.replace(".tsv", ".jsonl").replace("{{label}}", "{{answer}}")
    answers = ["2024-01-31", "[1, 2]", "07", "1e3", "2024-01-31 10:00", "true"]
    rows = [{"text": str(i), "options": ["3", answer], "answer": answer}
            for i, answer in enumerate(answers)]  # fmt: skip
    file = greetings.parent / "greetings" / "sw.test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = text.replace("multiple_choice", "generate_until")
    written = "".join(line + "\n" for line in written.splitlines() if "doc_to_choice" not in line)
    for form in (text.replace('"${labels}"', '"{{options}}"'), written):
        greetings.write_text(form)
        (asked,) = write_suite(str(greetings), ["sw"], tasks, data=DataFolder(greetings.parent))
        task = loaded([asked], tasks)[asked.name]
        assert [task.doc_to_target(document) for document in task.eval_docs] == answers
    assert task.eval_docs[1]["options"] == ["3", "[1, 2]"]


def test_no_document_is_shown_its_own_answer(greetings, tasks):
    """lm-eval draws exemplars among all documents of a test without another split."""
    rows = "".join(f"Neno {i}\t{('polite', 'rude')[i % 2]}\n" for i in range(6))
    (greetings.parent / "greetings" / "sw.test.tsv").write_text("sentence\ttone\n" + rows)
    data = DataFolder(greetings.parent)
    (asked,) = write_suite(str(greetings), ["sw"], tasks, data=data, shots=4)
    task = loaded([asked], tasks)[asked.name]
    for document in range(6):
        prompt = prompt_of(task, document)
        assert prompt.count(f"Neno {document}\n") == 1
        assert prompt.count("Neno") == 5
    with pytest.raises(EvaluationError, match="has 5 documents for exemplars, not 6; give --num-f"):
        load_tasks([asked.name], include=[tasks.root], prompts=Asked(num_fewshot=6))
    (file,) = tasks.root.glob("**/greetings*.yaml")
    file.write_text(file.read_text().replace("fewshot_split: test\n", ""))
    with pytest.warns(
        UserWarning, match="greetings_sw_4shot: its exemplars are drawn from the doc"
    ):
        loaded([asked], tasks)


def test_a_suite_of_ones_own_names_benchmarks_and_files(greetings):
    suite = greetings.parent / "mine.yaml"
    suite.write_text("title: Mine\nbenchmarks: {mgsm: 2, greetings.yaml: 0}\n")
    parts = [(part.benchmark.name, part.shots) for part in parts_of(str(suite))]
    assert parts == [("mgsm", 2), ("greetings", 0)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric:", "metrics:", r"greetings\.yaml, line 5: metrics: unknown key; did you mean"),
        ("size: {documents: 100, read: 20}", "size: {}", "size.documents: is missing"),
        ("data:", "rows: x:y\ndata:", "give either data or rows"),
        ("splits: [test]", "splits: []", "splits: name at least one split of the data"),
        ("[sw, en]", "[3]", r"languages\[0\]: write a text in quotes; found 3"),
        ("[polite, rude]", "[rude, rude]", "labels: 'rude' is given twice"),
        ("label: tone", "tone: tone", "labels: data.columns has no column 'label'"),
        ("labels:", "group: {by: topic}\nlabels:", "group: data.columns has no column 'topic'"),
    ],
)
def test_mistakes_in_a_benchmark_are_named_by_line(greetings, old, new, message):
    greetings.write_text(greetings.read_text().replace(old, new, 1))
    with pytest.raises(RecipeError, match=message):
        parts_of(str(greetings))


@pytest.mark.parametrize(
    ("suite", "file", "content", "message"),
    [
        ("mgsm", "mgsm/mgsm_sw.tsv", b"\xb3\t1\n", "mgsm_sw.tsv, line 1: is not UTF-8"),
        ("mgsm", "mgsm/exemplars.json", b'{"sw": {"1": 3}}', "exemplars|TypeError"),
        ("mgsm", "mgsm/exemplars.json", b"[" * 100_000, "RecursionError"),
        ("mbpp", "mbpp/mbpp.jsonl", b"[1]\n", "1 is not a JSON object"),
        ("flores", "flores/swh_Latn.devtest", b"\xe6\n", "swh_Latn.devtest, line 1: is not UTF-8"),
        ("sib200", "sib200/swh_Latn.test.tsv", b"text\tcategory\n" + b"x" * 200_000 + b"\ta\n",
         "no row has a label of sib200"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_line(published, tasks, tmp_path, suite, file, content, message):
    shutil.copytree(published.root, tmp_path / "data")
    (tmp_path / "data" / file).write_bytes(content)
    given = {"data": DataFolder(tmp_path / "data"), "allow_code": True}
    assert re.search(message, one_line(LayerswapError, write_suite, suite, ["sw"], tasks, **given))


def test_numbers_that_are_no_labels(tasks, tmp_path):
    """Data sets of the Hub give -1 where a label is hidden."""
    table = suites.Data(columns={"label": "label"}, label_numbers=["no", "yes"])
    assert suites._cell({"label": 1}, "label", ["label"], table, "x") == "yes"
    for number in (2, -1):
        with pytest.raises(EvaluationError, match=f"x: has an unknown label {number}"):
            suites._cell({"label": number}, "label", ["label"], table, "x")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("task_name: greetings", "task_name: ../greetings"),
        ("splits:", "modules: {../../evil: 'x = 1'}\nsplits:"),
        ("task_name: greetings_${code}_${shots}shot", 'task_name: "a\\nb"'),
    ],
)
def test_no_benchmark_writes_outside_its_folder(greetings, tasks, tmp_path, old, new):
    greetings.write_text(greetings.read_text().replace(old, new, 1))
    before = {*tmp_path.rglob("*")} - {*tasks.root.rglob("*")}
    given = (str(greetings), ["sw"], tasks)
    said = one_line(EvaluationError, write_suite, *given, data=DataFolder(tmp_path))
    assert "cannot be the name of a task's file" in said
    assert {*tmp_path.rglob("*")} - {*tasks.root.rglob("*")} == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("splits:", "modules: {mine: 'def f(doc): return doc'}\nsplits:"),
        ('"{{text}}\\nThis is"', '"!function mine.f"'),
    ],
)
def test_code_of_a_benchmark_is_reported_before_it_runs(greetings, tasks, tmp_path, old, new):
    greetings.write_text(greetings.read_text().replace(old, new, 1))
    with pytest.warns(UserWarning, match="greetings.yaml: runs Python code"):
        write_suite(str(greetings), ["sw"], tasks, data=DataFolder(tmp_path))
