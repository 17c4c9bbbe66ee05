import pytest
from no_hub import no_hub  # noqa: F401


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A random Llama of 4 layers with the lab's tokenizer, stored in bfloat16."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from layerswap.lab.assets import shipped

    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = AutoTokenizer.from_pretrained(shipped().base)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Files of problems and of reading in another language; 128 rows to train on each."""
    from lab_files import write_rows

    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, 128, 32)
    return folder
