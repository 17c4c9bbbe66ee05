"""Maps any code or name of a language to the code that a benchmark has."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from layerswap.errors import EvaluationError


def same_language(one: str, other: str) -> bool:
    """True if two codes or names mean one language; unknown ones are compared as text."""
    try:
        return standard_tag(one) == standard_tag(other)
    except EvaluationError:
        return one == other


@cache
def standard_tag(language: str) -> str:
    """The BCP 47 tag of a language by any of its codes, or by its English name.

    Members of a macrolanguage that stand for it are joined with it (`swh` is `sw`), and a script
    that goes without saying is left out.

    Args:
        language: ISO 639-1 or 639-3, BCP 47, FLORES-200's `xxx_Script`, or a name.

    Raises:
        EvaluationError: no such language, or langcodes is not installed.

    Example: `standard_tag("swh_Latn")`, `standard_tag("Swahili")` and `standard_tag("sw")` are
    all `"sw"`.
    """
    try:
        import langcodes
    except ImportError:
        raise EvaluationError('a language needs langcodes: pip install "layerswap[eval]"') from None
    code = language.strip().replace("_", "-")
    try:
        if langcodes.tag_is_valid(code):
            return str(langcodes.standardize_tag(code, macro=True))
        return str(langcodes.find(language.strip()).to_tag())
    except (LookupError, ValueError):
        raise EvaluationError(
            f"no language {language!r}; write a code such as sw, swh or swh_Latn, or a name"
        ) from None


def language_name(language: str) -> str:
    """The English name of a language.

    Example: `language_name("te")` is `"Telugu"`.
    """
    import langcodes

    return str(langcodes.Language.get(standard_tag(language)).language_name())


def match(language: str, supported: Iterable[str]) -> str | None:
    """The code, among those that a benchmark has, that means a language; None where it has none.

    Of several scripts the language's usual one is taken, unless another is asked for.

    Example: `match("zh", ["zho_Hans", "zho_Hant"])` is `"zho_Hans"`.
    """
    wanted, script = _parts(standard_tag(language))
    asked = "-" in standard_tag(language)
    same = [
        code for code in supported if _is_code(code) and _parts(standard_tag(code))[0] == wanted
    ]
    exact = [code for code in same if _parts(standard_tag(code))[1] == script]
    if exact:
        return exact[0]
    return same[0] if len(same) == 1 and not asked else None


@cache
def _is_code(code: str) -> bool:
    try:
        standard_tag(code)
    except EvaluationError:
        return False
    return True


@cache
def _parts(tag: str) -> tuple[str, str]:
    import langcodes

    whole = langcodes.Language.get(tag).maximize()
    return str(whole.language), str(whole.script)
