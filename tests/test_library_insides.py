"""What the modules called `*_inside` rely on in other libraries; each test names one promise."""

import json
import os

import pytest

from layerswap.ground.errors import CheckpointError, EvaluationError


@pytest.mark.parametrize(("attention", "expected"), [("eager", True), ("sdpa", False)])
def test_transformers_tells_how_attention_is_computed(attention, expected):
    from transformers import LlamaConfig, LlamaForCausalLM

    from layerswap.engine.transformers_inside import holds_attention_scores

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation=attention,
    )  # fmt: skip
    assert holds_attention_scores(LlamaForCausalLM(config)) is expected


def test_transformers_models_make_a_dynamic_cache_for_themselves():
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from layerswap.engine.transformers_inside import cache_of_model

    class Noted:
        length, layers = 0, ()

        def update(self, layer, keys, values):
            self.layers += (layer,)
            return keys, values

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2,
    ))  # fmt: skip
    cache, before = Noted(), DynamicCache.__init__
    with cache_of_model(cache, 2):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=True)
    assert cache.layers == (0, 1)
    assert DynamicCache.__init__ is before


def test_transformers_that_names_kernels_otherwise_is_refused(monkeypatch, tmp_path):
    from transformers import LlamaConfig, PreTrainedConfig

    from layerswap.checkpoint.loading import load_config

    LlamaConfig().save_pretrained(tmp_path)
    load_config(tmp_path)
    renamed = property(lambda self: vars(self).get("_attention"),
                       lambda self, value: vars(self).update(_attention=value))  # fmt: skip
    monkeypatch.setattr(PreTrainedConfig, "_attn_implementation", renamed)
    with pytest.raises(CheckpointError, match=r"may run kernels that a configuration names; use"):
        load_config(tmp_path)


def test_datasets_names_loading_scripts(tmp_path):
    from datasets import load_dataset

    from layerswap.reading.datasets_inside import needs_script

    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(RuntimeError) as raised:
        load_dataset(str(script))
    assert needs_script(raised.value)


def test_lm_eval_marks_tasks_that_run_code(monkeypatch):
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    from layerswap.evaluation.lm_eval_inside import refuse_programs

    def check(**marks):
        task = ConfigurableTask(config={**settings, **marks})
        refuse_programs({"t": task.get_config("unsafe_code")})

    settings = {
        "task": "t", "dataset_path": "json", "output_type": "generate_until", "test_split": "test",
        "custom_dataset": lambda **_: {"test": Dataset.from_list([{"a": "b"}])}, "doc_to_text": "a",
        "doc_to_target": "a",
    }  # fmt: skip
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    check()
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"  # the metric `code_eval` runs nothing either
    with pytest.raises(EvaluationError, match="t: lm-eval runs the programs"):
        check(unsafe_code=True)
    monkeypatch.setattr(ConfigurableTask, "get_config", lambda task, key: None)  # renamed
    with pytest.raises(EvaluationError, match="t: this lm-eval does not tell"):
        check()


def test_lm_eval_tells_where_exemplars_come_from(monkeypatch):
    """Their number and split are known without the names of its sampler."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    from layerswap.evaluation.harness import _check_exemplars

    rows = Dataset.from_list([{"a": "b"}, {"a": "c"}])
    task = ConfigurableTask(config={
        "task": "t", "dataset_path": "json", "output_type": "generate_until", "doc_to_text": "a",
        "custom_dataset": lambda **_: {"test": rows}, "doc_to_target": "a", "test_split": "test",
        "num_fewshot": 2,
    })  # fmt: skip
    del task.sampler, task.fewshot_cfg
    task.fewshot_docs = lambda: rows
    with pytest.warns(UserWarning, match="t: its exemplars are drawn from the documents that it"):
        _check_exemplars("t", task)
    task.set_config("num_fewshot", 3)
    with pytest.raises(EvaluationError, match="t: has 2 documents for exemplars, not 3"):
        _check_exemplars("t", task)


def test_ray_tells_which_nodes_no_autoscaler_started(monkeypatch):
    """What its monitor wrote on a cluster by hand, and with an autoscaler (Ray 2.60)."""
    kv = pytest.importorskip("ray.experimental.internal_kv")
    from layerswap.study.ray_inside import is_fixed

    def wrote(types):
        told = {"autoscaler_report": {"node_type_mapping": types}}
        monkeypatch.setattr(
            kv, "_internal_kv_get", lambda key, namespace: json.dumps(told).encode()
        )

    nodes = [{"NodeID": "a1", "Labels": {}}, {"NodeID": "b2", "Labels": {}}]
    wrote({"a1": "node_a1", "b2": "node_b2"})
    assert is_fixed(nodes)
    assert not is_fixed([*nodes, {"NodeID": "c3", "Labels": {}}])  # not seen yet
    assert not is_fixed([{"NodeID": "a1", "Labels": {"ray.io/node-group": "workers"}}])
    wrote({"a1": "ray.head.default", "b2": "node_b2"})
    assert not is_fixed(nodes)
    monkeypatch.setattr(kv, "_internal_kv_get", lambda key, namespace: None)
    assert not is_fixed(nodes)  # a version that tells nothing
