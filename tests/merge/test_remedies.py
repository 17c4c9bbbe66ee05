"""Remedies that refusals print are followed to the letter, and the merge is then exact."""

import shutil

import pytest
import torch
from merging import recipe_plan, refusal, save_adapter, save_expert, tensors_of, tiny_llama
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def adapted(base, adapter):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def pickled(base, out, made):
    save_expert(made, tiny_llama(), 3)
    torch.save(load_file(made / "model.safetensors"), made / "pytorch_model.bin")
    (made / "model.safetensors").unlink()
    yield "load the model with transformers and save it again"
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(out)


def pickled_adapter(base, out, made):
    save_adapter(made, base, 3, r=2)
    file = made / "adapter_model.safetensors"
    torch.save(load_file(file), made / "adapter_model.bin")
    file.unlink()
    yield "load it with PEFT and save it again"
    adapted(base, made).save_pretrained(out)


def more_than_lora(**settings):
    def make(base, out, made):
        save_adapter(made, base, 3, r=2, **settings)
        yield "merge it into its base with PEFT's merge_and_unload first"
        adapted(base, made).merge_and_unload().save_pretrained(out)

    return make


def unmerged(base, out, made):
    model = adapted(base, save_adapter(out, base, 3, r=2))
    model.base_model.model.save_pretrained(made)
    shutil.rmtree(out)
    yield "merge it with PEFT's merge_and_unload and save the model again"
    model.merge_and_unload().save_pretrained(out)


def fsdp(base, out, made):
    from accelerate.utils import merge_fsdp_weights
    from torch.distributed import checkpoint

    model = AutoModelForCausalLM.from_pretrained(save_expert(out, tiny_llama(), 3))
    model.config.save_pretrained(made)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=made / "pytorch_model_fsdp_0")
    (out / "model.safetensors").unlink()
    yield "join its parts with `accelerate merge-weights`"
    merge_fsdp_weights(str(made / "pytorch_model_fsdp_0"), str(out))


@pytest.mark.parametrize(
    "make", [pickled, pickled_adapter, more_than_lora(use_dora=True), more_than_lora(bias="all"),
             unmerged, fsdp], ids=["bin", "adapter", "DoRA", "biases", "unmerged", "FSDP"],
)  # fmt: skip
def test_what_a_refusal_advises_ends_in_the_merge(tmp_path, make):
    base, other = (save_expert(tmp_path / name, tiny_llama(), i) for i, name in enumerate("bo"))
    steps = make(base, tmp_path / "out", tmp_path / "made")
    recipe = {"base": str(base), "swap": {"task": "t", "language": "l", "bottom": 1, "top": 1}}
    experts = {"t": str(tmp_path / "made"), "l": str(other)}
    assert next(steps) in refusal(recipe_plan, **recipe, experts=experts)
    next(steps, None)
    merged = recipe_plan(**recipe, experts={**experts, "t": str(tmp_path / "out")})
    found = tensors_of(merged.save(tmp_path / "merged"))
    out = tmp_path / "out"
    whole = (adapted(base, out).merge_and_unload() if (out / "adapter_config.json").is_file()
             else AutoModelForCausalLM.from_pretrained(out))  # fmt: skip
    middle = "model.layers.2.self_attn.q_proj.weight"
    torch.testing.assert_close(found[middle], whole.state_dict()[middle])
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"],
                       tensors_of(other)["model.layers.0.mlp.up_proj.weight"])  # fmt: skip
