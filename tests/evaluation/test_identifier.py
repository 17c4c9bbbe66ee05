"""A learned identifier: told apart by held-out lines, refused where it is a guess."""

import random
import warnings

import pytest
import yaml

from layerswap.evaluation.identifier import Identifier, learn_identifier
from layerswap.evaluation.languages import ANSWER, language_shares
from layerswap.ground.errors import DataError
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.card import data_card
from layerswap.training.mix.filters import check_language
from layerswap.training.mix.schema import parse_mix

SYLLABLES = {
    "wo": "ba ak nit ñu xam naa dem bu ci ndax waaw yow moom jël ëpp",
    "fr": "le la des est que dans pour avec nous tout mais cette bien fait",
    "wol": "ba ak nit ñu xam naa dem bu ci ndax waaw yow moom jël ëpp",
}


def lines(language, count, rng):
    words = SYLLABLES[language].split()
    return [" ".join(rng.choices(words, k=12)) + "." for _ in range(count)]


@pytest.fixture
def files(tmp_path):
    rng = random.Random(0)
    texts = {one: lines(one, 120, rng) for one in SYLLABLES}
    texts["short"] = texts["wo"][:20]
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(text), "utf-8")
    return tmp_path


def test_languages_are_told_apart_and_errors_are_of_held_out_lines(files):
    made = learn_identifier({one: files / f"{one}.txt" for one in ("wo", "fr")})
    assert made.held_out == {"wo": 24, "fr": 24}
    assert made.error("wo") == made.error("fr") == 0
    assert made.describe("wo") == ("wo: 0.0% of 24 held-out lines are taken for another language")
    rng = random.Random(1)
    found = made.probabilities(lines("wo", 20, rng))
    assert (found[:, list(made.languages).index("wo")] > 0.9).all()
    speaks = made.speaks("wo")
    for language, share in (("wo", 1), ("fr", 0)):
        assert language_shares(" ".join(lines(language, 3, rng)), speaks) == {ANSWER: share}
    half = language_shares("\n".join([*lines("wo", 20, rng), *lines("fr", 20, rng)]), speaks)
    assert 0.3 < half[ANSWER] < 0.7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("wo", "wol"), r"wo.?\.txt: wo.*held-out lines are taken for another language \("),
        (("wo", "short"), "20 different lines of 20 letters or more; .* needs at least 50"),
        (("wo",), "needs texts in at least two languages"),
        (("wo", "none"), "none.txt: cannot be read"),
    ],
)
def test_a_guess_is_refused(files, given, said):
    with pytest.raises(DataError, match=said):
        learn_identifier({one: files / f"{one}.txt" for one in given})


def mix(files, language="wo"):
    rows = (files / "wo.txt").read_text("utf-8").splitlines()[:60]
    rows += (files / "fr.txt").read_text("utf-8").splitlines()[:40]
    (files / "rows.txt").write_text("\n".join(rows), "utf-8")
    made = {
        "name": "wolof", "kind": "text", "total": "all",
        "sources": {"web": {"path": "rows.txt", "format": "text", "text": "{text}",
                            "language": language}},
        "filters": {"language": {"texts": {"wo": "wo.txt", "fr": "fr.txt"}}},
    }  # fmt: skip
    return parse_mix(yaml.safe_dump(made))


def test_a_mix_is_filtered_by_what_it_learns_and_its_card_has_the_error(files):
    built = build_mix(mix(files), folder=files)
    assert len(built.train) == 60
    assert built.filters.counts["language"]["web"] == 40
    assert any(line.startswith("wo: 0.0% of 24 held-out lines")
               for line in data_card(built)["identifier"])  # fmt: skip


def test_a_filter_that_drops_its_own_language_says_so_first(files):
    confused = {"wo": {"wo": 0.85, "fr": 0.15}, "fr": {"fr": 1.0}}
    made = Identifier(["fr", "wo"], {"wo": 40, "fr": 40}, confused, None)
    with pytest.warns(match=r"drops .* own language. wo: 15.0% of 40 .* \(15% for fr\)"):
        check_language("wo", made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_language("fr", made)
    with pytest.raises(DataError, match="learns fr, wo and not 'sw'; add its text to `texts`"):
        build_mix(mix(files, "sw"), folder=files)
