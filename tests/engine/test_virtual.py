"""The virtual model has the weights of `Plan.load`, to the bit, for every composition."""

import re
import time
import warnings

import pytest
import torch
from merging import change_config, change_tensors, composed, recipe_plan, tensors_of
from refusals import one_line
from tiny_models import EVERY, config_of, grid_of, same_bits, save_expert, swap_of

import layerswap as ls
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel
from layerswap.ground.errors import EvaluationError, LayerswapError, MergeError


def check_same_model(found, expected):
    wanted = expected.state_dict()
    state = found.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(state[name], tensor), name


@pytest.mark.parametrize("family", EVERY)
def test_every_composition_equals_the_loaded_model(family, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))[::3]
    virtual = VirtualModel(plans)
    for index in (*range(len(plans)), 0):
        model = virtual.switch(index)
        expected = plans[index].load()
        check_same_model(model, expected)
        tied = getattr(model.config, "tie_word_embeddings", False)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        ids = torch.tensor([[5, 9, 13, 2, 44, 17, 8, 30]])
        with torch.no_grad():
            assert same_bits(model(input_ids=ids).logits, expected(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_in_bfloat16_and_cast(family, tmp_path):
    plans = swap_of(tmp_path, family, torch.bfloat16).grid(bottom=[0, 2], top=[1])
    stored, wide = VirtualModel(plans), VirtualModel(plans, dtype="float32")
    for index, plan in enumerate(plans):
        check_same_model(stored.switch(index), plan.load())
        check_same_model(wide.switch(index), plan.load().float())


def test_compositions_share_the_tensors_of_the_experts(tmp_path):
    plans = swap_of(tmp_path).grid(bottom=[0, 2], top=[0, 1])
    virtual = VirtualModel(plans)
    name = "model.layers.{}.mlp.up_proj.weight"

    def where(index, layer):
        return virtual.switch(index).get_parameter(name.format(layer)).data_ptr()

    assert where(0, 3) == where(2, 3)  # both take the task expert's
    assert where(0, 0) != where(2, 0)
    assert where(0, 0) == where(1, 0)
    expert = sum(t.nbytes for t in plans[0].load().state_dict().values())
    assert virtual.pool.kept_bytes < 2 * expert
    outside = 2 * 60 * 32 + 32
    assert virtual.pool.made_bytes == 4 * outside  # one blend, whatever the number of plans


def test_untrained_tensors_are_kept_once(tmp_path):
    swap_of(tmp_path)
    frozen = {}
    for name in ("task", "language"):
        tensors = tensors_of(tmp_path / name)
        frozen = frozen or {n: t for n, t in tensors.items() if ".layers." not in n}
        change_tensors(tmp_path / name, frozen)
    experts = {name: tmp_path / name for name in ("task", "language")}
    plans = [
        ls.swap(**experts, bottom=2, top=1, outside=of) for of in ("task", "blend", "language")
    ]
    virtual = VirtualModel(plans)
    for index, one in enumerate(plans):
        check_same_model(virtual.switch(index), one.load())
    assert virtual.pool.made_bytes == 0  # half of each of two equal tensors is that tensor
    held = sum(t.nbytes for t in plans[0].load().state_dict().values())
    assert virtual.weight_bytes() == (held, 0)
    assert virtual.pool.kept_bytes == held


def test_blends_are_dropped_and_computed_again(tmp_path):
    plan = swap_of(tmp_path)
    mixes = [
        composed(
            plan,
            ls.Composition.build(5, lambda place, w=w: ls.Blend.of({"task": w, "language": 1 - w})),
        )
        for w in (0.1, 0.2, 0.3)
    ]
    virtual = VirtualModel(mixes, max_made_bytes=30_000)
    for index in (0, 1, 2, 0, 2):
        check_same_model(virtual.switch(index), mixes[index].load())
        assert virtual.pool.made_bytes <= 30_000


def test_merge_methods_are_places_like_others(tmp_path):
    for seed, name in enumerate(("base", "task", "language", "third")):
        save_expert(tmp_path / name, config_of("llama"), seed)
    merge = {"method": "ties", "experts": ["one", "two"], "density": 0.4}
    experts = {
        "task": tmp_path / "task", "one": tmp_path / "language", "two": tmp_path / "third",
        "language": {"merge": merge},
    }  # fmt: skip
    plan = recipe_plan(base=tmp_path / "base", experts=experts, swap={"bottom": 1, "top": 1})
    plans = plan.grid(bottom=[1, 2], top=[0, 1])
    assert any(not tensor.linear for tensor in plans[0].tensors)
    virtual = VirtualModel(plans)
    for index in (3, 0, 2, 1):
        check_same_model(virtual.switch(index), plans[index].load())


def test_switching_takes_milliseconds(tmp_path):
    # 224 parameters. A bound far from what it takes: re-pointing them is under a millisecond.
    plan = swap_of(tmp_path, num_hidden_layers=24)
    virtual = VirtualModel(plan.grid(bottom=[0, 12], top=[0, 12]))
    for index in range(4):
        virtual.switch(index)
    start = time.process_time()
    for index in range(40):
        virtual.switch(index % 4)
    assert (time.process_time() - start) / 40 < 0.05


def test_plans_that_cannot_share_a_model_are_refused(tmp_path):
    plan = swap_of(tmp_path / "a")
    other = swap_of(tmp_path / "b", intermediate_size=40)
    with pytest.raises(EvaluationError, match="cannot share a model"):
        VirtualModel([plan, other])
    with pytest.raises(EvaluationError, match="there is no composition to evaluate"):
        VirtualModel([])
    for settings, message in (
        ({"dtype": "int4"}, "no dtype 'int4'; there are float32"),
        ({"device": "cuba"}, "device 'cuba' cannot be used"),
    ):
        with pytest.raises(EvaluationError, match=message):
            VirtualModel([plan], **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 11008}, "config.json contradicts the weights; .* mismatched keys"),
        ({"hidden_act": "no"}, r"the model cannot be loaded \(KeyError: 'no'\)"),
        ({"pad_token_id": 999}, "the model cannot be loaded .Padding_idx"),
    ],
    ids=str,
)
def test_configurations_that_contradict_the_weights_are_one_line(changes, message, tmp_path, capfd):
    swap_of(tmp_path)
    experts = {name: change_config(tmp_path / name, **changes) for name in ("task", "language")}
    capfd.readouterr()
    for load in (lambda: ls.swap(**experts).load(), lambda: Sweep([ls.swap(**experts)])):
        assert re.search(f"task: .*{message}", one_line(LayerswapError, load))
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_weights_in_eight_bits(tmp_path):
    """Without scales, the values themselves are meant; with scales, the weights are refused."""
    experts = {name: tmp_path / name for name in ("task", "language")}
    swap_of(tmp_path)

    def score(change):
        for folder in experts.values():
            change_tensors(folder, change(tensors_of(folder)))
        plan = ls.swap(**experts, bottom=1, top=1)
        return Sweep([plan], dtype="float32").loglikelihood([([3, 9], [4])]).logprob

    eight = torch.float8_e4m3fn
    narrow = score(lambda known: {k: v.to(eight) if "proj" in k else v for k, v in known.items()})
    assert narrow == score(lambda known: {k: v.float() for k, v in known.items()})
    scale = {"model.layers.2.mlp.up_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(MergeError, match=r"unexpected keys: .*up_proj\.weight_scale_inv"):
        score(lambda known: known | scale)


def test_experts_of_two_dtypes_need_a_dtype(tmp_path):
    task = save_expert(tmp_path / "task", config_of("llama"), 1)
    language = save_expert(tmp_path / "language", config_of("llama"), 2, torch.bfloat16)
    both = ls.swap(task=task, language=language, bottom=1, top=1)
    alone = composed(both, ls.Composition.build(5, lambda place: ls.Blend.of("language")))
    with pytest.raises(EvaluationError, match="set dtype, or evaluate them separately"):
        VirtualModel([both, alone])
    virtual = VirtualModel([both, alone], dtype="float32")
    check_same_model(virtual.switch(1), alone.load().float())


def test_memory_estimates_and_batch_sizes(tmp_path):
    plans = swap_of(tmp_path, num_hidden_layers=6).grid(bottom=range(3), top=range(2))
    sweep = Sweep(plans)
    every = range(len(plans))
    held = sum(t.nbytes for t in plans[0].load().state_dict().values())
    outside = 4 * (2 * 60 * 32 + 32)
    layer = (held - outside) // 6
    estimate = sweep.memory(rows=4, tokens=10)
    # Layers 0, 1 and 5 of both experts, 2 to 4 of the task expert; one blend outside.
    assert estimate.experts == 9 * layer
    assert estimate.blends == outside
    assert estimate.states == 4 * 10 * 32 * 4 * (sweep.counts().open_states + 1)
    for index in every:
        sweep.switch(index)
    assert sweep.pool.kept_bytes == estimate.experts
    assert sweep.pool.made_bytes == estimate.blends
    assert repr(sweep) == "<Sweep of 6 compositions: 6 layers>"
    assert str(estimate).startswith("about ")
    assert "(experts 278.8 kB, blends 15.5 kB, " in str(estimate)

    budget = sweep.memory(16, 10).total
    assert sweep.fit_batch_size(10, budget=budget) == 16
    assert sweep.fit_batch_size(10, budget=budget - 1) == 8
    with pytest.raises(EvaluationError, match=r"one row at a time needs .* there are 1\.0 kB;"):
        sweep.fit_batch_size(10, budget=1000)
    writing = sweep.memory(2, 10, new_tokens=20)
    assert writing.cache >= 2 * 6 * 6 * 30 * 2 * 16 * 4  # prompts, plans, layers, tokens, k and v
    assert sweep.fit_batch_size(10, new_tokens=20, budget=writing.total) == 2
    assert sweep.fit_batch_size(10) >= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "bloom"])
def test_on_a_gpu(family, tmp_path):
    plans = grid_of(swap_of(tmp_path, family))
    sweep = Sweep(plans, device="cuda")
    ids = torch.tensor([[5, 9, 13, 2, 44, 17, 8, 30], [7, 8, 9, 10, 11, 12, 13, 14]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = dict(sweep.logits(ids))
        written = sweep.generate(ids.tolist(), max_new_tokens=10, eos=[])
    for index, plan in enumerate(plans):
        model = plan.load().to("cuda")
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            assert same_bits(logits[index], model(ids.cuda(), use_cache=False).logits)
        expected = model.generate(ids.cuda(), max_new_tokens=10, do_sample=False)[:, 8:].tolist()
        assert [list(generation.tokens) for generation in written[index]] == expected
