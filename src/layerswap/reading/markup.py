"""Files that look like plain text and hold something else: known formats, columns, and markup."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import regex

from layerswap.ground.yaml_file import parse_yaml, read_text

_LOOK = 1000
"""Most lines of a file that are examined."""
_SHARE = 0.45
"""Share of lines with signs from which a file is markup; numbered headings reach 0.38."""
_GLUED = 0.6
"""Share of words with an inner sign such as `/` from which a text has tags."""
_COLUMNS = 0.9
"""Smallest share of lines with the usual number of columns in a table."""
_SPACED = 5
"""Most columns between spaces; longer rows are sentences with equally many words."""
_FILE = Path(__file__).with_name("formats.yaml")
_FORMATS: list[dict[str, str]] = parse_yaml(read_text(_FILE), str(_FILE))[0]
_MARK = regex.compile(
    r"</[\w:.-]+>|<[\w:.-]+(?:\s+[\w:.-]+=[^<>]*)?/>|<[\w:.-]+\s+[\w:.-]+=[^<>]*>"  # tags
    r"|\\\p{L}+|\w=[\"']|&(?:#\d+|\w+);|@@|[\[\]{}]{2}|\u2581|\(\S+ \(|\)\)"
    r"|^[\w.\[\]-]+ (?=\".*\"$)|^\w[\w.-]*(?:=| = )|\"[,;]\"|^\"[^\"]*\" ?[=:] ?(?=[\"\d[{])"
    r"|^\W*(?:\w+\W+){0,2}?\d+(?:[:./-]\d+){2,}|^\P{L}*\d\P{L}*$"  # times and dates, numbers alone
    r"|^(?:\w+ ){0,4}?\d+:\d+\s"  # verses
)
"""Matches signs that are rare in plain text: tags, commands, keys, times, numbers alone."""
_WORD = regex.compile(r"[\p{L}\p{M}'’-]+")
_NAME = regex.compile(r"\w[\w.-]*")
_TAG = regex.compile(r"[A-Z\d$.,:()'`_-]+(-\w+)?")


def markup_of(lines: Iterable[str]) -> str | None:
    """Describe the format, the columns or the markup of a file with these lines.

    Returns None for plain text: sentences, verses, dialogues, lists, in any script.
    """
    look = [line.strip()[:500] for line in islice(lines, _LOOK)]
    full = [line for line in look if line]
    checks = (_named, _identified, _marked, _tagged, _columns)
    return _vertical(look) or next((why for check in checks if (why := check(full))), None)


def _take(command: str) -> str:
    return "take its texts in the language alone" + f", such as by `{command}`" * bool(command)


def _named(lines: Sequence[str]) -> str | None:
    """Name a known format, with a command that takes its texts if there is one."""
    start = "".join(f"{line}\n" for line in lines)
    for known in _FORMATS:
        if regex.match(known["start"], start, regex.MULTILINE):
            return f"is {known['name']}, not plain text; {_take(known['take'])}"
    return None


def _vertical(lines: Sequence[str]) -> str | None:
    """Describe a text with one word on a line, its tags beside it, and breaks between sentences."""
    broken = regex.compile(r"(<.*>|# .*|-DOCSTART-.*)?")
    mark = "\t" if any("\t" in line for line in lines) else None
    rows = [line.split(mark) for line in lines if not broken.fullmatch(line)]
    usual = Counter(map(len, rows)).most_common(1)
    whole = any(line.startswith("# text = ") for line in lines)  # sentences of CoNLL-U
    if whole or len(rows) in (0, len(lines)) or usual[0][1] < _COLUMNS * len(rows):
        return None
    if not 2 <= usual[0][0] <= (_SPACED if mark is None else usual[0][0]):
        return None
    columns = [*zip(*(row for row in rows if len(row) == usual[0][0]), strict=True)]
    if any(" " in cell for column in columns for cell in column[:9]):
        return None
    kinds = [len({*filter(_WORD.fullmatch, column)}) for column in columns]
    if 2 * min(kinds) >= max(kinds):  # tags are few, and words many
        return None
    if mark is None and not any(all(map(_TAG.fullmatch, column)) for column in columns):
        return None
    field = "-F'\\t' " * (mark is not None)
    return "is a list of words with tags, not plain text; " + _take(
        f'awk {field}\'/^(<.*>|# .*|-DOCSTART.*)?$/ {{print ""; next}} '
        f'{{printf "%s ", ${kinds.index(max(kinds)) + 1}}}\' FILE > NEW'
    )


def _marked(lines: Sequence[str]) -> str | None:
    """Describe the signs of markup on many lines, with an example."""
    found = [(mark[0], line) for line in lines if (mark := _MARK.search(line))]
    if len(found) < _SHARE * len(lines):
        return None
    forms = Counter(regex.sub(r"\d+", "0", mark) for mark, _ in found)
    usual = forms.most_common(1)[0][0]
    mark, line = next(pair for pair in found if regex.sub(r"\d+", "0", pair[0]) == usual)
    return (f"is not plain text: {len(found):,} of {len(lines):,} lines have signs such as "
            f"{mark!r}, as in {line[:70]!r}; {_take('')}, or give them in a column `text` "
            "of a *.tsv if the signs belong to them")  # fmt: skip


def _tagged(lines: Sequence[str]) -> str | None:
    """Describe words with tags behind a sign, as in `word/NN` or `word|lemma|NN`."""
    words = [word for line in lines for word in line.split()]
    for sign in "/|_#+=~":
        signed = [word for word in words if sign in word.strip(sign)]
        if len(signed) < _GLUED * len(words) or len(words) < 2 * len(lines):
            continue
        heads, tails = ({word.rpartition(sign)[i] for word in signed} for i in (0, 2))
        count = Counter(word.count(sign) for word in signed).most_common(1)[0][0]
        tag = f"[{sign}][^{sign} ]+" * count
        cut = f"sed -E 's,{tag}( |$),\\1,g' FILE > NEW"
        return (f"is not plain text: {len(signed):,} of {len(words):,} words have {sign!r} inside, "
                f"such as {signed[0]!r}; {_take(cut * (2 * len(tails) < len(heads)))}")  # fmt: skip
    return None


def _columns(lines: Sequence[str]) -> str | None:
    """Describe the columns of a table."""
    for mark in ",;":
        head, *cells = csv.reader((" ".join(line.split()) for line in lines), delimiter=mark)
        named = len(head) > 1 and all(map(_NAME.fullmatch, head))
        if named and sum(len(row) == len(head) for row in cells) >= max(1, _COLUMNS * len(cells)):
            return (f"is a table with the columns {', '.join(head)}, not plain text; give it the "
                    "name *.csv")  # fmt: skip
    for mark, cut in {"\t": "cut -s", "|": "cut -s -d'|'"}.items():
        rows = [line.split(mark) for line in lines]
        usual, count = Counter(map(len, rows)).most_common(1)[0]
        tabs = sum(len(row) > 1 for row in rows) if mark == "\t" else count * (usual > 1)
        if tabs < _COLUMNS * len(lines):
            continue
        rows = [row for row in rows if len(row) == max(usual, 2)]
        sizes = [sum(map(len, column)) for column in zip(*rows, strict=True)]
        texts = [f"`{cut} -f{place} FILE > NEW` (such as {rows[-1][place - 1][:40]!r})"
                 for place, size in enumerate(sizes, start=1) if 3 * size > max(sizes)]  # fmt: skip
        return (f"is a table of {len(sizes)} columns, not plain text; give it a header, a tab "
                "between columns and the name *.tsv, or take its texts in the language alone, by "
                f"{' or '.join(texts)}")  # fmt: skip
    return None


def _identified(lines: Sequence[str]) -> str | None:
    """Describe the identifiers or line numbers that begin all lines."""
    words = [found[0] for line in lines if (found := regex.match(r"[^\s|]+(?= +\S)", line))]
    forms = {regex.sub(r"\d+", "0", regex.sub(r"[^\W\d]+", "a", word)) for word in words}
    counts = [int(number) for word in words for number in regex.findall(r"\d+", word)[-1:]]
    if not (len(lines) == len({*words}) == len(counts) > 4 and len(forms) == 1):
        return None
    # The longest chapter with numbered verses, Psalm 119, has 176.
    numbered = len(counts) > 176 and counts == [*range(counts[0], counts[0] + len(counts))]
    if not regex.search(r"^a.*0$|0.*_.*\w$|0-0-0$" + "|^0$" * numbered, forms.pop()):
        return None
    return (f"has an identifier in each line, such as {words[0]!r}, so it is not plain text; "
            + _take("cut -d' ' -f2- FILE > NEW"))  # fmt: skip
