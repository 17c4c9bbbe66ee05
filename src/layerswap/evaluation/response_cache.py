"""Disk cache of compositions' answers to lm-eval requests."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from layerswap.engine.decoding import Sampling
from layerswap.engine.rows import eos_tokens, pad
from layerswap.engine.sweep import ROWS, Sweep
from layerswap.ground.errors import EvaluationError, LayerswapError
from layerswap.merge.metadata import record
from layerswap.merge.plan import Plan

Answer = list[Any]
"""Log-probability and greediness of a continuation, or the tokens of a generation."""


@contextmanager
def nothing_if_refused(path: Path) -> Iterator[None]:
    """Remove a new folder of answers if the user's mistake ends the run before the first answer."""
    new = not path.parent.exists()
    try:
        yield
    except LayerswapError:
        empty = False  # an unreadable store is kept
        with suppress(EvaluationError):
            if new:
                with closing(AnswerStore(path)) as store:
                    empty = store.empty
        if empty:
            shutil.rmtree(path.parent, ignore_errors=True)
        raise


class AnswerStore:
    """Answers by composition and request, in one SQLite file that survives a crash.

    Without a path they stay in memory. A damaged file or a full disk is an `EvaluationError`.
    `count` is called with the requests without an answer so far, and with those answered.
    """

    def __init__(
        self, path: Path | None = None, count: Callable[[int, int], None] = lambda asked, done: None
    ) -> None:
        self._path, self._count = path, count
        self._asked, self._answered = set[int](), set[int]()
        with self._damage_named():
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (composition TEXT, request TEXT, answer TEXT, "
                "PRIMARY KEY (composition, request)) WITHOUT ROWID"
            )

    @property
    def empty(self) -> bool:
        """Return True if the store holds no answer."""
        return self._database.execute("SELECT 1 FROM answers LIMIT 1").fetchone() is None

    def known(self, composition: str, requests: Iterable[str]) -> dict[str, Answer]:
        """Return the stored answers of a composition to some requests."""
        wanted = set(requests)
        with self._damage_named():
            rows = self._database.execute(
                "SELECT request, answer FROM answers WHERE composition = ?", (composition,)
            )
            known = {request: json.loads(answer) for request, answer in rows if request in wanted}
            if not all(isinstance(answer, list) for answer in known.values()):
                raise ValueError("it holds other values")
        self._asked |= {hash((composition, text)) for text in wanted if text not in known}
        self._count(len(self._asked), len(self._answered))
        return known

    def keep(self, answers: Iterable[tuple[str, str, Answer]]) -> None:
        """Store answers by composition and request; they are on disk when this returns."""
        rows = [(key, request, json.dumps(answer)) for key, request, answer in answers]
        with self._damage_named():
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", rows)
            self._database.execute("COMMIT")
        self._answered |= {hash(row[:2]) for row in rows}
        self._count(len(self._asked), len(self._answered))

    def adopt(self, path: Path, compositions: Iterable[str]) -> int:
        """Copy answers of some compositions from another store; return the number of new ones."""
        before = self._database.total_changes
        with self._damage_named():
            self._database.execute("ATTACH DATABASE ? AS other", (str(path),))
            try:
                self._database.executemany(
                    "INSERT OR IGNORE INTO answers SELECT * FROM other.answers "
                    "WHERE composition = ?",
                    [(composition,) for composition in compositions],
                )
            finally:
                self._database.execute("DETACH DATABASE other")
        return self._database.total_changes - before

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            full = "full" in str(error)
            advice = "make room and run it again" if full else "delete it to compute them again"
            raise EvaluationError(
                f"{self._path}: cannot be used to keep answers ({error}); {advice}"
            ) from None


def composition_key(plan: Plan) -> str:
    """Hash everything that decides a composition's weights: blends, sources and dtype."""
    known = record(plan)
    parts = [
        {name: known[name] for name in ("composition", "sources")},
        plan.recipe.dtype,
        plan.alignment is not None and plan.recipe.tokenizer,
    ]
    return _hash(parts)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _configuration_key(model: Any) -> str:
    """Hash a model's configurations and dtype, which affect its answers beside its weights."""

    def relevant(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {str(key): relevant(part) for key, part in node.items() if key not in IRRELEVANT}

    configs = (model.config, model.generation_config)
    return _hash([str(model.dtype), *(relevant(config.to_dict()) for config in configs)])


IRRELEVANT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of a configuration that do not decide answers."""
FEWEST_ROWS, USUAL_TOKENS = 16, 4096
"""Smallest number of rows in a batch, and tokens in a batch of short rows, if memory allows."""


class ResponseCache:
    """The answers of several compositions, computed together and stored.

    Without a store, answers stay in memory. Without a batch size, a batch has 16 rows, or more
    short rows up to 4,096 tokens, or as many as fit.
    """

    def __init__(
        self,
        sweep: Sweep,
        members: Sequence[int],
        store: AnswerStore | None,
        batch_size: int | None,
    ) -> None:
        self.members = list(members)
        self._sweep, self._store = sweep, store or AnswerStore()
        self._batch_size = batch_size
        self._keys = [composition_key(sweep.plans[member]) for member in members]
        self._model_key = _configuration_key(sweep.model)

    def scores(self, number: int, asked: Sequence[Any], *, bound: int, dtype: str) -> list[Answer]:
        """Score continuations under the `number`-th member: log-probability and greediness.

        `asked` are token ids of context and continuation, `bound` is the largest number of tokens
        that the model reads, and `dtype` is that of the softmax.
        """
        keys = [_hash(["score", c, r, bound, dtype, self._model_key]) for c, r in asked]
        for requests, members in self._missing(keys).items():
            longest = max(min(bound, len(asked[i][0]) + len(asked[i][1])) for i in requests)
            for part in self._sweep.iter_loglikelihood(
                [asked[i] for i in requests],
                members=list(members),
                batch_size=self._batch_size or self._batch(list(members), longest),
                max_length=bound,
                softmax_dtype=dtype,
            ):
                self._store.keep(
                    (
                        members[member],
                        keys[requests[request]],
                        [float(part.logprob[row, column]), bool(part.greedy[row, column])],
                    )
                    for row, member in enumerate(part.members)
                    for column, request in enumerate(part.requests)
                )
        return self._answers(number, keys)

    def texts(
        self,
        number: int,
        prompts: Sequence[tuple[int, ...]],
        settings: Mapping[str, Any],
        tokenizer: Any,
    ) -> list[Answer]:
        """Generate tokens after prompts with the `number`-th member."""
        known = repr(sorted(settings.items())), self._model_key
        keys = [_hash(["text", prompt, *known]) for prompt in prompts]
        for requests, members in self._missing(keys).items():
            batch = None
            if self._batch_size is None:
                longest, new = max(len(prompts[i]) for i in requests), settings["max_new_tokens"]
                batch = self._batch(list(members), longest, new)
            for part in self._sweep.iter_generate(
                [prompts[i] for i in requests],
                members=list(members),
                tokenizer=tokenizer,
                batch_size=batch,
                **settings,
            ):
                self._store.keep(
                    (members[member], keys[requests[prompt]], list(text.tokens))
                    for (member, prompt), text in part
                )
        return self._answers(number, keys)

    def _batch(self, members: Sequence[int], tokens: int, new_tokens: int = 0) -> int:
        """Choose the rows or prompts of a batch."""
        usual = (
            max(1, ROWS // len(members)) if new_tokens
            else max(FEWEST_ROWS, USUAL_TOKENS // tokens)
        )  # fmt: skip
        fitting = self._sweep.fit_batch_size(tokens, new_tokens=new_tokens, members=members)
        return min(usual, fitting)

    def _missing(self, keys: Sequence[str]) -> dict[tuple[int, ...], dict[int, str]]:
        """Group members by their unanswered requests; members are given with their keys.

        Members that lack the same requests answer them together.
        """
        distinct = {key: i for i, key in reversed(list(enumerate(keys)))}
        groups: dict[tuple[int, ...], dict[int, str]] = {}
        for member, composition in zip(self.members, self._keys, strict=True):
            known = self._store.known(composition, distinct)
            absent = tuple(sorted(i for key, i in distinct.items() if key not in known))
            if absent:
                groups.setdefault(absent, {})[member] = composition
        return groups

    def _answers(self, number: int, keys: Sequence[str]) -> list[Answer]:
        known = self._store.known(self._keys[number], keys)
        return [known[key] for key in keys]


# --- lm-eval's model class over a sweep ---

DEFAULT_TOP_K = 50
"""The `top_k` of transformers where nothing sets it."""
PROMPTS = 256
"""Prompts that lm-eval hands over together; the cache decides how many run together."""


def cached_model(sweep: Sweep, tokenizer: Any, cache: ResponseCache) -> Any:
    """Open a sweep as one of lm-eval's models.

    Its attribute `number` is the position, among the members of the cache, of the composition that
    answers.
    """
    import torch
    from lm_eval.models.huggingface import HFLM

    class CachedModel(HFLM):  # type: ignore[misc]
        """lm-eval's model of one composition at a time, with cached answers."""

        def __init__(self, sweep: Sweep, tokenizer: Any, cache: ResponseCache) -> None:
            super().__init__(
                pretrained=sweep.switch(cache.members[0]), tokenizer=tokenizer, batch_size=PROMPTS
            )
            self.number = self.answered = 0
            self._responses = cache

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            asked = [(tuple(context), tuple(rest)) for _, context, rest in requests]
            dtype = str(self.model.dtype).removeprefix("torch.")
            scores = self._responses.scores(self.number, asked, bound=self.max_length, dtype=dtype)
            self.answered += len(scores)
            return [(float(logprob), bool(greedy)) for logprob, greedy in scores]

        def _model_generate(
            self, context: Any, max_length: int, stop: list[str], **settings: Any
        ) -> Any:
            new, mask = max_length - context.shape[1], settings.pop("attention_mask")
            ends = eos_tokens(self.model)
            own = self.model.generation_config
            asked = {
                "max_new_tokens": new, "stop": list(stop), "sampling": _sampling(settings, own)
            }  # fmt: skip
            prompts = [
                tuple(row[kept.bool()].tolist()) for row, kept in zip(context, mask, strict=True)
            ]
            written = self._responses.texts(self.number, prompts, asked, self.tokenizer)
            self.answered += len(written)
            # Decoding skips special tokens, but not every token that ends a text is one.
            written = [tokens[:-1] if tokens[-1:] and tokens[-1] in ends else tokens
                       for tokens in written]  # fmt: skip
            texts = pad(written, fill=self.tokenizer.pad_token_id, width=new).to(context.device)
            return torch.cat([context, texts], dim=1)

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(CachedModel, name, _counted(getattr(HFLM, name)))
    return CachedModel(sweep, tokenizer, cache)


def _counted(method: Any) -> Any:
    """Check that the cache answers what a method of lm-eval asks; another model would else answer.

    A rolling request asks for one window or more.
    """

    def ask(self: Any, requests: Any, **named: Any) -> Any:
        before = self.answered
        # lm-eval's bar would show only one composition.
        answers = method(self, requests, **{**named, "disable_tqdm": True})
        answered, rolling = self.answered - before, method.__name__.endswith("rolling")
        if answered < len(requests) or (answered > len(requests) and not rolling):
            raise EvaluationError(
                f"lm-eval asked {len(requests):,} requests by {method.__name__}, and the sweep "
                f"answered {answered:,}; use a version of lm-eval that docs/support.md names, or "
                "--engine hf"
            )
        return answers

    return ask


def _sampling(settings: Mapping[str, Any], own: Any) -> Sampling | None:
    """Convert lm-eval's generation settings to the engine's; None means greedy decoding.

    As in transformers, missing settings come from the generation configuration.
    """
    temperature = settings.get("temperature")
    draws = settings.get("do_sample")
    if draws is None:
        draws = bool(temperature)
    extra = set(settings) - {"temperature", "do_sample", "top_k", "top_p"}
    if extra:
        raise EvaluationError(f"the sweep cannot generate with {', '.join(sorted(extra))}")
    if not draws:
        return None

    top_k, top_p = (settings.get(name, getattr(own, name, None)) for name in ("top_k", "top_p"))
    return Sampling(
        temperature=temperature or 1.0,
        top_k=DEFAULT_TOP_K if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
    )
