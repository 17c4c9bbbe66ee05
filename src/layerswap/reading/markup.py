"""Formats of linguists and corpora that look like plain text: their names, and ways out of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

_LOOK = 100
"""Lines that are looked at."""


def _xml(path: str, parser: str = "") -> str:
    return ("python -c \"from lxml import etree; print(*etree.parse('FILE'"
            f"{parser}).xpath('{path}'), sep='\\n')\" > NEW")  # fmt: skip


_MARKUP = [
    ("a TMX file", r"<(?s:.{0,999}?)\btmx\b", _xml('//seg[lang(\\"CODE\\")]/text()')),
    ("an ELAN file", r"<(?s:.{0,999}?)ANNOTATION_DOCUMENT\b",
     _xml('//ANNOTATION_VALUE[not(ancestor::TIER[@TIER_ID!=\\"TIER\\"])]/text()')),
    ("a FLEx text", r'<(?s:.{0,3999}?)<item type="', _xml('//phrase/item[@type=\\"txt\\"]/text()')),
    ("a dump of a wiki", r"<mediawiki\b", "layerswap new --text wikimedia/wikipedia:20231101.CODE"),
    ("text of WikiExtractor", r"<doc id=", "grep -vE '^</?doc' FILE > NEW"),
    ("XML", r"(?i:(?!(<[?!].*\n)*<(!doctype )?(html|error)\b))"
     r"(<[?!]|<([\w:.-]+)[^<>]*>(\s*$|.*</\5>))",
     _xml("//text()[normalize-space()]", ", etree.HTMLParser(encoding='utf-8')")),
    ("a TextGrid", 'File type = "ooTextFile"', "sed -nE 's/^ *text = \"(.*)\".*/\\1/p' FILE > NEW"),
    ("USFM", r"\\id \w{3}\b",
     r"perl -0pe 's/\\(f|x) .*?\\\1\*//gs; s/\\(id|h|toc\d|mt\d?|s\d?|r|c) .*//g; s/\\v \S+//g; "
     r"s/\\\+?\w+\*? ?//g' FILE > NEW"),
    ("text with markers of Toolbox", r"\\_?[a-z]+\d*\s", r"sed -n 's/^\\tx //p' FILE > NEW"),
    ("a CHAT transcript", r"@(UTF8|Begin)$", r"grep '^\*' FILE | cut -f2- > NEW"),
    ("subtitles", r"WEBVTT|(.*\n)?[\d:.]+(,\d+)? --> |\d+:[\d:.]+,[\d:.]+$",
     "grep -vE '^WEBVTT|-->|^[0-9:.,]+[[:space:]]*$' FILE > NEW"),
    ("CoNLL-U", r"(#.*\n)*(\S+\t){9}\S+$", "sed -n 's/^# text = //p' FILE > NEW"),
    ("a list of words with tags", r"(\n|(\S+[ \t])+(O|[BIES]-\S+)\n|\S+[ \t][A-Z]+\n)+\Z",
     "awk 'NF {printf \"%s \", $1; next} {print \"\"}' FILE > NEW"),
]  # fmt: skip
"""Name, pattern of the first lines, and a command that takes the texts."""


def _is_identified(start: str) -> bool:
    """True if lines begin with identifiers of one form or with their number, as no sentences do."""
    lines = [line for line in start.splitlines() if line]
    words = [found[0] for line in lines if (found := re.match(r"[^\s|]+(?= +\S)", line))]
    forms = {re.sub(r"\d+", "0", re.sub(r"[^\W\d]+", "a", word)) for word in words}
    counts = [int(number) for word in words for number in re.findall(r"\d+", word)[-1:]]
    if not (len(lines) == len({*words}) == len(counts) > 4 and len(forms) == 1):
        return False
    numbered = counts == [*range(counts[0], counts[0] + len(counts))] and counts[0] < 2
    return numbered or re.search("^a.*0|0.*_|0-0-0", forms.pop()) is not None


def markup_of(lines: Iterable[str]) -> str | None:
    """Name the format of a file with these lines, and a way out; None for plain text."""
    start = "".join(f"{line.strip()[:500]}\n" for line in islice(lines, _LOOK)).lstrip()
    identified = ("text with an identifier in each line", "", "cut -d' ' -f2- FILE > NEW")
    for name, pattern, command in (*_MARKUP, *[identified] * _is_identified(start)):
        if re.match(pattern, start, re.MULTILINE):
            return (f"is {name}, not plain text; take its texts in the language alone, such as by "
                    f"`{command}`")  # fmt: skip
    for mark, cut in {"\t": "cut", "|": "cut -d'|'"}.items():
        rows = [line.split(mark) for line in start.splitlines() if line]
        sizes = [sum(map(len, column)) for column in zip(*rows, strict=False)]
        if len(sizes) > 1:
            return (f"is a table of {len(sizes)} columns, not plain text; give it a header, a tab "
                    "between columns and the name *.tsv, or take its texts alone, such as by "
                    f"`{cut} -f{sizes.index(max(sizes)) + 1} FILE > NEW`")  # fmt: skip
    return None
