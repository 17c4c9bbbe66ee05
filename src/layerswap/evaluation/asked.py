"""Settings of an evaluation for the command line, without slow imports."""

from __future__ import annotations

from typing import Any, Literal


class AskedFields:
    """Tasks, prompts, documents and engine of an evaluation, named and defined as in lm-eval.

    The command line makes an option of each field, with the field's first type and the text below.
    `Asked` checks the fields.

    Options:
        tasks --tasks,--task NAME,...: lm-eval tasks or groups. Repeatable.
        include FOLDER: Folder with YAML files of more lm-eval tasks. Repeatable.
        limit: Number of documents per task, drawn in proportion to their labels.
        num_fewshot --num-fewshot,--shots: Examples per prompt. (default: the task's)
        fewshot_seed: Seed by which examples are drawn, where a task draws them.
        apply_chat_template: Write prompts with the tokenizer's chat template.
        think: Let the template think. With cut, only the text after the thought is scored.
            (default: the template's)
        system_instruction: System message of the chat, or text before a plain prompt.
        fewshot_as_multiturn --fewshot-as-multiturn/--fewshot-as-one-turn: Write examples as turns
            of the chat. (default: multiturn with --apply-chat-template)
        gen_kwargs NAME=VALUE,...: Generation settings that override the tasks', such as
            max_gen_toks=64.
        batch_size: Batch size. (default: the largest that fits)
        engine: Engine: layerswap's own, or transformers or vLLM one by one.
        engine_args NAME=VALUE,...: Arguments of vLLM, such as gpu_memory_utilization=0.8.
    """

    tasks: list[str] = []
    include: list[str] = []
    limit: int | None = None
    num_fewshot: int | None = None
    fewshot_seed: int = 1234  # lm-eval's own
    apply_chat_template: bool | str = False  # a text names one of several templates
    think: Literal["on", "off", "cut"] | None = None
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: str | dict[str, Any] | None = None
    batch_size: int | Literal["auto"] = "auto"  # `auto`: by tokens and memory
    # `sweep` answers for all compositions of the same experts together; `hf` loads each model
    # through transformers, and `vllm` through vLLM from the folder of its merge.
    engine: Literal["sweep", "vllm", "hf"] = "sweep"
    engine_args: str | dict[str, Any] = {}
