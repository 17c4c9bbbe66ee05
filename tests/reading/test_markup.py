"""Files with markup are named, and the command that a message prints takes their texts."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest

from layerswap.ground.errors import DataError
from layerswap.reading.files import check_start, check_text
from layerswap.reading.markup import markup_of

TEXTS = ["mvua kubwa inanyesha leo", "watoto wa mjini wanacheza", "samaki wako mtoni"] * 2


def each(form):
    """One piece of markup for each text."""
    return "".join(form.format(text, i) for i, text in enumerate(TEXTS))


XML = '<?xml version="1.0"?>\n'
UNIT = (
    '<tu><tuv xml:lang="en"><seg>text</seg></tuv>\n<tuv xml:lang="sw-TZ"><seg>{}</seg></tuv></tu>\n'
)
TIER = '<TIER TIER_ID="{}">{}</TIER>\n'
VALUE = "<ALIGNABLE_ANNOTATION>\n<ANNOTATION_VALUE>{}</ANNOTATION_VALUE></ALIGNABLE_ANNOTATION>\n"
PHRASE = (
    '<phrase>\n<item type="txt" lang="swh">{}</item><item type="gls" lang="en">g</item></phrase>\n'
)
WORDS = "".join("".join(f"{word} O\n" for word in text.split()) + "\n" for text in TEXTS)
TREES = "".join(
    f"# sent_id = {i}\n# text = {text}\n"
    + "".join(f"{n}\t{w}\t{w}\tX\t_\t_\t0\troot\t_\t_\n" for n, w in enumerate(text.split()))
    + "\n"
    for i, text in enumerate(TEXTS)
)
GRID, INTERVAL = '  name = "{}"\n', '    xmax = 1\n    text = "{}"\n'
MARKED = {
    "a TMX file": f'{XML}<tmx version="1.4">\n<body>\n{each(UNIT)}</body></tmx>',
    "an ELAN file": f"\ufeff{XML}<ANNOTATION_DOCUMENT>\n{TIER.format('TIER', each(VALUE))}"
    f"{TIER.format('gloss', VALUE.format('x'))}</ANNOTATION_DOCUMENT>",
    "a FLEx text": f"\ufeff{XML}<document>\n{each(PHRASE)}</document>",
    "text between lines of tags": each('<doc id="{1}" url="x" title="y">\n{0}\n\n</doc>\n'),
    "a TextGrid": f'File type = "ooTextFile"\n{GRID.format("TIER")}{each(INTERVAL)}'
    + (GRID + INTERVAL).format("x", "y"),
    "USFM": "\\id GEN Swahili\n\\h Mwanzo\n\\c 1\n\\p\n"
    + re.sub(r"(\d) (\w+)", r'\1 \\w \2|s="H1"\\w*', each("\\v {1} {0} \\f + \\fr 1\\f*\n")),
    "text with markers of Toolbox": "\\_sh v3.0 400 Text\n" + each("\\ref {1}\n\\tx {0}\n\\ft x\n"),
    "a CHAT transcript": "@UTF8\n@Begin\n" + each("*CHI:\t{}\n%mor:\tx\n") + "@End\n",
    "subtitles": each("{1}\r\n00:00:0{1},000 --> 00:00:09,000\r\n{0}\r\n\r\n"),
    "subtitles, WebVTT": "WEBVTT\n\n" + each("00:0{1}.000 --> 00:09.000\n{0}\n\n"),
    "annotated text": TREES,
    "annotated text, WebAnno": "#FORMAT=WebAnno TSV 3.3\n\n"
    + re.sub("# text = ", "#Text=", re.sub("# sent.*\n", "", TREES)),
    "a list of words with tags": WORDS,
    "a list of words with tags, CoNLL-U": re.sub("#.*\n", "", TREES),
    "a list of words with tags, vertical": re.sub(
        "( |(?=\n</))", "\tN\n", each("<s>\n{}\n</s>\n")
    ).replace("N\n\n", "N\n"),
    "'/' inside": each("{}/x\n").replace(" ", "/N "),
    "'|' inside": re.sub(r"(\S+)", r"\1|\1|N", each("{}\n")),
    "a web page (perhaps in place of a download)": f"<!DOCTYPE html>\n<html>{each('<p>{}</p>')}",
    "an identifier in each line": each("spk1-utt{1} {0}\n"),
    "subtitles, SBV": each("0:00:0{1}.599,0:00:09.160\n{0}\n\n"),
    "text between tags": each("<s> {} </s>\n"),
    "a table of 3 columns": each("{1}\tswh\t{0}\n"),
    "a table of 3 columns, LJSpeech": each("LJ00{1}|{0}|x\n"),
}


def test_a_number_or_a_name_with_one_begins_a_sentence(tmp_path):
    for words in (["1990", "12", "5km", "2nd", "3-5"], ["COVID-19", "G7", "H1N1", "B2B", "4x4"]):
        (tmp_path / "FILE").write_text("".join(f"{word} in a sentence\n" for word in words))
        check_text(str(tmp_path / "FILE"))
    assert "an identifier" in str(markup_of(f"{i} a sentence\n" for i in range(1, 300)))
    assert markup_of(f"{i} in the beginning\n" for i in range(1, 30)) is None


@pytest.mark.parametrize("name", MARKED)
def test_the_printed_command_takes_the_texts_of_a_file_with_markup(tmp_path, name):
    (tmp_path / "FILE").write_bytes(MARKED[name].encode())
    with pytest.raises(DataError) as caught:
        check_text(str(tmp_path / "FILE"))
    kind = name.partition(", ")[0]
    words = "inside" in kind or "identifier" in kind
    found = f"{kind}, such as " if words else f"FILE: is {kind}, not plain text; "
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    command = re.findall("`(.*?)`", str(caught.value))[-1].replace("CODE", "sw")
    command = re.sub("^python ", f"{sys.executable} ", command)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    taken = (line.strip() for line in (tmp_path / "NEW").read_text("utf-8").splitlines())
    assert list(filter(None, taken)) == TEXTS
    check_text(str(tmp_path / "NEW"))


@pytest.mark.parametrize(
    ("line", "sign"),
    [("[00:0{1}.50]{0}\n", "[0"), ('msgid "x"\nmsgstr "{0}"\n', "'msgid '"),
     ("{0}\t<b>x</b>\n", "</b>"), ("\\gll {0}\\\\\n", "gll"), ("a.b{1}={0}\n", "a.b0="),
     ("Dialogue: 0,0:00:01.50,0:00:02.10,Default,,{0}\n", "Dialogue: "), ("ku@@ bwa {0}\n", "@@"),
     ("12/03/2024, 10:1{1} - Juma: {0}\n", "12/03/2024"), ("0:1{1}\n{0}\n", "'0:10'"),
     ("&quot;{0}&quot;\n", "&quot;"), ('"{1}","{0}"\n', '","'),
     ("1 Wafalme 2:1{1} {0}\n", "1 Wafalme 2:10"), ("(S (N {0}))\n", "(S (")],
)  # fmt: skip
def test_signs_that_most_lines_have_are_shown(tmp_path, line, sign):
    (tmp_path / "FILE").write_text(each(line))
    with pytest.raises(
        DataError, match=r"FILE: is not plain text: .* lines have signs such as"
    ) as caught:
        check_text(str(tmp_path / "FILE"))
    assert sign in str(caught.value)
    assert markup_of([*TEXTS, line.format(TEXTS[0], 0)]) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("markdown", "# Sura\n\n{0}, [kiungo](http://x)\n\n- **{0}**\n"),
     ("rst", "Sura\n====\n\n{0} `kiungo <x>`_\n\n.. note:: {0}\n"),
     ("mediawiki", "== Sura ==\n{0} [[kiungo|x]]\n* {0}\n"),
     ("org", "* Sura\n{0} [[x][kiungo]]\n")],
)  # fmt: skip
def test_light_markup_is_named_with_a_reader(name, text):
    why = f"is text in {name} markup, not plain text; "
    assert str(markup_of(each(text).split("\n"))).startswith(why)
    assert f"`pandoc -f {name} -t plain" in str(markup_of(each(text).split("\n")))
    assert markup_of([*TEXTS, *text.format("mvua").split("\n")]) is None


@pytest.mark.parametrize("mark", [",", ";"])
def test_a_table_under_another_name_is_no_plain_text(tmp_path, mark):
    lines = [f'{i}{mark}"{text}"{mark}bbc' for i, text in enumerate(TEXTS)]
    (tmp_path / "FILE").write_text("\n".join([mark.join(("id", "text", "source")), *lines]))
    with pytest.raises(DataError, match="columns id, text, source, not plain text; give it the"):
        check_text(str(tmp_path / "FILE"))


def test_western_letters_are_read_in_the_encoding_of_windows(tmp_path):
    text = "Ógwú maka ndí ahú dí ugwú úzú añú mmadú\n" * 40
    (tmp_path / "FILE").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"'Ógwú maka [^']*' in CP1252"):
        check_text(str(tmp_path / "FILE"))


def test_a_long_line_of_markup_in_a_table_is_named(tmp_path):
    (tmp_path / "a.csv").write_text(f"<corpus><s>{'mvua kubwa, ' * 9000}</s></corpus>")
    with pytest.raises(DataError, match="is XML, not plain text"):
        check_start(tmp_path / "a.csv", binary=False)


@pytest.mark.parametrize("start", ["<xliff>\n<source>x</source>", '<tt xml:lang="sw"><body>', XML])
def test_xml_without_known_texts_has_no_command(tmp_path, start):
    (tmp_path / "FILE").write_text(start + each("<t>{}</t><x>y</x>\n"))
    with pytest.raises(
        DataError, match=r"FILE: is XML, not plain text; take its texts in the language alone$"
    ):
        check_text(str(tmp_path / "FILE"))


@pytest.mark.parametrize(
    "text",
    ["Juma: mvua\nAsha: jua\n" * 5, "@mtu habari #leo https://t.co/a_b/c?d=e&f=g\n" * 9,
     "1 Hapo\n2 Nchi\n1 Na\n" * 5, "||Nāti ta |nî !gû\n|Gôan #nî |khati\n" * 5,
     '-Yö =dhɛ "kë =a -bha\n' * 9, "1. mvua\n2. jua\n3. a\n4. b\n5. c\n", "Q: a?\nA: b\n" * 5,
     "Maria utuombee\nPetro utuombee\n\n" * 5, "“CAFÉ”… À PARIS\n" * 9, "Рік\nЇї…\n" * 9,
     "<3 sana\n", "<mtu> habari ya leo\n<mtu> nzuri\n", "WATU WOTE\nWANA HAKI SAWA\n",
     "1. mvua\nmaji\tbaridi\n", "\tmvua\n\tkubwa\n", "2019 mvua\n" * 3 + "mwaka 2020\n",
     "- Habari? --> Nzuri.\n", "# kichwa\n\nmaneno `x`\n", "@mtu habari\n"],
)  # fmt: skip
def test_plain_text_with_marks_is_plain_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_text(str(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    "page",
    ["<!DOCTYPE html>\n<p>404</p>", f"{XML}<html/>", f"{XML}<Error><Code>NoSuchKey</Code></Error>"],
)
def test_a_page_may_stand_in_place_of_a_download(tmp_path, page):
    (tmp_path / "a.txt").write_text(page)
    with pytest.raises(DataError, match=r"is a web page \(perhaps in place of a download\), not"):
        check_text(str(tmp_path / "a.txt"))
