"""Letters as a reader sees them: one form of each, and scripts without spaces between words."""

from __future__ import annotations

import re
import unicodedata

import regex

INVISIBLE = "\u034f\u0640\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0"
"""Characters that a reader does not see, beside those of category Cf; and tatweel, which spaces."""
_APOSTROPHE = re.compile(
    r"(MODIFIER .*(APOSTROPHE|COMMA|PRIME|VERTICAL LINE|HALF RING|GLOTTAL STOP)|LATIN .*SALTILLO|"
    r"(\S+ )?APOSTROPHE|.*SINGLE .*QUOTATION MARK|PRIME|(GRAVE|ACUTE) ACCENT)$"
)
"""Unicode names of the characters that people write for one apostrophe or glottal stop."""
UNSPACED = regex.compile(r"(?V1)[\p{LB=SA}\p{LB=ID}\p{LB=CJ}\p{LB=AK}\p{LB=AS}&&[\p{L}\p{M}]]")
"""Letters whose lines break within a run of letters (UAX 14), as Thai, Shan, Han and Javanese."""


class _Visible(dict[int, int | None]):
    """Drops invisible characters and unites apostrophes; grows as characters are met."""

    def __missing__(self, code: int) -> int | None:
        letter = chr(code)
        if unicodedata.category(letter) == "Cf" or re.match(f"[{INVISIBLE}]", letter):
            self[code] = None
        elif _APOSTROPHE.match(unicodedata.name(letter, "")):
            self[code] = ord("'")
        else:
            self[code] = code
        return self[code]


_VISIBLE = _Visible()


def folded(text: str) -> str:
    """Fold a text so that texts which look alike are equal: NFKC, one apostrophe, no case.

    Marks that no reader sees are left out.
    """
    visible = unicodedata.normalize("NFKC", text.translate(_VISIBLE)).casefold()
    return unicodedata.normalize("NFKC", visible)


def is_unspaced(text: str) -> bool:
    """True if most letters of a text belong to a script without spaces between words."""
    letters = sum(1 for character in text if character.isalpha())
    return letters > 0 and 2 * len(UNSPACED.findall(text)) > letters
