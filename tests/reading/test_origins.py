"""Opening rows: every format, downloaded copies in the layouts of the Hub, and what is missing."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from importlib.metadata import version

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from packaging.version import Version
from refusals import one_line, refused

from layerswap.ground.errors import DataError
from layerswap.ground.yaml_file import parse_yaml
from layerswap.reading import files
from layerswap.reading.files import lines_of
from layerswap.reading.files import rows_of as rows_of_file
from layerswap.reading.origins import Origin, open_rows, where_filter
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import MixSource

ROWS = [{"q": "What?", "a": "NA"}, {"q": "Why, then?", "a": "null"}, {"q": '"So"', "a": "07"}]


def write(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        Dataset.from_list(rows).save_to_disk(path.with_suffix(""))
        next(path.with_suffix("").glob("*.arrow")).rename(path)
    elif path.suffix == ".csv":
        lines = [["q", "a"], *([f'"{r["q"]}"'.replace('""', '"""'), r["a"]] for r in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    else:
        text = "".join(f"{row['q']}\t{row['a']}\n" for row in rows)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_of(tmp_path, local=None, limit=None, **origin):
    opened = open_rows(Origin.model_validate(origin), folder=tmp_path, local=local, limit=limit)
    return list(opened.rows)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.arrow", "x.csv"])
def test_every_format_gives_the_same_texts_up_to_read_and_limit(tmp_path, name):
    write(tmp_path / name)
    assert rows_of(tmp_path, path=name) == ROWS
    assert len(rows_of(tmp_path, path=name, read=2)) == 2
    assert len(rows_of(tmp_path, path=name, read=2, limit=1)) == 1
    assert len(rows_of(tmp_path, path=name, limit=9)) == 3


def test_a_file_is_no_translation_of_itself(tmp_path):
    write_bytes(tmp_path, news__ig=b"otu\n")
    why = why_refused(tmp_path, parallel={"ig": "news.ig", "en": "./news.ig"})
    assert why == f"ig and en are one file, {tmp_path}/news.ig; give the translation"


def test_a_table_read_alone_has_the_delimiter_of_its_header(tmp_path):
    (tmp_path / "x.csv").write_text("\ufeffq;a\r\nWhy, then?;NA\r\n", encoding="utf-8")
    assert [*rows_of_file(tmp_path / "x.csv")] == [{"q": "Why, then?", "a": "NA"}]
    (tmp_path / "x.csv").write_text('"q, in full";"a"\n"Why, then?";NA\n')
    assert [*rows_of_file(tmp_path / "x.csv")] == [{"q, in full": "Why, then?", "a": "NA"}]
    (tmp_path / "x.csv").write_text('q, "a"\n"Why, then?", "NA"\n')
    assert [*rows_of_file(tmp_path / "x.csv")] == [{"q": "Why, then?", "a": "NA"}]


def test_a_compression_that_no_library_here_reads(tmp_path, monkeypatch):
    monkeypatch.delitem(fsspec.utils.compressions, "zst", raising=False)
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DataError, match="zst: needs the package zstandard; install it, or unpack"):
        open_rows(Origin(path="x.jsonl.zst"), folder=tmp_path)


@pytest.mark.parametrize("name", ["x.tsv", "x.tsv.gz", "x.gz"])
def test_tables_without_header_and_quotes(tmp_path, name):
    write(tmp_path / name)
    more = {"format": "csv", "delimiter": "\t"} if name == "x.gz" else {}
    rows = rows_of(tmp_path, path=name, header=["q", "a"], quotes=False, **more)
    assert [(row["q"], row["a"]) for row in rows] == [(row["q"], row["a"]) for row in ROWS]


@pytest.mark.parametrize("line", [b"a" * 64, b"a b " * 16 + b"\n"])
@pytest.mark.parametrize("form", ["text", "csv"])
def test_a_file_that_unpacks_to_a_hundred_times_its_size_is_refused(
    tmp_path, monkeypatch, line, form
):
    monkeypatch.setattr(files, "FLOOR", 1 << 18, raising=False)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(line * (1 << 15)))
    (tmp_path / "small.gz").write_bytes(gzip.compress(b"a b\n" * (1 << 15)))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bomb.gz: unpacks to 100 times its size; unpack it"):
        open_rows(Origin(path="bomb.gz", format=form, delimiter="::"), folder=tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert sum(1 for _ in lines_of(tmp_path / "small.gz")) == 1 << 15


def test_a_header_within_a_table_is_no_row(tmp_path):
    (tmp_path / "x.csv").write_text("text,label\na,x\ntext,label\nb,y\n\ufeffText,Label\ntext,z\n")
    assert [row["label"] for row in rows_of(tmp_path, path="x.csv")] == ["x", "y", "z"]


def test_a_pattern_reads_its_files_in_order(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / "parts" / f"{name}.jsonl", [{"q": name}])
    assert [row["q"] for row in rows_of(tmp_path, path="parts/*.jsonl")] == ["a", "b", "c"]
    assert [row["q"] for row in rows_of(tmp_path, path="**/[ac].jsonl")] == ["a", "c"]


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        (["owner/name/data/train-00000-of-00001.parquet"], {}),
        (["name/train.jsonl", "name/test.jsonl"], {}),
        (["owner/name/swahili/train-00000-of-00001.parquet"], {"config": "swahili"}),
        (["owner/name/default/train/0000.parquet"], {"config": "default"}),
        (["owner/name/all.csv"], {}),
        (["owner/name/swahili.jsonl"], {"files": ["swahili.jsonl"]}),
        (["owner/name/sw/x_flores.jsonl", "owner/name/sw/x_tasks.jsonl"],
         {"files": ["sw/*.jsonl"], "without": ["*flores*"]}),
        (["name/pairs.gz"], {"files": ["https://host/bucket/pairs.gz"], "format": "csv",
                             "delimiter": "\t", "header": ["q", "a"], "quotes": False}),
    ],
)  # fmt: skip
def test_downloaded_copies_are_read_as_they_are_published(tmp_path, files, origin):
    for file in files:
        wanted = not ("test" in file or "flores" in file)
        write(tmp_path / file, ROWS if wanted else [{"q": "not this", "a": "x"}])
    rows = rows_of(tmp_path, tmp_path, id="owner/name", **origin)
    assert [row["q"] for row in rows] == [row["q"] for row in ROWS]


def test_a_card_that_declares_configurations_decides_their_files(tmp_path):
    write(tmp_path / "owner/name/elsewhere/one.parquet")
    write(tmp_path / "owner/name/elsewhere/two.parquet", [{"q": "not this"}])
    (tmp_path / "owner/name/README.md").write_text(
        "---\nconfigs:\n- config_name: first\n  data_files: elsewhere/one.parquet\n"
        "- config_name: second\n  data_files: elsewhere/two.parquet\n---\n"
    )
    assert rows_of(tmp_path, tmp_path, id="owner/name", config="first") == ROWS


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ({"path": "no.jsonl"}, "{tmp}/no.jsonl: no such file"),
        ({"path": "*.jsonl"}, "{tmp}/*.jsonl: no such file"),
        ({"path": "x/.."}, "{tmp}: is a folder; give the files of one split, such as {tmp}/*.parq"),
        ({"path": "x.unknown"}, "{tmp}/x.unknown: unknown format '.unknown'; give format: jsonl, "
         "json, csv, parquet, arrow, text or paragraphs"),
    ],
)  # fmt: skip
def test_a_missing_or_unreadable_file_is_named(tmp_path, origin, message):
    (tmp_path / "x.unknown").write_text("x")
    assert one_line(DataError, rows_of, tmp_path, **origin).startswith(message.format(tmp=tmp_path))


def test_an_unreachable_hub_is_one_line_with_what_to_do(tmp_path):
    assert re.fullmatch(
        r"cannot be downloaded \(ConnectionError: .*\); download it where you can \(`hf download "
        r"--repo-type dataset owner/name --local-dir DIR/owner/name`\) and pass --local DIR",
        refused(DataError, rows_of, tmp_path, id="owner/name"),
    )
    with pytest.raises(DataError, match=rf"\); {tmp_path} has no copy of it; download it where"):
        rows_of(tmp_path, tmp_path, id="owner/name", files=["a/*.jsonl"])
    with pytest.raises(DataError, match=r"save https://host/x\.gz in DIR/a/b and pass --local DIR"):
        rows_of(tmp_path, id="a/b", files=["https://host/x.gz"], format="csv")


def test_a_gated_data_set_and_a_missing_one_have_their_own_messages(tmp_path, monkeypatch):
    import datasets

    def refuse(message):
        def load(*args, **kwargs):
            raise datasets.exceptions.DatasetNotFoundError(message)

        monkeypatch.setattr(datasets, "load_dataset", load)

    refuse("Dataset 'a/b' is a gated dataset on the Hub.")
    with pytest.raises(DataError, match="the data set is gated; accept its terms on the Hub"):
        rows_of(tmp_path, id="a/b")
    refuse("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed.")
    with pytest.raises(DataError, match="no such data set on the Hub"):
        rows_of(tmp_path, id="a/b")


def test_a_copy_of_a_loading_script_asks_for_its_files(tmp_path):
    write(tmp_path / "owner/name/sw/x.jsonl")
    (tmp_path / "owner/name/name.py").write_text("raise SystemExit('never run')")
    message = "is a loading script, which the datasets library no longer runs; name its data files"
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path, tmp_path, id="owner/name")
    assert rows_of(tmp_path, tmp_path, id="owner/name", files=["sw/*.jsonl"]) == ROWS


def test_where_keeps_rows_with_one_of_the_values(tmp_path):
    write(tmp_path / "x.jsonl", [{"l": "sw", "n": 1}, {"l": "en", "n": 1}, {"l": "sw", "n": 2}])
    origin = Origin.model_validate({"path": "x.jsonl", "where": {"l": ["sw", "swh"], "n": 1}})
    rows = open_rows(origin, folder=tmp_path).rows
    assert [row for row in rows if where_filter(origin, rows)(row)] == [{"l": "sw", "n": 1}]
    wrong = Origin.model_validate({"path": "x.jsonl", "where": {"lang": "sw"}})
    with pytest.raises(DataError, match="where: no column 'lang'; there are l, n"):
        where_filter(wrong, rows)


def test_the_hub_is_asked_for_what_the_origin_names(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    asked = []

    def load(path, **options):
        asked.append((path, options))
        rows = datasets.Dataset.from_list(ROWS)
        return rows.to_iterable_dataset() if options.get("streaming") else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    files = ["sw/b.jsonl", "sw/a.jsonl", "sw/a_flores.jsonl", "en/a.jsonl"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *a, **k: files)

    def download(*names, **options):
        asked.append((names, options))
        return str(write(tmp_path / names[1]))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    origin = Origin(id="owner/name", config="c", split="test", revision="v1")
    assert open_rows(origin, folder=tmp_path).origin == "owner/name@v1"
    assert len(open_rows(origin, folder=tmp_path, limit=2).rows) == 2
    picked = Origin(id="owner/name", files=["sw/*.jsonl"], without=["*flores*"], revision="v1")
    open_rows(picked, folder=tmp_path)
    options = {"name": "c", "split": "test", "revision": "v1"}
    assert asked == [
        ("owner/name", options),
        ("owner/name", options | {"streaming": True}),
        *((("owner/name", f"sw/{name}.jsonl"), {"repo_type": "dataset", "revision": "v1"})
          for name in "ab"),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"files: owner/name has no file like 'fr/\*'"):
        open_rows(Origin(id="owner/name", files=["fr/*"]), folder=tmp_path)


LATIN = (
    "is not UTF-8 text but another encoding (byte 0xe9); it reads 'café' in CP1252, 'cafй' in "
    "CP1251, 'cafι' in CP1253, 'cafי' in CP1255; choose the right one, and save the file as UTF-8, "
    "such as by `python -c \"from pathlib import Path; Path('NEW').write_text(Path('FILE')."
    "read_text('CP1252'), 'utf-8')\"`"
)


@pytest.mark.parametrize("limit", [None, 5])
def test_a_damaged_file_is_one_line(tmp_path, limit):
    damaged = {
        "latin.jsonl": '{"text": "ok"}\n{"text": "café"}\n'.encode("latin-1"),
        "latin.jsonl.gz": gzip.compress('{"text": "ok"}\n{"text": "café"}\n'.encode("latin-1")),
        "broken.jsonl": b'{"text": "ok"}\n{"text": \n',
        "packed.jsonl.gz": b"not packed",
        "latin.csv": "text\ncafé\n".encode("latin-1"),
        "short.parquet": b"PAR1xxxxPAR1",
        **dict.fromkeys(("empty.jsonl", "empty.csv", "empty.txt"), b""),
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        why = "cannot be read"
        if name.startswith("latin.csv"):
            why = f"{name}, line 2: {LATIN}"
        elif name.startswith("latin"):
            why = f"""{name}, line 2: {LATIN.partition("'")[0]}'xt": "café"}}' in CP1252"""
        elif name.startswith("empty"):
            why = f"{name}: is empty"
        elif name == "broken.jsonl":
            why = "broken.jsonl, line 2: is not JSON"
        assert why in why_refused(tmp_path, path=name, limit=limit)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("content", "names", "why"),
    [
        (POINTER, "a.txt a.csv a.jsonl a.jsonl.gz a.parquet a.arrow", "this is a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<p>404</p>", "a.txt a.tsv a.json", "is a web page (perhaps in place"),
        (b"<!DOCTYPE html>\n<p>404</p>", "a.parquet", "this is a web page"),
        (b"PK\x03\x04\n", "a.csv a.txt", "this is a zip archive or a file of Excel or Word; unp"),
        (b"PK\x03\x04\n", "a.csv.zip", "unknown format '.zip'; unpack the archive"),
        (b"PK\x03\x04\n", "a.xlsx", "unknown format '.xlsx'; save it as CSV or plain text in"),
        # Without a time, so that all workers collect the same cases.
        (
            gzip.compress(b"text\na\n", mtime=0),
            "a.csv",
            "this is compressed by gzip; add .gz to its name",
        ),
        (b"%PDF-1.7\n", "a.txt", "this is a PDF; save its text as plain text in UTF-8"),
        (b"{\\rtf1 a}\n", "a.txt a.csv", "this is rich text (RTF); save it as plain text in UTF-8"),
        (b"PAR1\n", "a.jsonl", "this is a Parquet file; name it *.parquet"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, content, names, why, limit):
    for name in names.split():
        write_bytes(tmp_path, **{name: content})
        assert f"{name}: {why}" in why_refused(tmp_path, path=name, limit=limit)


@pytest.mark.parametrize(
    ("where", "kept"),
    [("[yes, maybe]", "yes maybe"), ("[no, 'maybe']", "no maybe"), ("yes", "yes"),
     ("[01, x]", "01 x"), ("['yes']", "yes"), ("[true]", "yes"), ("['01', off]", "01 no")],
)  # fmt: skip
def test_where_reads_a_text_as_its_own_words_are_read(tmp_path, where, kept):
    labels = ["yes", "no", "maybe", "01", "x", "<<", "1" * 2000]
    write_bytes(tmp_path, a__txt="id ||| label\n" + "".join(f"07 ||| {one}\n" for one in labels))
    text = f"{{path: a.txt, format: csv, delimiter: ' ||| ', where: {{label: {where}}}}}"
    origin = Origin.model_validate(parse_yaml(text, "m.yaml")[0])
    rows = open_rows(origin, folder=tmp_path).rows
    assert {row["id"] for row in rows} == {"07"}
    keep = where_filter(origin, rows)
    assert {row["label"] for row in rows if keep(row)} == {*kept.split()}


def test_a_parquet_file_of_another_name_is_read_by_its_format(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.bin")
    assert rows_of(tmp_path, path="a.bin", format="parquet") == [{"text": "a"}]


def test_tables_as_excel_writes_them(tmp_path):
    write_bytes(tmp_path, a__csv="\ufeffsep=;\r\ntext ; ok\r\na, b;TRUE\r\nc;FALSE\r\n")
    where = {"path": "a.csv", "where": {"ok": True}}
    rows = open_rows(Origin(**where), folder=tmp_path).rows
    assert list(rows) == [{"text": "a, b", "ok": "TRUE"}, {"text": "c", "ok": "FALSE"}]
    assert [row["text"] for row in rows if where_filter(Origin(**where), rows)(row)] == ["a, b"]
    write_bytes(tmp_path, b__csv="text;label\na, b;x\n#NAME?;#N/A\n")
    assert [*rows_of(tmp_path, path="b.csv")[1].values()] == ["", ""]


def write_bytes(tmp_path, **files):
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name.replace("__", ".")).write_bytes(data)


def why_refused(tmp_path, **origin):
    return one_line(DataError, rows_of, tmp_path, **origin).removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": wrong}', "is not JSON (Expecting value: line 1 column 10 (char 9))"),
        ('["text"]', "['text'] is not a JSON object"),
        ('{"text": "\\ud800"}', "has NUL or a lone surrogate (\\ud800-\\udfff)"),
        ('{"text": "a\\u0000"}', "has NUL or a lone surrogate (\\ud800-\\udfff)"),
        ('{"text": "a", "text": "b"}', "key 'text' is given twice"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, why, limit):
    lines = ['{"text": "a", "n": 1}', '{"text": null, "n": 2.5}', "", line, '{"text": "b"}', ""]
    write_bytes(tmp_path, a__jsonl="\n".join(lines))
    assert why_refused(tmp_path, path="a.jsonl", limit=limit) == f"a.jsonl, line 4: {why}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("limit", [None, 20_000])
def test_values_of_json_stay_as_they_are_written(tmp_path, name, limit):
    """A type may change anywhere in a file: types are found from all of it, or stay JSON."""
    rows = [{"text": f"{i}", "day": "2024-01-01", "n": i} for i in range(11_000)]
    rows[10_500] |= {"day": "unknown", "n": 2.5, "late": "x", "meta": {"a": [1, "b"]}}
    rows[10_501] |= {"text": 7, "day": None, "meta": {"c": {}}, "choices": []}
    rows[10_502] |= {"meta": "none", "choices": ["x"], "late": {"b": 2**63 - 1}}
    lines = "[" + ",\n".join(map(json.dumps, rows)) + "]"
    if name != "a.json":
        lines = "\n".join(map(json.dumps, rows))
    data = lines.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    read = rows_of(tmp_path, path=name, limit=limit)
    columns = ("text", "day", "n", "late", "meta", "choices")
    wanted = [{column: row.get(column) for column in columns} for row in rows]
    assert list(map(str, read)) == list(map(str, wanted))  # 1 is not 1.0


def test_integers_beyond_64_bits_are_the_texts_of_their_digits(tmp_path):
    row = {"a": 2**70, "b": {"c": -(2**64), "d": -(2**63)}}
    write(tmp_path / "a.jsonl", [row])
    read = rows_of(tmp_path, path="a.jsonl")
    assert read == [{"a": f"{2**70}", "b": {"c": f"{-(2**64)}", "d": -(2**63)}}]


def test_texts_among_other_values_are_refused_where_they_are_used(tmp_path):
    lines = [{"text": "a", "x": 1}, {"text": None, "x": "b"}, {"text": 5, "x": {}}]
    write(tmp_path / "a.jsonl", lines)

    def check(**keys):
        source = MixSource.model_validate({"path": "a.jsonl", **keys})
        ExampleMaker(source, "a").check(open_rows(source, folder=tmp_path).rows)

    with pytest.raises(DataError, match=r"^row 3: text is a number, but a text in row 1$"):
        check(text="{text}")
    with pytest.raises(DataError, match=r"^row 2: x is a text, but a number in row 1$"):
        check(text="{x}")
    check(text="{{ text }}", template="jinja")
    write(tmp_path / "a.jsonl", [{"text": {"sw": "a"}}])
    with pytest.raises(DataError, match=r"^row 1: text is an object, not a text; write"):
        check(text="{text}")
    check(text="{text[sw]}")
    maker = ExampleMaker(MixSource.model_validate({"path": "a", "text": "{text}"}), "a")
    with pytest.raises(DataError, match=r"^text: text is not a text, but b'a'$"):
        maker.make({"text": b"a"})
    write(tmp_path / "b.jsonl", [{}])
    with pytest.raises(DataError, match=r"^has no columns$"):
        rows_of(tmp_path, path="b.jsonl")


def test_values_of_a_table_are_texts_as_they_are_written(tmp_path):
    rows = [f"0{i},1.50,True" for i in range(11_000)]
    (tmp_path / "a.csv").write_text("\n".join(["n,,n", *rows, "x,y,", ""]))
    read = rows_of(tmp_path, path="a.csv")
    assert read[1] == {"n": "01", "Unnamed: 1": "1.50", "n.1": "True"}
    assert read[-1] == {"n": "x", "Unnamed: 1": "y", "n.1": ""}
    origin = Origin(path="a.csv", where={"n.1": True, "Unnamed: 1": "1.50"})
    keep = where_filter(origin, open_rows(origin, folder=tmp_path).rows)
    assert [keep(read[0]), keep(read[-1])] == [True, False]
    write_bytes(tmp_path, c__csv="x,y\n1,2\n", d__csv="y,x\n3,4\n")
    assert rows_of(tmp_path, path="[cd].csv")[1] == {"x": "4", "y": "3"}
    (tmp_path / "b.csv").write_text("n,other\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv: columns differ from .*a\.csv$"):
        rows_of(tmp_path, path="[ab].csv")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a", "a.csv.gz", "a.json"])
def test_a_table_is_not_read_as_plain_text(tmp_path, name):
    table = "text,label\na,b\n" if "csv" in name else '\n{"text": "a"}\n'
    data = table.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    for form in ("text", "paragraphs"):
        with pytest.raises(DataError, match=r"is (jsonl|csv), not plain text; give format: "):
            rows_of(tmp_path, path=name, format=form)


HEADLINES = (
    "category\theadline\ttext\r\n"
    'sports\tSay ""nothing""\t"First line.\n\nHe said ""go"", and went."\r\n'
    'health\t5" disk\tNA\r\n'
)


@pytest.mark.parametrize("limit", [None, 2])
def test_fields_of_several_lines_follow_the_rules_of_csv(tmp_path, limit):
    content = ("\ufeff" + HEADLINES).encode()
    write_bytes(tmp_path, a__tsv=content, b__tsv__gz=gzip.compress(content),
                c__csv=content.replace(b"\t", b";"))  # fmt: skip
    for path, more in (("a.tsv", {}), ("b.tsv.gz", {}), ("c.csv", {"delimiter": ";"})):
        first, second = rows_of(tmp_path, path=path, limit=limit, **more)
        assert first == {"category": "sports", "headline": 'Say ""nothing""',
                         "text": 'First line.\n\nHe said "go", and went.'}  # fmt: skip
        assert second == {"category": "health", "headline": '5" disk', "text": "NA"}


REMEDY = "; if quotation marks are ordinary characters in this file, write quotes: false"


@pytest.mark.parametrize("limit", [None, 900])
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['1\t"lone\tx', "2\tx", "3\ty"], "line 2: unexpected end of data" + REMEDY),
        (['"lone', *["3\ty"] * 250, '4"\tlast'],
         "line 2: a quoted field has more than 200 lines" + REMEDY),
        (["1\tx", "2\ty\tz"], "line 3: the number of fields is 3, not 2 as in the header"),
        (["1\tx", "", "over two", "2\tlines"],
         "line 4: the number of fields is 1, not 2 as in the header"),
    ],
)  # fmt: skip
def test_a_table_that_would_swallow_or_shift_fields_is_refused(tmp_path, lines, why, limit):
    write_bytes(tmp_path, x__tsv="\n".join(["a\tb", *lines, ""]))
    assert why_refused(tmp_path, path="x.tsv", limit=limit) == f"x.tsv, {why}"


LONE = [
    (["1\tx", '2\t"lone', "3\ty"], '"lone'),
    (["1\tx", '2\t"Go" he said', "3\ty"], '"Go" he said'),
    (["1\tx", '2\t"lone', "3\ty", '4\tlast"'], '"lone'),
    (["1\tx", '2\t"lone', *["3\ty"] * 250, '4\tlast"'], '"lone'),
    (["1,x", '2,"lone', "3,y", '4,last"'], '"lone'),
]


@pytest.mark.parametrize("limit", [None, 900])
@pytest.mark.parametrize(("lines", "text"), LONE)
def test_a_lone_quotation_mark_swallows_no_row(tmp_path, lines, text, limit):
    name, head = ("x.csv", "a,b") if "," in lines[0] else ("x.tsv", "a\tb")
    (tmp_path / name).write_text("\n".join([head, *lines, ""]))
    rows = rows_of(tmp_path, path=name, limit=limit)
    assert [row["a"] for row in rows] == [line[0] for line in lines]
    assert rows[1]["b"] == text


def test_only_line_feeds_end_lines(tmp_path):
    """Or carriage returns, in a file of an old Mac."""
    texts = ["one\u2028two", "three\x85four", "five\x0csix\x1c"]
    write_bytes(tmp_path, a__txt="\n".join(texts), mac__txt="one\rtwo", mac__csv="a,b\r1,2\r",
                a__tsv="\n".join(["a\tb", *(f"{text}\tx" for text in texts)]),
                a__jsonl="\n".join(f'{{"a": "{text}"}}' for text in texts[:2]))  # fmt: skip
    assert [row["text"] for row in rows_of(tmp_path, path="a.txt")] == texts
    assert [row["a"] for row in rows_of(tmp_path, path="a.tsv")] == texts
    assert [row["a"] for row in rows_of(tmp_path, path="a.jsonl")] == texts[:2]
    assert [row["text"] for row in rows_of(tmp_path, path="mac.txt")] == ["one", "two"]
    assert rows_of(tmp_path, path="mac.csv") == [{"a": "1", "b": "2"}]


def test_wide_characters_without_a_mark_are_read_in_their_order(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        write_bytes(
            tmp_path, a__txt="one".encode(encoding), b__txt="กชา\nชา one\n".encode(encoding)
        )
        assert f"it reads 'one' in {encoding.upper()}; " in why_refused(tmp_path, path="a.txt")
        assert f"it reads 'กชา' in {encoding.upper()}; " in why_refused(tmp_path, path="b.txt")
    write_bytes(tmp_path, a__txt=b"\0" * 9)
    message = "a.txt, line 1: is not UTF-8 text but another encoding (byte 0x00), or no text at all"
    assert why_refused(tmp_path, path="a.txt").startswith(message)


@pytest.mark.parametrize("limit", [None, 9])
def test_labels_are_names_in_whatever_order_a_file_numbers_them(tmp_path, limit):
    from datasets import ClassLabel, Dataset, Features, Value

    for name, order in (("a", ["bad", "good"]), ("b", ["good", "bad"])):
        features = Features({"label": ClassLabel(names=order), "text": Value("string")})
        numbers = [order.index("good"), order.index("bad"), -1]
        rows = Dataset.from_dict({"label": numbers, "text": ["x", "y", "z"]}, features=features)
        rows.to_parquet(tmp_path / f"{name}.parquet")
        read = rows_of(tmp_path, path=f"{name}.parquet", limit=limit)
        assert read == [{"label": "good", "text": "x"}, {"label": "bad", "text": "y"},
                        {"label": None, "text": "z"}]  # fmt: skip
    origin = Origin(path="b.parquet", where={"label": ["good"]})
    rows = open_rows(origin, folder=tmp_path).rows
    assert [row["text"] for row in rows if where_filter(origin, rows)(row)] == ["x"]


def test_paragraphs_are_separated_by_blank_lines(tmp_path):
    text = "\ufeffOne,\r\nin two lines.\r\n\r\n\r\n  \t\nÀkọ́kọ́\n\nlast"
    write_bytes(tmp_path, a__txt=text, b__ig__gz=gzip.compress(text.encode()))
    expected = ["One,\nin two lines.", "Àkọ́kọ́", "last"]
    for path in ("a.txt", "b.ig.gz"):
        for limit in (None, 2):
            rows = rows_of(tmp_path, path=path, format="paragraphs", limit=limit)
            assert [row["text"] for row in rows] == expected[:limit]
    write_bytes(tmp_path, a__txt="new")  # the cache of the data sets library is not taken for it
    assert rows_of(tmp_path, path="a.txt", format="paragraphs") == [{"text": "new"}]
    write_bytes(tmp_path, latin__txt="one\n\ncafé".encode("latin-1"), blank__txt="\n \n")
    assert why_refused(tmp_path, path="latin.txt", format="paragraphs") == (
        f"latin.txt, line 3: {LATIN}"
    )
    assert why_refused(tmp_path, path="blank.txt", format="paragraphs") == "blank.txt: is empty"


PARALLEL = {"ig": "news.ig", "en": "news.en", "fr": "news.fr.gz"}


@pytest.mark.parametrize("limit", [None, 2])
def test_parallel_files_are_rows_with_a_column_each(tmp_path, limit):
    # Only line feeds end a line: translations hold stray carriage returns and separators.
    write_bytes(tmp_path, news__ig="\ufeffotu\rA\r\nabụọ\n\natọ\u2028B",
                news__en="one\ntwo\nnothing\nthree\n",
                news__fr__gz=gzip.compress(b"un\ndeux\nrien\ntrois\n"))  # fmt: skip
    expected = [{"ig": "otu\rA", "en": "one", "fr": "un"}, {"ig": "abụọ", "en": "two",
                 "fr": "deux"}, {"ig": "atọ\u2028B", "en": "three", "fr": "trois"}]  # fmt: skip
    assert rows_of(tmp_path, parallel=PARALLEL, limit=limit) == expected[:limit]


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize(
    ("english", "why"),
    [
        (b"one\ntwo\n\n\n", "news.en, line 4: has no partner in {tmp}/news.ig (3 of 4 lines); "
         "parallel files are aligned by line"),
        (b"one\n", "news.ig, line 2: has no partner in {tmp}/news.en (1 of 3 lines); "
         "parallel files are aligned by line"),
        (b"one\ntwo\ncaf\xe9\n", f"news.en, line 3: {LATIN}"),
        ("one\ntwo\nthree".encode("utf-16"), f"news.en, line 1: {LATIN.partition('0xe9')[0]}0xff); "
         f"it reads 'one' in UTF-16; {LATIN.partition('; ')[2].partition('; ')[2]}"
         .replace("CP1252", "UTF-16")),
        (b"", "news.en: is empty"),
        (None, "news.en: no such file"),
    ],
)  # fmt: skip
def test_parallel_files_that_do_not_fit_are_refused(tmp_path, english, why, limit):
    write_bytes(tmp_path, news__ig="otu\nabụọ\natọ")
    if english is not None:
        write_bytes(tmp_path, news__en=english)
    given = {"ig": "news.ig", "en": "news.en"}
    assert why_refused(tmp_path, parallel=given, limit=limit) == why.format(tmp=tmp_path)


ROWS_OF_TWO = [{"text": f"text {i}", "label": "ab"[i]} for i in range(2)]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
WHOLE = "is one object ({}), not a list of rows; save a list of objects, in pandas by `to_json("


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.json", {"version": "1.1", "data": ROWS_OF_TWO}, ROWS_OF_TWO),
        ("a.jsonl", {"data": ROWS_OF_TWO}, [{"data": ROWS_OF_TWO}]),
        ("a.json", {"train": ROWS_OF_TWO, "test": ROWS_OF_TWO}, WHOLE.format("train, test")),
        ("a.json", {"text": {"0": "a", "1": "b"}}, WHOLE.format("text")),
        ("a.json", {"columns": ["text"], "data": [["a"]]}, WHOLE.format("columns, data")),
        ("a.json", ROWS_OF_TWO[0], ROWS_OF_TWO[:1]),
        ("a.jsonl", f"{json.dumps(TURNS)}\n\n{json.dumps(TURNS)}\n", [{"messages": TURNS}] * 2),
        ("a.json", [TURNS, TURNS], [{"messages": TURNS}] * 2),
        ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS_OF_TWO), ROWS_OF_TWO),
    ],
)  # fmt: skip
def test_rows_are_found_in_the_shapes_that_people_have(tmp_path, name, content, wanted, limit):
    for indent in (None, 1) if not isinstance(content, str) and name == "a.json" else (None,):
        text = content if isinstance(content, str) else json.dumps(content, indent=indent)
        (tmp_path / name).write_text(text)
        if isinstance(wanted, str):
            assert why_refused(tmp_path, path=name, limit=limit).startswith(f"a.json: {wanted}")
        else:
            assert rows_of(tmp_path, path=name, limit=limit) == wanted


def test_caches_beside_saved_data_are_no_data(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    shutil.copy(next((tmp_path / "saved").glob("data-*")), tmp_path / "saved/cache-0.arrow")
    assert rows_of(tmp_path, path="saved/*.arrow") == ROWS
    for folder in ("saved", "."):
        why = f"is a folder; give the files of one split, such as {tmp_path}/saved/*.arrow"
        assert why in why_refused(tmp_path, path=folder)
    rows = Dataset.from_list(ROWS)
    DatasetDict(test=rows, train=rows).save_to_disk(tmp_path / "parts")
    assert why_refused(tmp_path, path="parts").endswith(f"such as {tmp_path}/parts/train/*.arrow")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("mvua\njua\n")
    assert why_refused(tmp_path, path="texts").endswith(f"such as {tmp_path}/texts/*.txt")


LETTERS = {
    "cp1251": "Богон матур кон, балалар уйный", "cp1256": "السلام عليكم ورحمة الله",
    "cp1250": "Zażółć gęślą jaźń w mieście", "gb18030": "今天天气很好我们去公园",
    "koi8-r": "сегодня хорошая погода", "tis-620": "วันนี้อากาศดีมาก",
    "cp1252": "le garçon a été à l’école", "iso8859-6": "السلام عليكم",
    "mac-roman": "le garçon a été à l’école", "euc_jis_2004": "今日は天気がいいです𠮟",
    "iso2022_jp": "今日は天気がいいです", "utf-32": "le garçon a été à l’école",
}  # fmt: skip


FIRST_RIGHT = {"koi8-r": "3.5.3", "tis-620": "3.5.3"}
"""Versions of charset-normalizer whose guesses hold these encodings, in nine short lines."""


@pytest.mark.parametrize("encoding", LETTERS)
def test_a_text_is_shown_in_the_encodings_that_it_may_have(tmp_path, encoding):
    if Version(version("charset-normalizer")) < Version(FIRST_RIGHT.get(encoding, "0")):
        pytest.skip("earlier versions guess others")
    start = '{"source": "a plain start of ASCII", "text": '
    lines = "".join(f'{start}"{LETTERS[encoding]} {i}"}}\n' for i in range(9))
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    why = why_refused(tmp_path, path="a.jsonl")
    readings = re.findall(r"'([^']*)' in ([A-Z0-9-]+)", why)
    right = [name for text, name in readings if LETTERS[encoding][:20] in text]
    assert any(lines.encode(encoding).decode(name) == lines for name in right)
    command = re.search("`(.*)`", why)[1].replace("FILE", "a.jsonl")
    subprocess.run(re.sub("^python", sys.executable, command), shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "NEW").read_text("utf-8") == lines.encode(encoding).decode(readings[0][1])
    if encoding in ("mac-roman", "iso8859-6", "cp1251"):  # the command names the right one
        assert (tmp_path / "NEW").read_text("utf-8") == lines


@pytest.mark.parametrize(
    ("encoding", "text"), [("cp1252", "l’é…\n"), ("latin-1", "Éca\n"), ("cp1251", "мир\n")]
)
def test_letters_that_a_wrong_encoding_damaged_are_told(tmp_path, encoding, text):
    damaged = text.encode().decode(encoding)
    (tmp_path / "a.txt").write_text(damaged * 9)
    why = why_refused(tmp_path, path="a.txt")
    assert "a wrong encoding damaged 9 of 9 lines, such as line 1: " in why
    command = re.search("`(.*)`", why)[1].replace("FILE", "a.txt")
    subprocess.run(re.sub("^python", sys.executable, command), shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "NEW").read_text("utf-8") == text * 9
    for some in (damaged, "caf\ufffd\n"):
        (tmp_path / "a.txt").write_text("mvua\n" * 20 + some)
        with pytest.warns(UserWarning, match="damaged 1 of 21 lines, such as line 21: "):
            rows_of(tmp_path, path="a.txt")
