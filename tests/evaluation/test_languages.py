"""Codes of languages: whatever a person writes means what a benchmark calls it."""

import pytest

from layerswap.evaluation.languages import identified_code, language_name, match, standard_tag
from layerswap.ground.errors import EvaluationError
from layerswap.ground.system import check_names

FLORES = ["swh_Latn", "ben_Beng", "tel_Telu", "jpn_Jpan", "zho_Hans", "zho_Hant", "arb_Arab",
          "ary_Arab", "npi_Deva", "ory_Orya", "uzn_Latn", "srp_Cyrl", "nob_Latn"]  # fmt: skip


@pytest.mark.parametrize("code", ["sw", "swh", "swh_Latn", "Swahili", "swahili", "swa", "sw-Latn"])
def test_every_way_to_write_swahili_means_it(code):
    assert standard_tag(code).split("-")[0] == "sw"
    assert match(code, FLORES) == "swh_Latn"
    assert match(code, ["bn", "sw"]) == "sw"
    assert language_name(code) == "Swahili"


@pytest.mark.parametrize(
    ("code", "found"),
    [("zh", "zho_Hans"), ("zh-Hant", "zho_Hant"), ("ar", "arb_Arab"), ("ary", "ary_Arab"),
     ("ne", "npi_Deva"), ("or", "ory_Orya"), ("uz", "uzn_Latn"), ("sr", "srp_Cyrl"),
     ("Japanese", "jpn_Jpan"), ("bn", "ben_Beng"), ("la", None), ("sr-Latn", None)],
)  # fmt: skip
def test_macrolanguages_and_scripts(code, found):
    assert match(code, FLORES) == found


@pytest.mark.parametrize(
    ("written", "code"),
    [("hau_Latn", "ha"), ("ibo_Latn", "ig"), ("zh-Hans", "zh"), ("zh-Hant", "zh-Hant"),
     ("srp_Cyrl", "sr"), ("sr-Latn", "sr-Latn"), ("hi-Latn", "hi-Latn"), ("ig-NG", "ig-NG"),
     ("Darija", "ary"), ("Pidgin English", "pcm"), ("Egyptian", "arz")],
)  # fmt: skip
def test_usual_scripts_are_left_out_and_names_mean_what_people_speak(written, code):
    assert standard_tag(written) == code


def test_a_script_that_is_named_is_no_other_one():
    assert match("zh-Hans", ["zho_Hant"]) is None
    assert match("zh", ["zho_Hant"]) == "zho_Hant"


@pytest.mark.parametrize("name", ["con", "aux_Latn", "Prasuni", "nul-001"])
def test_a_tag_is_a_name_of_a_file_on_every_system(name):
    tag = standard_tag(name)
    check_names([tag, f"{tag}.test.jsonl"])
    assert standard_tag(tag) == tag
    assert match(name, [tag[:3]]) == tag[:3]


@pytest.mark.parametrize("code", ["xyzzy", "", "  "])
def test_unknown_languages_are_one_line(code):
    with pytest.raises(EvaluationError, match="no language"):
        standard_tag(code)


@pytest.mark.parametrize(
    ("language", "code", "identified"),
    [("ps", "pbt_Arab", "ps"), ("Pashto", "pbt_Arab", "ps"), ("no", "nob_Latn", "no"),
     ("nb", "nob_Latn", "no"), ("ff", "fuv_Latn", None), ("tl", "tgl_Latn", "tl"),
     ("fil", "tgl_Latn", "tl"), ("Tagalog", "tgl_Latn", "tl"), ("ms", "zsm_Latn", "ms"),
     ("ar", "arb_Arab", "ar"), ("acm", "acm_Arab", None), ("fa", "pes_Arab", "fa"),
     ("prs", None, None), ("Dari", None, None), ("swc", None, None), ("sw", "swh_Latn", "sw"),
     ("gn", None, "gug"), ("ki", None, "kik"), ("zh-Hant", "zho_Hant", "zh")],
)  # fmt: skip
def test_macrolanguages_are_their_main_members_and_no_others(language, code, identified):
    codes = ["pbt_Arab", "nob_Latn", "fuv_Latn", "tgl_Latn", "zsm_Latn", "arb_Arab", "acm_Arab",
             "pes_Arab", "swh_Latn", "zho_Hans", "zho_Hant"]  # fmt: skip
    assert match(language, codes) == code
    if identified:
        assert identified_code(language) == identified


@pytest.mark.parametrize(
    ("code", "name"), [("lg", "Luganda"), ("lug_Latn", "Luganda"), ("ny", "Chichewa")]
)
def test_a_language_has_the_name_of_its_speakers(code, name):
    assert language_name(code) == name
    assert standard_tag(name) == standard_tag(code)
