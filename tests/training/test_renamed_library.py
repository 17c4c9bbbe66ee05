"""A version of transformers or TRL that renames what a training relies on is never silently wrong.

Each test renames one thing as a later version might.
"""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from small_experts import data_files, train_expert

from layerswap.ground.errors import TrainingError

ADVICE = "use versions of TRL and transformers that docs/support.md names"


def short_training(tmp_path, base, rows, **spec):
    hyperparameters = {"max_steps": 2, "per_device_train_batch_size": 4}
    return train_expert(tmp_path, base, limit=16, hyperparameters=hyperparameters, **spec)


@pytest.mark.parametrize(("name", "why"), [
    ("get_train_dataloader", "the Trainer did not take the rows in order"),
    ("evaluation_loop", "the Trainer did not report the loss per token"),
    ("prediction_step", "the Trainer did not report the loss per token"),
])  # fmt: skip
def test_a_method_that_the_trainer_calls_by_another_name(
    tmp_path, base, rows, monkeypatch, name, why
):
    from layerswap.training.expert.sft import ExpertTrainer

    monkeypatch.delattr(ExpertTrainer, name)
    sets = {name: data_files(rows, name, validation=True) for name in ("task", "language")}
    with pytest.raises(TrainingError, match=f"^{why}; {ADVICE}$"):
        short_training(
            tmp_path, base, rows, simultaneous=sets, train={"partition": "C"}, save_every=4
        )


def test_a_preparation_with_another_argument(tmp_path, base, rows, monkeypatch):
    from trl import SFTTrainer

    prepare = SFTTrainer._prepare_dataset

    def prepared(self, *args, **kwargs):
        return prepare(self, *args, **kwargs)

    parameters = list(inspect.signature(prepare).parameters.values())
    tools = inspect.Parameter("tools", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    prepared.__signature__ = inspect.Signature([*parameters[:3], tools, *parameters[3:]])
    monkeypatch.setattr(SFTTrainer, "_prepare_dataset", prepared)
    mix = [data_files(rows, name) for name in ("task", "language")]
    why = "^TRL cannot prepare a second data set .*'tools'"
    with pytest.raises(TrainingError, match=rf"{why}\); {ADVICE}$"):
        short_training(tmp_path, base, rows, mix=mix)


def test_columns_of_prepared_rows_with_other_names():
    """`lengths` keeps packed texts apart; without `labels`, no filler could be told from a text."""
    from datasets import Dataset

    from layerswap.training.expert.sft import _join

    raw = Dataset.from_dict({"text": ["a"]})
    row = {"text": ["a"], "input_ids": [[5, 6]], "lengths": [[1, 1]]}
    sets = [Dataset.from_dict({**row, "labels": [[5, 6]], "mask": [[1, 1]]}),
            Dataset.from_dict({**row, "labels": [[5, 6]]})]  # fmt: skip
    assert set(_join(sets, [raw]).column_names) == {"input_ids", "lengths", "labels"}
    with pytest.raises(TrainingError, match="TRL prepared rows with input_ids, lengths; use"):
        _join([Dataset.from_dict(row)], [raw])


def test_a_head_that_trl_asks_for_by_another_name(tmp_path, base, rows, monkeypatch):
    from trl import SFTTrainer
    from trl.trainer import sft_trainer

    add, loss = sft_trainer.add_fused_lm_head, SFTTrainer.compute_loss

    def add_renamed(model, **kwargs):
        add(model, **kwargs)
        inside = model.forward
        model.forward = types.MethodType(
            lambda self, *a, head=False, **k: inside(*a, fused_lm_head=head, **k), model
        )

    def renamed_loss(self, model, inputs, **kwargs):
        def call(*, fused_lm_head=False, **inputs):
            return model(**inputs, head=fused_lm_head)

        return loss(self, call, inputs, **kwargs)

    monkeypatch.setattr(sft_trainer, "add_fused_lm_head", add_renamed)
    monkeypatch.setattr(SFTTrainer, "compute_loss", renamed_loss)
    with pytest.warns(UserWarning, match=f"^TRL did not use the faster head for CPUs; {ADVICE}$"):
        short_training(tmp_path, base, rows, data=data_files(rows, "task"))


@pytest.mark.parametrize("changed", ["temperature", "field"])
def test_a_head_with_other_results_stays(base, changed):
    """Its loss, not ours, is trained on: from the first batch, and with dropout in the model."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from layerswap.training.expert.head import use_labelled_positions

    def model(*, ours):
        model = AutoModelForCausalLM.from_pretrained(base, attention_dropout=0.5).float().train()
        outputs = ("log_probs", "entropy", *(["mean_logits"] if changed == "field" else []),
                   "is_top1")  # fmt: skip
        add_fused_lm_head(model, temperature=1 + (changed == "temperature"), outputs=outputs)
        if ours:
            use_labelled_positions(model)
        return model

    ids = torch.arange(5, 25).reshape(2, 10)
    batch = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
    ours, theirs = model(ours=True), model(ours=False)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"^TRL's head for CPUs has other results.*; {ADVICE}"):
        ours(**batch).loss.backward()
    ours.eval()
    theirs.eval()
    assert ours.lm_head.weight.grad.any()
    assert torch.equal(ours(**batch).log_probs, theirs(**batch).log_probs)
