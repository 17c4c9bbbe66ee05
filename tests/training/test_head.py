"""The head on labelled positions against the model's own logits and loss."""

import copy
import shutil

import pytest
import torch

IGNORED = -100


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=request.param,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_head(model, chunk):
    from trl.trainer.utils import add_fused_lm_head

    from layerswap.training.expert.sft import use_labelled_positions

    fused = copy.deepcopy(model)
    add_fused_lm_head(fused, outputs=("log_probs", "entropy", "is_top1"))
    use_labelled_positions(fused, chunk)
    return fused


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 97, (3, 11))
    labels = ids.clone()
    labels[:, :7] = IGNORED
    labels[1] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("chunk", [97, 3 * 97, 1 << 20])
@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_are_those_of_the_full_logits(model, chunk, frozen):
    ours, theirs = with_head(model, chunk), copy.deepcopy(model)
    for one in (ours, theirs):
        one.get_output_embeddings().weight.requires_grad_(not frozen)
    inputs = batch()
    found, wanted = ours(**inputs, fused_lm_head=True), theirs(**inputs)
    torch.testing.assert_close(found.loss, wanted.loss)
    logs = wanted.logits[:, :-1].log_softmax(-1)
    mask = inputs["labels"][:, 1:] != IGNORED
    assert torch.equal(found.label_mask, mask)
    entropy = -(logs.exp() * logs).sum(-1)
    torch.testing.assert_close(found.entropy[mask], entropy[mask])
    top = logs.argmax(-1) == inputs["labels"][:, 1:]
    assert torch.equal(found.is_top1[mask], top[mask])
    assert not found.log_probs[~mask].any()
    found.loss.backward()
    wanted.loss.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("frozen", [False, True])
def test_under_autocast_products_are_bfloat16_and_gradients_are_kept_in_float32(model, frozen):
    ours, theirs = with_head(model, 3 * 97), copy.deepcopy(model)
    for one in (ours, theirs):
        one.get_output_embeddings().weight.requires_grad_(not frozen)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(**inputs, fused_lm_head=True)
    wanted = theirs(**inputs)
    assert found.log_probs.dtype == torch.float32
    assert found.loss != wanted.loss
    torch.testing.assert_close(found.loss, wanted.loss, rtol=5e-3, atol=0)
    found.loss.backward()
    wanted.loss.backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad.dtype == torch.float32
            alike = torch.cosine_similarity(one.grad.flatten(), other.grad.flatten(), dim=0)
            assert alike > 0.995, name


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_learnt_already_pulls_no_more_under_autocast(model, frozen):
    """Near p = 1 the gradient is a difference of two terms that rounding must not part."""
    learnt, inputs = copy.deepcopy(model), batch()
    optimizer = torch.optim.AdamW(learnt.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        learnt(**inputs).loss.backward()
        optimizer.step()
    learnt.zero_grad()
    learnt.get_output_embeddings().weight.requires_grad_(not frozen)
    plain, ours = copy.deepcopy(learnt), with_head(learnt, 3 * 97)
    whole = learnt(**inputs).loss
    assert whole < 0.02
    whole.backward()
    with torch.autocast("cpu", torch.bfloat16):
        ours(**inputs, fused_lm_head=True).loss.backward()
        plain(**inputs).loss.backward()

    def alike(other):
        grads = [
            (one.grad.flatten(), two.grad.flatten())
            for one, two in zip(learnt.parameters(), other.parameters(), strict=True)
            if one.grad is not None
        ]
        return torch.cosine_similarity(*map(torch.cat, zip(*grads, strict=True)), dim=0)

    assert alike(ours) > 0.98
    assert alike(ours) > alike(plain) - 0.01


def test_the_dtype_of_products_is_that_of_autocast(model, monkeypatch):
    from layerswap.training.expert import sft

    seen = []
    real = sft.LinearLogProb.apply
    monkeypatch.setattr(sft.LinearLogProb, "apply", lambda *a: seen.append(a[-1]) or real(*a))
    with torch.autocast("cpu", torch.bfloat16):
        with_head(model, 97)(**batch(), fused_lm_head=True)
    with_head(model, 97)(**batch(), fused_lm_head=True)
    assert seen == [torch.bfloat16, torch.float32]


def test_a_batch_without_labels_has_no_gradient_and_evaluation_computes_none(model):
    ours = with_head(model, 97)
    inputs = batch()
    inputs["labels"][:] = IGNORED
    loss = ours(**inputs, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in ours.parameters() if p.grad is not None)
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch(), fused_lm_head=True).loss, model(**batch()).loss)


def test_other_dtypes_and_scaled_logits_keep_the_librarys_head(model):
    ours = with_head(copy.deepcopy(model).bfloat16(), 97)
    found = ours(**batch(), fused_lm_head=True)
    assert found.log_probs.isfinite().all()
    scaled = copy.deepcopy(model)
    scaled.config.final_logit_softcapping = 5.0
    found = with_head(scaled, 97)(**batch(), fused_lm_head=True)
    assert found.loss != with_head(model, 97)(**batch(), fused_lm_head=True).loss


def test_a_training_never_scores_a_position_without_a_label(tmp_path, base, rows, monkeypatch):
    from layerswap.training.expert import sft, trainer

    seen = []
    real = sft.LinearLogProb.apply

    def watched(hidden, *rest):
        seen.append(len(hidden))
        return real(hidden, *rest)

    monkeypatch.setattr(sft.LinearLogProb, "apply", watched)
    out = trainer.train({
        "base": str(base), "data": {"train": str(rows / "task-train.jsonl")}, "limit": 16,
        "hyperparameters": {"per_device_train_batch_size": 4},
    }, tmp_path / "out")  # fmt: skip
    from layerswap.training.expert.save import read_training

    tokens = next(e["num_tokens"] for e in read_training(out)["log"] if "num_tokens" in e)
    assert len(seen) == 4
    assert 0 < sum(seen) < tokens / 2


@pytest.mark.parametrize(("able", "large", "given", "lower"), [
    (True, True, {}, True), (False, True, {}, False), (True, False, {}, False),
    (True, True, {"bf16": False}, False),
])  # fmt: skip
def test_a_processor_with_bfloat16_uses_it_for_what_is_not_tiny(
    tmp_path, base, rows, monkeypatch, able, large, given, lower
):
    from layerswap.training.expert import hyperparameters, trainer
    from layerswap.training.expert.save import read_training

    if large:
        monkeypatch.setattr(hyperparameters, "LARGE", 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    lines = []
    out = trainer.train({
        "base": str(base), "data": {"train": str(rows / "task-train.jsonl")}, "limit": 4,
        "hyperparameters": {"max_steps": 1, **given},
    }, tmp_path / "out", log=lines.append)  # fmt: skip
    assert read_training(out)["hyperparameters"]["bf16"] == lower
    assert any("bf16: false" in line for line in lines) == lower


def test_training_with_bf16_saves_float32_weights(tmp_path, base, rows):
    from safetensors.torch import load_file

    from layerswap.training.expert import trainer

    out = trainer.train({
        "base": str(base), "data": {"train": str(rows / "task-train.jsonl")}, "limit": 8,
        "hyperparameters": {"max_steps": 2, "bf16": True, "learning_rate": 1e-6},
    }, tmp_path / "out")  # fmt: skip
    saved = {n: t for p in out.glob("model*.safetensors") for n, t in load_file(p).items()}
    before = {n: t for p in base.glob("model*.safetensors") for n, t in load_file(p).items()}
    assert {t.dtype for t in saved.values()} == {torch.float32}
    moved = [name for name in saved if not torch.equal(saved[name], before[name])]
    assert moved
    rounded = saved[moved[0]].bfloat16().float()
    assert not torch.equal(rounded, saved[moved[0]])


def test_a_training_goes_on_in_the_precision_it_was_begun_in(tmp_path, base, rows, monkeypatch):
    from layerswap.training.expert import hyperparameters, trainer
    from layerswap.training.expert.spec import check_expert

    monkeypatch.setattr(hyperparameters, "LARGE", 1)
    spec = check_expert({"base": str(base), "data": {"train": str(rows / "task-train.jsonl")}})
    out = tmp_path / "out"
    for able in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: {"amx_bf16": able})
        job = trainer.plan_training(spec, out)
        assert job.config.bf16 == able
        out.mkdir()
        trainer.write_training(out, job.record)
        other = {"amx_bf16": not able}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda other=other: other)
        assert trainer.plan_training(spec, out, resume=True).config.bf16 == able
        assert trainer.plan_training(spec, out).config.bf16 != able
        given = spec.model_copy(update={"hyperparameters": {"bf16": not able}})
        assert trainer.plan_training(given, out, resume=True).config.bf16 != able
        shutil.rmtree(out)


def test_float16_by_name_is_no_quarrel_with_the_default(tmp_path, base, rows, monkeypatch):
    from layerswap.training.expert import hyperparameters, trainer
    from layerswap.training.expert.spec import check_expert

    monkeypatch.setattr(hyperparameters, "LARGE", 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    spec = check_expert({
        "base": str(base), "data": {"train": str(rows / "task-train.jsonl")},
        "hyperparameters": {"fp16": True},
    })  # fmt: skip
    config = trainer.plan_training(spec, tmp_path / "out").config
    assert config.fp16
    assert not config.bf16
