"""The head on labelled positions against the model's own logits and loss."""

import copy
import platform

import pytest
import torch
from processes import run
from small_experts import data_files, train_expert

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


def with_head(model, chunk=97):
    from trl.trainer.utils import add_fused_lm_head

    from layerswap.training.expert.head import use_labelled_positions

    fused = copy.deepcopy(model)
    add_fused_lm_head(fused, outputs=("log_probs", "entropy", "is_top1"))
    use_labelled_positions(fused, chunk)
    return fused


def two_models(model, chunk, *, frozen):
    """The model with our head and with its own; the head's weights frozen or not."""
    both = with_head(model, chunk), copy.deepcopy(model)
    for each in both:
        each.get_output_embeddings().weight.requires_grad_(not frozen)
    return both


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 97, (3, 11))
    labels = ids.clone()
    labels[:, :7] = IGNORED
    labels[1] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def gradients(*models):
    """Names of the parameters, and their gradients in each model."""
    names, *parameters = zip(*models[0].named_parameters(), strict=True)
    parameters += [tuple(each.parameters()) for each in models[1:]]
    return [(names[i], *(p[i].grad for p in parameters)) for i in range(len(names))]


@pytest.mark.parametrize("chunk", [97, 5 * 97, 1 << 20])
@pytest.mark.parametrize("block", [2 * 97, 1 << 20])
@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_are_those_of_the_full_logits(model, chunk, block, frozen, monkeypatch):
    from layerswap.training.expert import head

    monkeypatch.setattr(head, "BLOCK", block)
    ours, theirs = two_models(model, chunk, frozen=frozen)
    inputs = batch()
    output, expected = ours(**inputs, fused_lm_head=True), theirs(**inputs)
    torch.testing.assert_close(output.loss, expected.loss)
    logs = expected.logits[:, :-1].log_softmax(-1)
    mask = inputs["labels"][:, 1:] != IGNORED
    assert torch.equal(output.label_mask, mask)
    torch.testing.assert_close(output.entropy[mask], -(logs.exp() * logs).sum(-1)[mask])
    top = logs.argmax(-1) == inputs["labels"][:, 1:]
    assert torch.equal(output.is_top1[mask], top[mask])
    assert not output.log_probs[~mask].any()
    output.loss.backward()
    expected.loss.backward()
    for name, gradient, other in gradients(ours, theirs):
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, other, msg=name)


@pytest.mark.parametrize("frozen", [False, True])
def test_under_autocast_products_are_bfloat16_and_gradients_float32(model, frozen):
    ours, theirs = two_models(model, 3 * 97, frozen=frozen)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        output = ours(**inputs, fused_lm_head=True)
    expected = theirs(**inputs)
    assert output.log_probs.dtype == torch.float32
    assert output.loss != expected.loss
    torch.testing.assert_close(output.loss, expected.loss, rtol=5e-3, atol=0)
    output.loss.backward()
    expected.loss.backward()
    for name, gradient, other in gradients(ours, theirs):
        if other is not None:
            assert gradient.dtype == torch.float32
            similarity = torch.cosine_similarity(gradient.flatten(), other.flatten(), dim=0)
            assert similarity > 0.995, name


def test_a_head_that_trains_between_two_turns_of_the_other_part_is_followed(model):
    """The fused optimiser changes weights without counting a change."""
    ours, losses = with_head(model), []
    head = ours.get_output_embeddings().weight
    optimiser = torch.optim.AdamW([head], lr=0.1, fused=True)
    for trains in (False, False, True, False):
        head.requires_grad_(trains)
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(**batch(), fused_lm_head=True).loss
        if trains:
            loss.backward()
            optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1] == losses[2]
    assert losses[3] < losses[2] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_under_autocast_a_learnt_batch_keeps_its_small_gradient(model, frozen):
    """Near p = 1 the gradient is a difference of two terms that rounding must not part."""
    learnt, inputs = copy.deepcopy(model), batch()
    optimizer = torch.optim.AdamW(learnt.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        learnt(**inputs).loss.backward()
        optimizer.step()
    learnt.zero_grad()
    learnt.get_output_embeddings().weight.requires_grad_(not frozen)
    ours, plain = with_head(learnt, 3 * 97), copy.deepcopy(learnt)
    whole = learnt(**inputs).loss
    assert whole < 0.02
    whole.backward()
    with torch.autocast("cpu", torch.bfloat16):
        ours(**inputs, fused_lm_head=True).loss.backward()
        plain(**inputs).loss.backward()

    def similarity(other):
        pairs = [(a, b) for _, a, b in gradients(learnt, other) if a is not None]
        first, second = (
            torch.cat([g.flatten() for g in each]) for each in zip(*pairs, strict=True)
        )
        return torch.cosine_similarity(first, second, dim=0)

    assert similarity(ours) > 0.98
    assert similarity(ours) > similarity(plain) - 0.01


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of the head's function."""
    from layerswap.training.expert.head import LinearLogProb

    arguments = []
    apply = LinearLogProb.apply
    monkeypatch.setattr(LinearLogProb, "apply", lambda *a: arguments.append(a) or apply(*a))
    return arguments


def test_a_batch_without_labels_has_no_gradient_and_evaluation_computes_none(model):
    ours, inputs = with_head(model), batch()
    inputs["labels"][:] = IGNORED
    loss = ours(**inputs, fused_lm_head=True).loss
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in ours.parameters() if p.grad is not None)
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch(), fused_lm_head=True).loss, model(**batch()).loss)


def test_other_dtypes_and_scaled_logits_keep_the_librarys_head(model, calls):
    narrow = with_head(copy.deepcopy(model).bfloat16())(**batch(), fused_lm_head=True)
    assert narrow.log_probs.isfinite().all()
    scaled = copy.deepcopy(model)
    scaled.config.final_logit_softcapping = 5.0
    output = with_head(scaled)(**batch(), fused_lm_head=True)
    assert not calls
    assert output.loss != with_head(model)(**batch(), fused_lm_head=True).loss


def test_a_training_scores_labelled_positions_alone(tmp_path, base, rows, calls):
    from layerswap.training.expert.save import read_training

    out = train_expert(
        tmp_path, base, data=data_files(rows, "task"), limit=16,
        hyperparameters={"per_device_train_batch_size": 4},
    )  # fmt: skip
    tokens = max(e["num_tokens"] for e in read_training(out)["log"] if "num_tokens" in e)
    assert len(calls) == 4
    assert 0 < sum(len(arguments[0]) for arguments in calls) < tokens / 2


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept_for_the_next_batch():
    """A tensor of 64 MB has 16,384 pages of 4 KB; small objects may split a kept block once."""
    script = """
import resource, torch
from layerswap.ground.system import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
keep_freed_memory()
torch.ones(1 << 24)
print(default, min(faults() for _ in range(3)))
"""
    default, kept = map(int, run(script).split())
    assert kept < default / 10
