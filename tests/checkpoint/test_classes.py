"""The table of transformers' classes against the installed transformers."""

import pytest
import transformers
from research.classes import TASKS, build, classes, core, heads, outside, stems, unties

from layerswap.checkpoint.classes import CLASSES, HEADS, PREFIXES

FEW = ("BertForMaskedLM", "XLMRobertaForSequenceClassification", "LlamaForSequenceClassification",
       "T5ForConditionalGeneration", "ModernBertForMaskedLM", "CpmAntForCausalLM")  # fmt: skip
EVERY = [pair for pair in classes() if pair[0] in FEW]


def _check(name: str, kind: str) -> None:
    model = build(name, kind)
    if model is None:
        return
    assert model.base_model_prefix in PREFIXES | {"", "model"}, name
    assert not heads(model) - HEADS or name not in _ANSWERING, name
    assert unties(model) == (name in CLASSES["untied"]), name
    assert all(name in CLASSES["layers"][stem] for stem in stems(model)), name
    names = [core(model, key) for key in model.state_dict() if outside(key)]
    tied = {core(model, key) for key in model.all_tied_weights_keys}
    for module in CLASSES["unused"].get(name, ()):
        loaded = [n for n in names if f"{n}.".startswith(f"{module}.") and n not in tied]
        assert not loaded, (name, module)


_ANSWERING = {name for listed in TASKS.values() for name in listed.values()}


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_what_the_table_says_of_a_class_is_so(name, kind):
    _check(name, kind)


@pytest.mark.slow
def test_what_the_table_says_of_every_class_is_so():
    for name, kind in classes():
        _check(name, kind)


@pytest.mark.skipif(
    transformers.__version__ != CLASSES["transformers"], reason="the table is of another version"
)
def test_the_table_has_every_class_for_labels():
    for kind, listed in CLASSES["tasks"].items():
        assert listed == {t: names[kind] for t, names in TASKS.items() if kind in names}
    assert {kind for names in TASKS.values() for kind in names} - {*CLASSES["tasks"]} == set()
