"""Answers for many compositions from one running vLLM, which is re-pointed from one to the next.

vLLM starts once, on an expert's own checkpoint. Each composition's tensors are computed by the
code that writes checkpoints, and loaded into the running engine by vLLM's own loader, which knows
its fused projections; nothing is written and nothing is started again.

Compositions of adapters over one base are adapters themselves: vLLM starts on the base, and each is
a LoRA request.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from layerswap._types import EngineName
from layerswap.checkpoint.loading import check_dtype
from layerswap.compose import Blend, Composition
from layerswap.engine.generation import Generation, StoppingCriteria
from layerswap.engine.rows import Question
from layerswap.engine.scoring import Scores, check_prompts, eos_tokens, rows_for, vocabulary
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import LayerCounts
from layerswap.engine.virtual import Measurements
from layerswap.errors import EvaluationError, MergeError
from layerswap.merge import Plan
from layerswap.merge.adapters import served_rank
from layerswap.merge.layout import with_base
from layerswap.merge.loading import build_empty_model, load_tensor
from layerswap.merge.lora import adapted_modules, as_adapter, saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerswap.engine.generation import Sampling

PROBES, PROBE_TOKENS, PROBE_NEW = 4, 24, 8
"""Prompts of the opening check, their tokens, and the tokens that are written after each."""
TOLERANCE = 1e-3
"""Largest difference of log-probabilities, in nats, that the opening check takes for rounding."""
NOT_VLLM = "--engine-args (engine_args) are for the engine vllm"


class VllmSweep:
    """Compositions that one vLLM answers for, one after the other.

    Where all compositions are adapters over one base, each is a LoRA request and the base stays
    as it is; it is checked that a request changes the answers. Otherwise it is checked, before the
    first answer, that the engine, re-pointed to another composition and back, gives the
    log-probabilities and greedy tokens that it gave when it was fresh.

    Args:
        plans: the compositions; their tensors have the shapes of the experts'.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        engine: further arguments of `vllm.LLM`, such as `gpu_memory_utilization`.

    Raises:
        EvaluationError: vLLM is not installed, or cannot run these models.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        dtype: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        check_dtype(dtype)
        if not plans:
            raise EvaluationError("there is no composition to evaluate")
        self.plans: list[Plan] = []
        self._measurements = Measurements()
        self._arguments = dict(engine or {})
        self._dtype = dtype or plans[0].recipe.dtype or "auto"
        self._adapters: _LoraRequests | None = _LoraRequests()
        self._open(plans)
        self.add(plans)

    def _open(self, plans: Sequence[Plan]) -> None:
        """Start vLLM, or take the one that runs, for all of these compositions."""
        if self._adapters is not None and not all(map(self._adapters.adapter, plans)):
            self._adapters = None
        served = {} if self._adapters is None else _lora_arguments(plans)
        self._engine = _engine_for(plans[0], self._dtype, {**served, **self._arguments})
        self._llm = self._engine.llm

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def model(self) -> PreTrainedModel:
        """The model without weights: its configuration says what vLLM runs."""
        return self._engine.model

    def add(self, plans: Sequence[Plan]) -> list[int]:
        """More compositions; returns their positions.

        Raises:
            EvaluationError: one has tensors of other names or shapes than the experts.
        """
        for plan in plans:
            if _shapes(plan) != self._engine.shapes:
                raise EvaluationError(
                    "the engine vllm evaluates compositions with the experts' own tensors; these "
                    "differ in name or shape (another depth or vocabulary). Use --engine sweep"
                )
        self.plans += plans
        if self._adapters is not None:
            self._open(self.plans)
        if not self._engine.checked:
            if self._adapters is not None:
                self._check_adapters(self._adapters)
            else:
                self._check()
        return list(range(len(self.plans) - len(plans), len(self.plans)))

    def choose(self, members: Sequence[int] | None) -> list[int]:
        """Positions of compositions; all when None."""
        return list(range(len(self))) if members is None else list(members)

    def counts(self, members: Sequence[int] | None = None) -> LayerCounts:
        """How many layers run per batch: all of every composition."""
        runs = len(self.choose(members)) * self._engine.fresh.composition.layers
        return LayerCounts(runs, runs, 1)

    def switch(self, member: int) -> PreTrainedModel:
        """The model without weights; vLLM itself is re-pointed when it is asked."""
        return self.model

    def iter_loglikelihood(
        self,
        requests: Sequence[Question],
        *,
        members: Sequence[int] | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> Iterator[Scores]:
        """Log-probabilities of continuations, one composition after the other.

        Args:
            requests: token ids of context and continuation, neither empty.
            members: positions of the compositions; all when None.
            max_length: most tokens that the model reads; longer contexts lose tokens on the left.
            settings: those of a batch, which vLLM does not need.

        Yields:
            One composition's answers to all requests.
        """
        import numpy as np
        from vllm import SamplingParams

        rows = rows_for(self.model, requests, max_length)
        asked = [index for row in rows for index in row.requests]
        # A row lacks the last token of its continuations, so each request has a text of its own.
        texts = [
            [*row.tokens[:end], requests[index][1][-1]]
            for row in rows
            for index, end in zip(row.requests, row.ends, strict=True)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        for member in self.choose(members):
            request = self._point_to(self.plans[member])
            found = self._llm.generate(
                [{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False,
                lora_request=request,
            )  # fmt: skip
            logprob, greedy, tokens = [], [], []
            for text, output, index in zip(texts, found, asked, strict=True):
                length = len(requests[index][1])
                known = output.prompt_logprobs[-length:]
                own = [places[token] for token, places in zip(text[-length:], known, strict=True)]
                values = np.array([one.logprob for one in own], dtype=np.float64)
                logprob.append(float(values.sum()))
                greedy.append(all(one.rank == 1 for one in own))
                tokens.append(values[None])
            yield Scores([member], asked, np.array([logprob]), np.array([greedy]), tokens)

    def iter_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        members: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        batch_size: int | None = None,
    ) -> Iterator[list[tuple[tuple[int, int], Generation]]]:
        """What compositions write after prompts, one composition after the other.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: most tokens that are written after a prompt.
            members: positions of the compositions; all when None.
            stop: strings that end a text.
            tokenizer: not needed; vLLM has that of the expert.
            sampling: how to draw tokens; greedy when None. The draws are vLLM's own.
            batch_size: not needed; vLLM schedules by itself.

        Yields:
            Per composition `((composition, prompt), generation)`.
        """
        from vllm import SamplingParams

        check_prompts(self.model, prompts, max_new_tokens)
        ends = eos_tokens(self.model)
        StoppingCriteria(max_new_tokens, ends, tuple(stop), tokenizer)  # refuses what cannot be
        drawn = {} if sampling is None else {
            "top_k": sampling.top_k or -1, "top_p": sampling.top_p, "seed": sampling.seed,
        }  # fmt: skip
        asked = SamplingParams(
            temperature=0.0 if sampling is None else sampling.temperature,
            max_tokens=max_new_tokens, stop=list(stop) or None, stop_token_ids=sorted(ends),
            ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, **drawn,
        )  # fmt: skip
        for member in self.choose(members):
            request = self._point_to(self.plans[member])
            found = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False,
                lora_request=request,
            )  # fmt: skip
            yield [
                ((member, number), _generation(output.outputs[0], ends))
                for number, output in enumerate(found)
            ]

    def _point_to(self, plan: Plan) -> Any:
        """Load a composition's tensors into the running engine, or give its LoRA request."""
        if self._adapters is not None:
            return self._adapters.request(plan)
        if plan is self._engine.current:
            return None
        self._engine.current = None
        self._llm.collective_rpc(_load, args=(_Tensors(plan, self._measurements),))
        self._llm.reset_prefix_cache()
        self._engine.current = plan
        return None

    def _check_adapters(self, adapters: _LoraRequests) -> None:
        """Refuse an engine that a LoRA request does not change.

        Raises:
            EvaluationError: it answers with an adapter as without.
        """
        request = next(filter(None, map(adapters.request, self.plans)), None)
        if request is None:
            return
        if _probe(self._llm, self.model, request) == self._engine.answers:
            raise EvaluationError(
                "vLLM answers with an adapter as without; it may not apply adapters to this "
                "architecture. Use --engine sweep"
            )
        self._engine.checked = True

    def _check(self) -> None:
        """Refuse an engine that re-pointing changes.

        Raises:
            EvaluationError: it answers otherwise than when it was fresh.
        """
        alone = self._engine.fresh
        other = next((p for p in self.plans if p.composition != alone.composition), None)
        if other is None:
            return
        fresh = self._engine.answers
        self._point_to(other)
        moved = _probe(self._llm, self.model)
        self._point_to(alone)
        again = _probe(self._llm, self.model)
        same = all(
            written == before and max(abs(a - b) for a, b in zip(p, q, strict=True)) <= TOLERANCE
            for (p, before), (q, written) in zip(fresh, again, strict=True)
        )
        if not same or moved == fresh:
            raise EvaluationError(
                "vLLM answers otherwise after its weights were loaded again than when it was "
                "fresh; this version cannot be re-pointed. Use --engine sweep"
            )
        self._engine.checked = True


_Answers = list[tuple[list[float], list[int]]]
"""Per prompt of the opening check the log-probabilities, and the tokens that were written."""


@dataclass
class _Engine:
    """A running vLLM.

    Attributes:
        llm: the engine.
        fresh: what it was started with.
        model: the same without weights.
        shapes: of every tensor, by name.
        current: what it answers for now; None while that changes.
        answers: to the prompts of the opening check, before anything was loaded into it.
        checked: whether it was seen that it can be re-pointed.
    """

    llm: Any
    fresh: Plan
    model: PreTrainedModel
    shapes: dict[str, tuple[int, ...]]
    current: Plan | None
    answers: _Answers
    checked: bool = False


_RUNNING: dict[str, _Engine] = {}
"""The engine that was started last, by what it was started with: it takes most of a GPU."""


def _engine_for(plan: Plan, dtype: str, arguments: Mapping[str, Any]) -> _Engine:
    """The running engine, where it suits, or a new one in its place."""
    shapes = _shapes(plan)
    config = json.dumps(plan.reference.config, sort_keys=True, default=str)
    key = repr((dtype, sorted(arguments.items()), sorted(shapes.items()), config))
    if key not in _RUNNING:
        _RUNNING.clear()
        gc.collect()
        fresh = _expert_alone(plan)
        llm = _start(fresh, dtype, arguments)
        model = build_empty_model(fresh)
        answers = _probe(llm, model)
        _RUNNING[key] = _Engine(llm, fresh, model, _shapes(fresh), fresh, answers)
    return _RUNNING[key]


def _probe(llm: Any, model: PreTrainedModel, request: Any = None) -> _Answers:
    """What an engine answers to the prompts of the opening check, always the same ones."""
    from vllm import SamplingParams

    draw = random.Random(0)
    tokens = range(vocabulary(model))
    texts = [{"prompt_token_ids": draw.choices(tokens, k=PROBE_TOKENS)} for _ in range(PROBES)]
    asked = SamplingParams(temperature=0.0, max_tokens=PROBE_NEW, prompt_logprobs=0,
                           logprobs=0, ignore_eos=True)  # fmt: skip
    found = llm.generate(texts, asked, use_tqdm=False, lora_request=request)
    return [(_own_logprobs(output), list(output.outputs[0].token_ids)) for output in found]


def open_engine(
    plans: Sequence[Plan],
    *,
    engine: EngineName = "sweep",
    device: str = "cpu",
    dtype: str | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Sweep | VllmSweep:
    """Compositions behind the engine that is asked for.

    Args:
        plans: the compositions.
        engine: `sweep` answers for all compositions together; `vllm` for one after the other.
        device: where the models of `sweep` run.
        dtype: of the models; as stored when None.
        engine_args: further arguments of `vllm.LLM`.

    Raises:
        EvaluationError: the engine cannot run them.
    """
    if engine == "vllm":
        return VllmSweep(plans, dtype=dtype, engine=engine_args)
    if engine_args:
        raise EvaluationError(NOT_VLLM)
    return Sweep(plans, device=device, dtype=dtype)


_NUMBERS = count(1)
"""Of LoRA requests; an engine keeps what it loaded under one for as long as it runs."""


class _LoraRequests:
    """Compositions of adapters, each written once as an adapter that vLLM reads."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="layerswap-")
        self._known: dict[int, tuple[Plan, Plan | None]] = {}
        self._written: dict[int, Any] = {}

    def adapter(self, plan: Plan) -> Plan | None:
        """The same composition as an adapter; None where it is more than vLLM can serve."""
        if id(plan) not in self._known:
            self._known[id(plan)] = plan, _as_adapter(plan)
        return self._known[id(plan)][1]

    def request(self, plan: Plan) -> Any:
        """The LoRA request of a composition; None for the base alone."""
        from vllm.lora.request import LoRARequest

        if id(plan) not in self._written:
            adapter, request = self.adapter(plan), None
            assert adapter is not None, "all compositions are adapters"
            if next(adapted_modules(adapter), None) is not None:
                number = next(_NUMBERS)
                folder = Path(self._folder.name) / str(number)
                adapter.save(folder)
                request = LoRARequest(str(number), number, str(folder))
            self._written[id(plan)] = request
        return self._written[id(plan)]


def _lora_arguments(plans: Sequence[Plan]) -> dict[str, Any]:
    """What vLLM has to be started with to serve compositions of adapters.

    The largest rank that any of them can have, and the modules that they adapt: vLLM cannot give
    log-probabilities of prompts while it holds room for an adapter of the head.
    """
    adapters = [
        [expert.adapter.modules for expert in plan.experts.values() if expert.adapter is not None]
        for plan in plans
    ]
    ranks = (
        sum(max((low.rank for low in one.values()), default=1) for one in modules)
        for modules in adapters
    )
    names = {path.rpartition(".")[2] for modules in adapters for one in modules for path in one}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": served_rank(max(ranks)),
        "lora_target_modules": sorted(names),
    }


def _as_adapter(plan: Plan) -> Plan | None:
    """The same composition as an adapter that vLLM can serve; None where it is more than that."""
    if plan.base is None or any(expert.adapter is None for expert in plan.used.values()):
        return None
    try:
        found = as_adapter(plan)
    except MergeError:  # an operation on adapters gives full weights
        return None
    outside = any("layers." not in path for path, _ in adapted_modules(found))
    return None if outside or next(saved_tensors(found), None) is not None else found


class _Tensors:
    """The tensors of a composition, computed where they are iterated.

    Args:
        plan: the composition.
        measurements: what its operations know of the whole model.
    """

    def __init__(self, plan: Plan, measurements: Measurements) -> None:
        self.sources = measurements.sources(plan)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, source in self.sources.items():
            yield name, load_tensor(source.tensor, dict(source.thresholds))


def _load(worker: Any, tensors: _Tensors) -> None:
    """Load tensors into a worker of vLLM, in the format of checkpoints."""
    worker.reload_weights(weights_iterator=iter(tensors))


def _start(plan: Plan, dtype: str, arguments: Mapping[str, Any]) -> Any:
    """VLLM on the one checkpoint that a plan takes every place from."""
    if arguments.get("tensor_parallel_size", 1) == 1:
        # In this process, so that tensors need not be copied to another one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    else:
        # Every worker computes its tensors itself: what is sent is a function, not data.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # Its lines would be among the results on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM
    except ImportError:
        raise EvaluationError("the engine vllm needs vLLM: pip install vllm") from None
    (name,) = plan.composition.experts
    expert = with_base(plan.experts, plan.base)[name]
    try:
        return LLM(
            model=str(expert.folder), dtype=dtype, enforce_eager=True, trust_remote_code=False,
            disable_log_stats=True, use_tqdm_on_load=False, **{"max_logprobs": 1, **arguments},
        )  # fmt: skip
    except (ValueError, RuntimeError, TypeError) as error:
        why = " ".join(str(error).split())[:300]
        raise EvaluationError(f"vLLM does not start on {expert.source}: {why}") from None


def _expert_alone(plan: Plan) -> Plan:
    """The first full checkpoint among a plan's experts, or its base, alone.

    Raises:
        EvaluationError: there is none; vLLM starts on a checkpoint on disk.
    """
    full = [name for name, expert in plan.used.items() if expert.adapter is None]
    names = [*full, *(["base"] if plan.base is not None else [])]
    if not names:
        raise EvaluationError("the engine vllm starts on a full checkpoint, but all are adapters")
    alone = Composition.build(plan.composition.layers, lambda place: Blend.of(names[0]))
    return plan.with_composition(alone)


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in plan.tensors}


def _own_logprobs(output: Any) -> list[float]:
    """The log-probabilities of a prompt's own tokens, and of those that were written."""
    prompt = [next(iter(places.values())).logprob for places in output.prompt_logprobs if places]
    written = output.outputs[0].logprobs
    return prompt + [next(iter(places.values())).logprob for places in written]


def _generation(written: Any, ends: frozenset[int]) -> Generation:
    tokens = tuple(written.token_ids)
    if tokens and tokens[-1] in ends:
        return Generation(tokens, "eos")
    return Generation(tokens, "length" if written.finish_reason == "length" else "stop")
