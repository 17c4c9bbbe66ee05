"""Merges of mixtures of experts, state-space layers and multimodal models: nothing is lost."""

import json
from hashlib import sha256

import pytest
import torch
from families import model_of
from merging import change_tensors, copied, recipe_plan, refusal, same_tensors, tensors_of

import layerswap as ls
from layerswap.ground.errors import MergeError
from layerswap.merge.layout import pack_shards
from layerswap.merge.verification import verify

WORDS = ("gate.weight", "router.weight")


@pytest.fixture(scope="module", params=["mixtral", "jamba", "llava"])
def pair(request, tmp_path_factory):
    return save_pair(request.param, tmp_path_factory.mktemp(request.param))


def save_pair(family, root):
    for seed, name in enumerate(("task", "language")):
        torch.manual_seed(seed)
        model_of(family).save_pretrained(root / name)
    return root


def plan_of(root, **recipe):
    experts = {name: str(root / name) for name in ("task", "language")}
    swap = {"swap": {"bottom": 1, "top": 0, "outside": "task"}}
    return recipe_plan({"experts": experts, **swap, **recipe})


def test_the_record_accounts_for_every_tensor(pair, tmp_path):
    out = plan_of(pair).save(tmp_path / "out")
    result, sources = tensors_of(out), {n: tensors_of(pair / n) for n in ("task", "language")}
    lines = "".join(f"{name}\n" for name in sorted(sources["task"]))
    all_of_them = {"count": len(result), "names_sha256": sha256(lines.encode()).hexdigest()}
    whole = {**all_of_them, "not_in_output": [], "only_in_output": []}
    account = json.loads((out / "layerswap.json").read_text())["tensors"]
    assert account == {"output": all_of_them, "sources": {"task": whole, "language": whole}}
    for name, tensor in result.items():  # and each is the tensor that the swap takes
        layer = name.partition("layers.")[2].split(".")[0]
        bottom = layer == "0" and "vision" not in name
        assert torch.equal(tensor, sources["language" if bottom else "task"][name]), name
    assert verify(out).passed


def test_tensors_that_are_not_written_stop_the_merge(pair, tmp_path):
    plan = plan_of(pair)
    plan.__dict__["shards"] = pack_shards(plan.tensors[:-1], 10**9, {"format": "pt"})
    count = len(plan.tensors)
    with pytest.raises(
        MergeError, match=f"the output has {count - 1} tensors and the plan {count},"
    ):
        plan.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_routers_go_with_their_experts_or_apart(pair, tmp_path):
    if pair.name.startswith("llava"):
        pytest.skip("no mixture")
    together = {"layers": 1, "roles": ["mlp"], "take": "language"}
    apart = {"layers": 1, "roles": ["router"], "take": {"task": 1, "language": 3}}
    sources = {name: tensors_of(pair / name) for name in ("task", "language")}
    for places in ([together], [together, apart]):
        out = plan_of(pair, places=places).save(tmp_path / str(len(places)))
        result = tensors_of(out)
        routers = [name for name in result if "layers.1." in name and name.endswith(WORDS)]
        experts = [name for name in result if "layers.1." in name and ".experts." in name]
        assert len(routers) == 1
        assert len(experts) in (2, 12)
        assert all(torch.equal(result[name], sources["language"][name]) for name in experts)
        task, language = (sources[name][routers[0]] for name in ("task", "language"))
        expected = language if len(places) == 1 else task.double() / 4 + language.double() * 3 / 4
        torch.testing.assert_close(result[routers[0]], expected.float(), rtol=1e-6, atol=1e-8)
        kept = json.loads((out / "layerswap.json").read_text())["recipe"]["places"]
        assert len(kept) == len(places)


def test_a_tied_head_that_one_source_stores_is_named(pair, tmp_path):
    if not pair.name.startswith("mixtral"):
        pytest.skip("one is enough")
    roots = {name: copied(pair / name, tmp_path / name) for name in ("task", "language")}
    for root in roots.values():
        path = root / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
        embedding = tensors_of(root)["model.embed_tokens.weight"]
        change_tensors(root, {"lm_head.weight": embedding if root.name == "task" else None})
    out = plan_of(tmp_path).save(tmp_path / "out")
    sources = json.loads((out / "layerswap.json").read_text())["tensors"]["sources"]
    assert sources["task"]["not_in_output"] == ["lm_head.weight"]
    assert sources["language"]["not_in_output"] == []


def test_compositions_of_a_hybrid_score_as_each_alone(pair):
    if not pair.name.startswith("jamba"):
        pytest.skip("the engine's own tests have the others")
    plans = plan_of(pair).grid(bottom=range(3), top=0)
    requests = [([1, 5, 9], [7, 8, 3, 2]), ([4, 2], [9, 1])]
    result = ls.Sweep(plans).loglikelihood(requests).logprob
    for number, plan in enumerate(plans):
        model = plan.load().eval()
        for request, (context, rest) in enumerate(requests):
            with torch.no_grad():
                log = model(torch.tensor([context + rest])).logits[0].log_softmax(-1)
            alone = sum(float(log[len(context) - 1 + i, t]) for i, t in enumerate(rest))
            assert result[number, request] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_are_exact_together_and_refused_beside_others(tmp_path, kind):
    """Since version 5 transformers can store a mixture's experts in one tensor."""
    from transformers import AutoModelForCausalLM

    separate = plan_of(save_pair(kind, tmp_path))
    expected = separate.load().state_dict()
    for name, other in (("task", "language"), ("language", "task")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / "fused", save_original_format=False)
        (tmp_path / name).rename(tmp_path / f"separate-{name}")
        (tmp_path / "fused").rename(tmp_path / name)
        if name == "task":
            message = refusal(plan_of, tmp_path)
            assert message.startswith(f"{name} stores its mixture's experts as one tensor ('model.")
            assert f"and {other} one by one; give both in one form" in message
    fused = plan_of(tmp_path)
    assert len(fused.tensors) < len(separate.tensors)
    saved = AutoModelForCausalLM.from_pretrained(fused.save(tmp_path / "out"))
    for model in (saved, fused.load()):
        assert same_tensors(model.state_dict(), expected)
