"""The papers' benchmarks from their published files: prompts, answers, and what cannot be asked."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu

from layerswap.errors import EvaluationError
from layerswap.evaluation.harness import load_tasks
from layerswap.evaluation.suites import flores, mbpp, mgsm, suite_names
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.mgsm import last_number, number_filter
from layerswap.evaluation.suites.suites import parts_of, write_suite

DATA = Path(__file__).parents[1] / "data"
LANGUAGES = [*json.loads((DATA / "mgsm" / "exemplars.json").read_text())]
ANSWERS = [11, 29, 39, 9, 33, 8, 8, 5]


@pytest.fixture
def tasks(tmp_path):
    return TaskFolder(tmp_path / "tasks")


def loaded(names, tasks):
    return load_tasks(names, include=[tasks.root])["tasks"]


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
        ("x=1.", "es", "1"), ("70.000 dólares", "es", "70000"), ("۱۲", "fa", "12"),
    ],
)  # fmt: skip
def test_numbers_of_every_language(text, language, number):
    assert last_number(text, language) == number


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_worked_answers_of_mgsm_end_in_their_number(code):
    table = json.loads((DATA / "mgsm" / "exemplars.json").read_text())[code]
    answers = [[table[str(n)]["a"]] for n in range(1, 9)]
    assert number_filter(code)(answers, None) == [[str(n)] for n in ANSWERS]


def test_answers_with_separators_are_read_as_published():
    for code in ("bn", "de", "ja", "te"):
        rows = mgsm.rows({"code": code, "shots": 8}, DataFolder(DATA))
        assert [row["answer_number"] for row in rows["test"]] == [
            "18",
            "3",
            "70000",
            "2125",
            "114200",
        ]
        assert all(row["answer"] is None for row in rows["test"])


@pytest.mark.parametrize("language", ["sw", "Bengali", "jpn_Jpan"])
def test_mgsm_prompts_with_the_benchmarks_own_exemplars_in_order(language, tasks):
    (asked,) = write_suite("mgsm", [language], tasks, data=DataFolder(DATA))
    task = loaded([asked.name], tasks)[asked.name]
    task.set_config(key="num_fewshot", value=8)
    task.build_all_requests(rank=0, world_size=1)
    prompt = task.instances[0].args[0]
    table = json.loads((DATA / "mgsm" / "exemplars.json").read_text())[asked.name.split("_")[1]]
    places = [prompt.index(table[str(n)]["q"]) for n in range(1, 9)]
    assert places == sorted(places)
    assert task.eval_docs[0]["question"] in prompt
    assert prompt.index(task.eval_docs[0]["question"]) > places[-1]


def test_exemplars_can_be_the_published_python_file(tmp_path):
    table = json.loads((DATA / "mgsm" / "exemplars.json").read_text())
    (tmp_path / "mgsm").mkdir()
    (tmp_path / "mgsm" / "mgsm_sw.tsv").write_text("Swali gani?\t1,000\n")
    source = f"import os\nMGSM_EXEMPLARS = {table!r}\nos._exit(9)\n"
    (tmp_path / "mgsm" / "exemplars.py").write_text(source)
    rows = mgsm.rows({"code": "sw", "shots": 8}, DataFolder(tmp_path))
    assert [row["answer_number"] for row in rows["train"]] == list(map(str, ANSWERS))
    assert rows["test"] == [{"question": "Swali gani?", "answer": None, "answer_number": "1000"}]


def test_mgsm_without_shots_needs_no_exemplars(tasks, tmp_path):
    (tmp_path / "mgsm_sw.tsv").write_text("Swali gani?\t1,000\n")
    (asked,) = write_suite("mgsm", ["sw"], tasks, data=DataFolder(tmp_path), shots=0)
    (task,) = loaded([asked.name], tasks).values()
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(rank=0, world_size=1)
    assert task.instances[0].args[0].endswith("Swali gani?\nJibu la Hatua kwa Hatua:")
    with pytest.raises(EvaluationError, match=r"has no exemplars\.py \(or exemplars\.json\)"):
        write_suite("mgsm", ["sw"], tasks, data=DataFolder(tmp_path), shots=2)


def test_flores_goes_both_ways_and_reads_csv_quotes(tasks):
    asked = write_suite("flores", ["bn"], tasks, data=DataFolder(DATA))
    assert [one.name for one in asked] == [
        "flores_eng_Latn-ben_Beng_0shot", "flores_ben_Beng-eng_Latn_0shot",
    ]  # fmt: skip
    found = loaded([one.name for one in asked], tasks)
    task = found[asked[0].name]
    doc = task.eval_docs[0]
    assert doc["target"].startswith('"আমাদের এখন')
    assert '""' not in doc["target"]
    prompt = task.doc_to_text(doc)
    assert prompt.startswith('Translate this sentence from English to Bangla.\nEnglish: "We now')
    assert prompt.endswith("\nBangla:")
    scored = task.process_results(doc, [doc["target"]])
    assert scored["sentence_chrf"] == pytest.approx(100)


def test_bleu_is_sacrebleus_with_the_tokenizer_of_the_language():
    pairs = [("a b c d e f", "a b c d e g"), ("one two three four", "one two three four")]
    references, written = zip(*pairs, strict=True)
    expected = sacrebleu.corpus_bleu(written, [references]).score
    assert flores.corpus_bleu(pairs, target="swh_Latn") == expected
    ja = [("彼は今日学校へ行きます", "彼は今日学校へ行った")]
    assert (
        flores.corpus_bleu(ja, target="swh_Latn") < 10 < flores.corpus_bleu(ja, target="jpn_Jpan")
    )
    assert flores.corpus_chrf(pairs) == sacrebleu.corpus_chrf(written, [references]).score


@pytest.mark.slow
def test_mbpp_runs_the_published_programs_in_the_sandbox():
    rows = [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    for row in rows[:6]:
        assert mbpp.results(row, [row["code"] + "\n[DONE] and more"]) == {"pass_at_1": 1.0}
        assert mbpp.results(row, [f"Sure:\n```python\n{row['code']}\n```\nDone."])["pass_at_1"] == 1
        assert mbpp.results(row, ["def nothing(): pass"]) == {"pass_at_1": 0.0}
    assert mbpp.results(rows[0], ["import os; os._exit(0)"]) == {"pass_at_1": 0.0}


def test_mbpp_needs_leave_and_a_translation(tasks, tmp_path):
    data = DataFolder(DATA)
    with pytest.raises(EvaluationError, match=r"allow it with --allow-code"):
        write_suite("mbpp", ["en"], tasks, data=data)
    with pytest.raises(EvaluationError, match=r"put mbpp_sw\.jsonl"):
        write_suite("mbpp", ["sw"], tasks, data=data, allow_code=True)
    (asked,) = write_suite("mbpp", ["en"], tasks, data=data, allow_code=True)
    task = loaded([asked.name], tasks)[asked.name]
    assert [doc["task_id"] for doc in task.eval_docs] == list(range(11, 25))
    rows = [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    (tmp_path / "mbpp.jsonl").write_text((DATA / "mbpp" / "mbpp.jsonl").read_text())
    lines = [json.dumps({"task_id": r["task_id"], "text": f"Andika {r['task_id']}"}) for r in rows]
    (tmp_path / "mbpp_sw.jsonl").write_text("\n".join(lines))
    (asked,) = write_suite("mbpp", ["swh"], tasks, data=DataFolder(tmp_path), allow_code=True)
    task = loaded([asked.name], tasks)[asked.name]
    assert "here is your task: Andika 11 Your code" in task.doc_to_text(task.eval_docs[0])
    (tmp_path / "mbpp_sw.jsonl").write_text("\n".join(lines[:5]))
    with pytest.raises(EvaluationError, match="lacks 12 tasks, the first is 13"):
        write_suite("mbpp", ["sw"], tasks, data=DataFolder(tmp_path), allow_code=True)


def belebele(folder, code, count=8):
    rows = [
        {"link": "l", "question_number": i, "flores_passage": f"Kifungu {i}", "question": f"Q{i}?",
         "mc_answer1": "a", "mc_answer2": "b", "mc_answer3": "c", "mc_answer4": "d",
         "correct_answer_num": str(1 + i % 4), "dialect": code, "ds": "2023"}
        for i in range(count)
    ]  # fmt: skip
    (folder / "belebele").mkdir(exist_ok=True)
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "belebele" / f"{code}.jsonl").write_text(text)


def test_belebele_is_lm_evals_prompt_over_the_published_file(tasks, tmp_path):
    belebele(tmp_path, "swh_Latn")
    (asked,) = write_suite("belebele", ["Swahili"], tasks, data=DataFolder(tmp_path))
    task = loaded([asked.name], tasks)[asked.name]
    task.set_config(key="num_fewshot", value=5)
    task.build_all_requests(rank=0, world_size=1)
    context, choice = task.instances[1].args
    assert context.endswith("P: Kifungu 0\nQ: Q0?\nA: a\nB: b\nC: c\nD: d\nAnswer:")
    assert context.count("P: Kifungu") == 6
    assert choice.strip() == "B"


def mmlu(folder):
    home = folder / "CohereLabs" / "Global-MMLU" / "sw"
    home.mkdir(parents=True)
    for split, count in (("dev", 5), ("test", 4)):
        rows = [
            {"sample_id": f"{subject}/{i}", "subject": subject, "subject_category": "STEM",
             "question": f"{split} {subject} {i}", "option_a": "1", "option_b": "2",
             "option_c": "3", "option_d": "4", "answer": "ABCD"[i % 4]}
            for subject in ("anatomy", "virology") for i in range(count)
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), home / f"{split}-00000-of-00001.parquet")


def test_mmlu_is_a_group_of_subjects_with_exemplars_of_their_own(tasks, tmp_path):
    mmlu(tmp_path)
    (asked,) = write_suite("mmlu", ["swh_Latn"], tasks, data=DataFolder(tmp_path))
    found = loaded([asked.name], tasks)
    assert sorted(found) == ["mmlu_sw_5shot_anatomy", "mmlu_sw_5shot_virology"]
    task = found["mmlu_sw_5shot_virology"]
    task.set_config(key="num_fewshot", value=5)
    task.build_all_requests(rank=0, world_size=1)
    context = task.instances[0].args[0]
    assert context.count("dev virology") == 5
    assert "anatomy" not in context


def test_what_a_language_lacks_is_left_out_and_said(tasks, tmp_path):
    belebele(tmp_path, "swh_Latn")
    said = []
    asked = write_suite("unreasonable", ["sw"], tasks, data=DataFolder(tmp_path), skip=said.append)
    assert [one.benchmark for one in asked] == ["belebele"]
    assert len(said) == 2
    assert "mgsm_sw.tsv and exemplars.py" in said[0]
    assert "url-nlp" in said[0]
    assert "hf download --repo-type dataset CohereLabs/Global-MMLU" in said[1]
    with pytest.raises(EvaluationError, match="mgsm does not have la"):
        write_suite("mgsm", ["la"], tasks, data=DataFolder(tmp_path))
    with pytest.raises(EvaluationError, match="no suite 'mgms'; did you mean 'mgsm'"):
        write_suite("mgms", ["sw"], tasks, data=DataFolder(tmp_path))
    with pytest.raises(EvaluationError, match="no benchmark of it is available in la"):
        write_suite("unreasonable", ["la"], tasks, data=DataFolder(tmp_path), skip=said.append)
    with pytest.raises(EvaluationError, match="flores does not have en"):
        write_suite("flores", ["en"], tasks, data=DataFolder(DATA))


def test_data_may_be_named_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERSWAP_DATA", str(DATA))
    assert DataFolder.given(None).find("mgsm_sw.tsv") == DATA / "mgsm" / "mgsm_sw.tsv"
    monkeypatch.delenv("LAYERSWAP_DATA")
    assert DataFolder.given(None).find("mgsm_sw.tsv") is None
    with pytest.raises(EvaluationError, match="no such folder"):
        DataFolder(tmp_path / "nowhere")


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


TOPICS = "index_id\tcategory\ttext\n1\ttravel\tSafari njema.\n2\thealth\t Daktari \n"
ARTICLES = (
    "category\theadline\ttext\turl\n"
    "sports\tSimba yashinda \tIlishinda jana.\tx\nreligion\tA\tB\tx\n"
)
TWEETS = 'tweet\tlabel\n"Asema ""sawa"""\tpositive\nSipendi\tnegative\nNani?\tmixed\n'
ENGLISH_TWEETS = "text\tlabel\nGreat!\tpositive\nBad.\tnegative\nIt rains\tneutral\n"


@pytest.fixture
def published(tmp_path):
    root = tmp_path / "published"
    for benchmark, codes, text in (
        ("sib200", ("swh_Latn", "eng_Latn"), TOPICS),
        ("masakhanews", ("swa", "eng"), ARTICLES),
        ("afrisenti", ("swa",), TWEETS),
        ("tweeteval", ("sentiment",), ENGLISH_TWEETS),
    ):
        (root / benchmark).mkdir(parents=True)
        for code in codes:
            for split in ("train", "dev", "test"):
                (root / benchmark / f"{code}.{split}.tsv").write_text(text)
    return DataFolder(root)


def test_topics_of_sentences_with_exemplars_of_every_topic(published, tasks):
    (asked,) = write_suite("sib200", ["sw"], tasks, data=published, shots=2)
    task = loaded([asked.name], tasks)[asked.name]
    (first, second) = task.test_docs()
    assert (first["label"], second["text"]) == ("travel", "Daktari")
    assert task.doc_to_choice(first)[:2] == ["science/technology", "travel"]
    prompt = task.fewshot_context(second, 2)
    assert prompt == (
        "Text: Safari njema.\nTopic: travel\n\nText: Daktari\nTopic: health\n\n"
        "Text: Daktari\nTopic:"
    )


def test_articles_of_topics_that_english_lacks_are_left_out(published, tasks):
    names = write_suite("masakhanews", ["sw"], tasks, data=published, development=True)
    assert [one.name for one in names] == ["masakhanews_swa_0shot", "masakhanews_swa_0shot_dev"]
    for one in names:
        (only,) = loaded([one.name], tasks)[one.name].test_docs()
        assert only == {"text": "Simba yashinda", "label": "sports"}


def test_sentiments_with_english_exemplars_of_another_data_set(published, tasks):
    (asked,) = write_suite("afrisenti", ["Swahili"], tasks, data=published, shots=2)
    assert asked.name == "afrisenti_swa_2shot"
    task = loaded([asked.name], tasks)[asked.name]
    (first, second) = task.test_docs()
    assert (first, second["label"]) == ({"text": 'Asema "sawa"', "label": "positive"}, "negative")
    assert task.doc_to_choice(first) == ["negative", "neutral", "positive"]
    assert task.fewshot_context(second, 2) == (
        "Tweet: Great!\nSentiment: positive\n\nTweet: Bad.\nSentiment: negative\n\n"
        "Tweet: Sipendi\nSentiment:"
    )
    with pytest.raises(EvaluationError, match="afrisenti does not have en"):
        write_suite("afrisenti", ["en"], tasks, data=published)


def test_a_topic_table_without_its_columns_is_refused(published, tasks):
    (published.root / "sib200" / "swh_Latn.test.tsv").write_text("text\nHabari.\n")
    with pytest.raises(EvaluationError, match=r"swh_Latn\.test\.tsv: has no column 'category'"):
        write_suite("sib200", ["sw"], tasks, data=published)
