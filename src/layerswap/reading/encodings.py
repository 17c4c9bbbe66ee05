"""Encodings of text files: guesses the encoding, and finds letters that a wrong one damaged."""

from __future__ import annotations

import codecs
import encodings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pkgutil import iter_modules

_SHOWN = 4
"""Most readings of a text in a message."""
_PATHS = "python -c \"from pathlib import Path; Path('NEW')."


def to_utf8(sample: bytes, byte: int, start: bytes) -> str:
    """Show a text in its likely encodings, with a command that converts it to UTF-8.

    `byte` is the first invalid byte of `sample`, and `start` the start of the file.
    """
    texts = _wide(start) if b"\0" in sample else _readings(sample)
    lines = max(
        zip(*(text.split("\n") for text in texts), strict=False),
        key=lambda lines: (len({*lines}), len({*lines[0]} - {*map(chr, range(128))})),
        default=(),
    )
    if not any(lines):
        return f"another encoding (byte 0x{byte:02x}), or no text at all; save the file as UTF-8"
    readings: dict[str, str] = {}
    for part, name in zip(_parts(*lines), texts.values(), strict=True):
        readings.setdefault(part, name)
    shown = ", ".join(f"{part!r} in {name}" for part, name in readings.items())
    command = f"write_text(Path('FILE').read_text('{next(iter(texts.values()))}'), 'utf-8')"
    return (f"another encoding (byte 0x{byte:02x}); it reads {shown}; choose the right one, and "
            f"save the file as UTF-8, such as by `{_PATHS}{command}\"`")  # fmt: skip


def _wide(start: bytes) -> dict[str, str]:
    """Decode the start of a file in UTF-16 or UTF-32; return the text with its encoding."""
    names = ("UTF-32-LE", "UTF-32-BE", "UTF-16-LE", "UTF-16-BE")
    texts: dict[str, str] = {}
    for name in names:
        with suppress(UnicodeDecodeError):
            size = int(name[4:6]) // 8
            text = start[: len(start) // size * size].decode(name)
            marked = text.startswith("\ufeff")
            texts[text.lstrip("\ufeff")] = name.rpartition("-")[0] if marked else name
    # A wrong order of bytes spreads the letters over all of Unicode.
    usual = sorted(texts, key=lambda text: len({ord(letter) >> 8 for letter in text}))
    return {text: texts[text] for text in usual[:1] if "\0" not in text}


def _readings(sample: bytes) -> dict[str, str]:
    """Decode a sample in its likely encodings, the likeliest first; return texts with encodings."""
    from charset_normalizer import from_bytes

    names = sorted({module.name for module in iter_modules(encodings.__path__)} - {"hp_roman8"})
    sample = sample[: sample.rfind(b"\n") + 1] or sample
    # Isolated, as an encoding that does not fit makes the library skip all that are like it.
    matches = [match for name in names for match in from_bytes(sample, cp_isolation=[name])]
    # Old Macs' encodings explain anything. Ties go to Windows, first to that of western Europe.
    matches.sort(key=lambda match: (
        match.encoding.startswith("mac_") and match.encoding != "mac_roman",
        round(match.chaos, 3), -round(match.coherence, 2), not match.encoding.startswith("cp125"),
        match.encoding not in ("cp1252", "mac_roman")))  # fmt: skip
    texts: dict[str, str] = {}
    for match in matches:
        texts.setdefault(str(match), match.encoding.upper().replace("_", "-"))
    shown = dict(islice(texts.items(), _SHOWN))
    if 2 * sum(byte < 128 for byte in sample) > len(sample):  # Latin letters, however rare
        with suppress(UnicodeDecodeError):
            shown.setdefault(sample.decode("cp1252"), "CP1252")
    return shown


def _parts(*lines: str) -> list[str]:
    """Cut readings of a line to the part around the first letter that differs, or is not ASCII."""
    unlike = (i for i, letters in enumerate(zip(*lines, strict=False))
              if len({*letters}) > 1 or (len(lines) == 1 and not letters[0].isascii()))  # fmt: skip
    begin = max(0, next(unlike, 0) - 9)
    return [line[begin:].strip()[:40] for line in lines]


def _c1(error: UnicodeError) -> tuple[bytes, int]:
    """Encode a C1 control as its code point, as browsers do for bytes without a cp1252 letter."""
    assert isinstance(error, UnicodeEncodeError), "registered for encoding"
    return bytes(map(ord, error.object[error.start : error.end])), error.end


codecs.register_error("c1", _c1)


def _restored(line: str, name: str, errors: str) -> str | None:
    """Restore a line of UTF-8 that was read in the encoding `name`; None for another line."""
    with suppress(ValueError):
        return line.encode(name, errors).decode()
    return None


def damage_of(lines: Iterable[str]) -> tuple[str, float] | None:
    """Describe the lines that a wrong encoding damaged, and return their share of all lines.

    A damaged line is UTF-8 that was read in another encoding and saved again, or has marks of lost
    letters (U+FFFD). Returns None without damaged lines.
    """
    whole, total, count, first = ["cp1252", "latin-1", "cp1251"], 0, 0, ""
    for total, line in enumerate(lines, start=1):
        if line.isascii():
            continue
        whole = [name for name in whole if _restored(line, name, "strict")]
        right = _restored(line, "cp1252", "c1") or _restored(line, "cp1251", "strict")
        if right or "\ufffd" in line:
            count += 1
            parts = _parts(line, right or line.replace("\ufffd", ""))[: 2 if right else 1]
            first = first or f"line {total}: {' in place of '.join(map(repr, parts))}"
    if not count:
        return None
    remedy = "save the source as UTF-8 again"
    if whole:
        restored = f"write_bytes(Path('FILE').read_text('utf-8').encode('{whole[0]}'))"
        remedy = f'restore the file by `{_PATHS}{restored}"`'
    what = f"a wrong encoding damaged {count:,} of {total:,} lines, such as {first}; {remedy}"
    return what, count / total
