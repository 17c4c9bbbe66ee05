"""Proof that a GGUF file answers as a folder: tensors, tokens, chat, end of a turn, likelihoods.

llama.cpp (the package xllamacpp) serves the file on this machine, and transformers runs the folder
in float32. Nothing of llama.cpp is reimplemented here: it is asked.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from layerswap.checkpoint.gguf_file import GGUFFile
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.checkpoint.read import FLOAT_DTYPES, open_file, read_floats
from layerswap.deploy.description import describe, main_type, stops_of
from layerswap.evaluation.statistics import Interval, mean_interval
from layerswap.ground.errors import EvaluationError, LayerswapError, one_line
from layerswap.ground.types import Log
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel

LIKELIEST = 1000
"""Tokens of which llama.cpp reports the likelihood; the others count together."""
LONGEST = 64
"""Most tokens of a line in which likelihoods are compared."""
POSITIONS = 200
"""Positions of a language in which likelihoods are compared."""
PIECE, BATCH = 4096, 1 << 20
"""Elements whose error is measured together, and elements that are read at once."""
ADDED = 256
"""Most added tokens that are compared as texts."""
ROUNDING = {
    "F64": 1e-4, "F32": 1e-4, "F16": 1e-2, "BF16": 1e-2, "Q8_0": 0.02, "Q5_1": 0.1, "Q5_0": 0.1,
    "Q6_K": 0.05, "Q5_K": 0.1,
}  # fmt: skip
"""Largest rounding error by type: the norm of the error of `PIECE` elements over their norm."""
COARSE = 0.5
"""The same for types of four bits and fewer."""
EXACT = 0.1
"""Largest mean divergence of a float type, in nats."""
DIVERGENT = 3.0
"""Largest mean divergence of any type, in nats; four bits cost up to 1.4 (docs/deploy.md)."""
SYSTEM, USER, ANSWER = "Answer in one sentence.", "What is 2 + 3?", "2 + 3 is 5."
"""Messages that every chat template is tried with."""
MANY = 50
"""Repetitions of a message or a turn, for templates that depend on length."""
TRICKY = "It's 12345.67%:  x_1 = f(y)\n\n\tNdió मैं 日本語 తెలుగు"
"""Text that pre-tokenizers split differently: digits, spaces, line ends, letters and marks."""


@dataclass(frozen=True)
class Check:
    """One property of the file: the number of comparisons, and a line for each difference."""

    name: str  # `metadata`, `tensors`, `tokens`, `template` or `stop`
    tried: int
    problems: tuple[str, ...] = ()
    note: str = ""  # a limit, such as a folder without a chat template


@dataclass(frozen=True)
class Agreement:
    """Distance of the file's next-token distribution from the folder's, in one language.

    `same` is the share of positions with the same likeliest token. `divergence_nats` is the mean
    Kullback-Leibler divergence over the file's `LIKELIEST` tokens, with the rest as one.
    """

    language: str
    positions: int
    same: Interval
    divergence_nats: float


@dataclass(frozen=True)
class Proof:
    """All findings on one file."""

    file: str
    kind: str
    checks: tuple[Check, ...]
    agreements: tuple[Agreement, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Every difference that a deployed file must not have."""
        most = EXACT if self.kind in ("F64", "F32", "F16", "BF16") else DIVERGENT
        far = (agreement for agreement in self.agreements if agreement.divergence_nats > most)
        return [
            *(f"{check.name}: {line}" for check in self.checks for line in check.problems),
            *(f"likelihoods: {agreement.language}: {agreement.divergence_nats:.2f} nats from the "
              "folder, more than rounding explains" for agreement in far),
        ]  # fmt: skip


class Reference:
    """A folder of safetensors with its tokenizer and its model in float32, loaded once."""

    def __init__(self, source: str) -> None:
        self.folder = open_checkpoint(source)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return load_tokenizer(self.folder.folder, named=self.folder.identity)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in float32."""
        return load_causal_lm(self.folder.folder, dtype="float32", named=self.folder.identity)


def prove(
    source: str | Reference,
    file: Path,
    lines: Mapping[str, Sequence[str]],
    *,
    positions: int = POSITIONS,
    log: Log = lambda line: None,
) -> Proof:
    """Compare a GGUF file with a folder of safetensors.

    Args:
        source: the folder, or a Hub id; a `Reference` to load it once for several files.
        file: the GGUF file, converted by any program.
        lines: texts to compare, by language.
        positions: positions of each language whose likelihoods are compared; 0 for none.
        log: called with a line for each step.

    Raises:
        LayerswapError: one of the two cannot be read, or an extra is missing.
    """
    need_extras("the proof", "deploy")
    if not is_gguf(str(file)):
        raise EvaluationError(f"{file}: not a GGUF file (.gguf)")
    reference = source if isinstance(source, Reference) else Reference(source)
    folder, opened = reference.folder, open_checkpoint(str(file))
    log(f"{file.name}: comparing metadata and tensors")
    checks, agreements = list(_stored(folder, opened)), []
    is_pair = any(check.name == "tensors" for check in checks)
    try:
        with _served(file) as llama:
            log(f"{file.name}: comparing tokens, chat and the end of a turn")
            tokenizer = reference.tokenizer
            texts = [SYSTEM, USER, ANSWER, TRICKY, *_added_texts(tokenizer)]
            texts += [line for of_language in lines.values() for line in of_language]
            checks.append(_tokens(tokenizer, llama, texts))
            checks.append(_template(tokenizer, llama))
            checks.append(_stop(tokenizer, llama, stops_of(tokenizer, folder)))
            if positions and lines and is_pair:
                log(f"{file.name}: comparing likelihoods in float32")
                agreements = [
                    _agreement(language, texts, reference, llama, positions)
                    for language, texts in lines.items()
                ]
    except _LoadError as error:
        checks.append(Check("load", 1, (str(error),)))
    return Proof(str(file), main_type(opened.tensors.values()), tuple(checks), tuple(agreements))


class _LoadError(EvaluationError):
    """llama.cpp refuses a file."""


# --- what the file stores ---


def _stored(folder: Checkpoint, opened: Checkpoint) -> Iterator[Check]:
    """Compare metadata and tensors, without running either."""
    try:
        _, description = describe(folder, opened)
        assert isinstance(opened, GGUFFile), "a GGUF file is proved"
        view = opened.as_transformers(folder, settings=False)
    except LayerswapError as error:
        yield Check("metadata", 1, (str(error),))
        return
    others = "; ".join(note for note in description.notes if note not in description.differences)
    yield Check("metadata", len(opened.metadata.spans), tuple(description.differences), others)
    floats = [name for name, info in folder.tensors.items() if info.dtype in FLOAT_DTYPES]
    wrong = []
    for name in floats:
        stored = view.tensors[name]
        far = _relative_error(folder.tensors[name], stored)
        if not far <= ROUNDING.get(getattr(stored, "stored", stored).dtype, COARSE):
            wrong.append(f"{name}: differs by up to {far:.0%} of its norm")
    yield Check("tensors", len(folder.tensors), tuple(wrong))


def _relative_error(first: TensorInfo, second: TensorInfo) -> float:
    """The largest error of a piece of a tensor over the norm of the piece in `first`."""
    import numpy as np

    squares = []
    with open_file(first.file) as a, open_file(second.file) as b:
        for start in range(0, first.elements, BATCH):
            stop = min(start + BATCH, first.elements)
            expected = read_floats(a, first, start, stop).astype(np.float64)
            change = expected - read_floats(b, second, start, stop)
            pieces = np.arange(0, stop - start, PIECE)
            squares.append([np.add.reduceat(x * x, pieces) for x in (change, expected)])
    errors, norms = np.concatenate(squares, axis=1)
    # Rounding in a piece of almost nothing counts against the tensor's usual piece.
    return float(np.sqrt(np.max(errors / np.maximum(norms, 1e-4 * norms.mean() + 1e-30))))


# --- what llama.cpp does ---


class Llama:
    """A GGUF file that llama.cpp serves on this machine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._letter = self.tokens("a")[-1]

    def ask(self, path: str, content: Mapping[str, Any]) -> Any:
        """Post JSON to the server; returns its JSON.

        Raises:
            EvaluationError: llama.cpp refuses the request.
        """
        data = json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = one_line(error.read().decode("utf-8", "replace"), 200)
            raise EvaluationError(f"llama.cpp refused {path}: {why}") from None

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with those that the file adds."""
        asked = {"content": text, "add_special": True, "parse_special": True}
        return list(self.ask("/tokenize", asked)["tokens"])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the file's template writes it."""
        return str(self.ask("/apply-template", {"messages": list(messages)})["prompt"])

    def ends(self, token: int) -> bool:
        """True if an answer ends when the model writes a token."""
        forced = {"prompt": "a", "n_predict": 4, "logit_bias": [[token, 1000.0]]}
        return bool(self.ask("/completion", forced)["stop_type"] == "eos")

    def next_tokens(self, tokens: Sequence[int]) -> dict[int, float]:
        """The log-likelihood of each of the likeliest next tokens."""
        # The server reports nothing on a token that is no whole letter, so it writes a letter.
        asked = {"prompt": list(tokens), "n_predict": 1, "n_probs": LIKELIEST, "temperature": 0.0,
                 "cache_prompt": True, "logit_bias": [[self._letter, 1000.0]]}  # fmt: skip
        (step,) = self.ask("/completion", asked)["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}


@contextmanager
def _served(file: Path) -> Iterator[Llama]:
    """Serve a file by llama.cpp on a free port of this machine."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup = 1024, 1, False
    settings.cpuparams.poll = 0  # spinning halves the speed on a machine that others use too
    settings.verbosity, settings.port, settings.use_jinja = -1, 0, True
    try:
        server = xllamacpp.Server(settings)
    except Exception as error:  # of a C++ library: no common class
        raise _LoadError(f"llama.cpp cannot load the file ({one_line(error)})") from None
    try:
        yield Llama(server.listening_address)
    finally:
        del server


def _added_texts(tokenizer: Any) -> list[str]:
    """The added tokens as texts, those with a role in the folder first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    named = [token for token in tokenizer.all_special_tokens if token in added]
    return [*dict.fromkeys([*named, *sorted(added)])][:ADDED]


def _tokens(tokenizer: Any, llama: Llama, texts: Sequence[str]) -> Check:
    """Compare the tokens of texts, id by id."""
    by_cause: dict[str, list[str]] = {}
    for text in texts:
        expected, found = tokenizer(text).input_ids, llama.tokens(text)
        if expected != found:
            line = _first_difference(tokenizer, text, expected, found)
            by_cause.setdefault(line.rpartition(": ")[2], []).append(line)
    problems = [
        lines[0] + f" (and {len(lines) - 1} more texts)" * (len(lines) > 1)
        for lines in by_cause.values()
    ]
    return Check("tokens", len(texts), tuple(problems))


def _first_difference(tokenizer: Any, text: str, expected: list[int], found: list[int]) -> str:
    """Say where two lists of tokens begin to differ, and why if that is known."""
    bos = tokenizer.bos_token_id
    at = len(commonprefix([expected, found]))  # noqa: RUF071  # of tokens, not paths
    shown = [repr(tokenizer.convert_ids_to_tokens(ids[at])) if at < len(ids) else "the end"
             for ids in (expected, found)]  # fmt: skip
    if bos is not None and found[:1] == [bos] and found[1:] == expected:
        cause = "the file adds a BOS that the folder does not"
    elif bos is not None and expected[:1] == [bos] and expected[1:] == found:
        cause = "the file adds no BOS"
    elif at < len(expected) and expected[at] in tokenizer.added_tokens_decoder:
        cause = "an added token is missing in the file"
    else:
        cause = "another pre-tokenizer or other merges"
    return (
        f"{text[:60]!r}: token {at} is {shown[0]} in the folder and {shown[1]} in the file: {cause}"
    )


def _chats(tokenizer: Any) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Conversations with and without a system message, as the folder's template writes them."""
    if not tokenizer.chat_template:
        return
    user = {"role": "user", "content": USER}
    turns = [user, {"role": "assistant", "content": ANSWER}, user]
    tried = [[user], turns, [{"role": "system", "content": SYSTEM}, user]]
    tried += [turns[:2] * MANY + [user], [{"role": "user", "content": TRICKY * MANY}]]
    for chat in tried:
        with suppress(Exception):  # a template that refuses a chat raises what it likes
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            yield chat, text


def _template(tokenizer: Any, llama: Llama) -> Check:
    """Compare rendered conversations byte by byte, and their tokens."""
    chats = list(_chats(tokenizer))
    if not chats:
        return Check("template", 0, note="the folder has no chat template")
    problems = []
    bos = tokenizer.bos_token or ""
    for chat, expected in chats:
        roles = ", ".join(message["role"] for message in chat)
        try:
            found = llama.chat(chat)
        except EvaluationError as error:
            problems.append(f"{roles}: {error}")
            continue
        # llama.cpp leaves out a BOS that it adds itself when it reads the text.
        if expected.removeprefix(bos) != found.removeprefix(bos):
            problems.append(f"{roles}: {_first_letter(expected, found, bos)}")
            continue
        encoded = tokenizer(expected, add_special_tokens=False).input_ids
        read = llama.tokens(found)
        if encoded != read:
            problems.append(f"{roles}: {_first_difference(tokenizer, expected, encoded, read)}")
    return Check("template", len(chats), tuple(problems))


def _first_letter(expected: str, found: str, bos: str) -> str:
    if bos and found == bos + expected:
        return f"the file's template writes another {bos!r} (BOS)"
    at = len(commonprefix([expected, found]))  # noqa: RUF071  # of texts, not paths
    return (
        f"from character {at} on the folder writes {expected[at : at + 40]!r}, and the file "
        f"{found[at : at + 40]!r}"
    )


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that ends an answer: the template's after an answer, otherwise EOS."""
    if tokenizer.chat_template:
        user = {"role": "user", "content": USER}
        answer = {"role": "assistant", "content": ANSWER}
        whole = ""
        with suppress(Exception):  # as above
            whole = tokenizer.apply_chat_template([user, answer], tokenize=False)
        rest = whole.rpartition(ANSWER)[2]
        tokens = tokenizer(rest, add_special_tokens=False).input_ids
        if special := [token for token in tokens if token in tokenizer.added_tokens_decoder]:
            return int(special[0])
    return tokenizer.eos_token_id  # type: ignore[no-any-return]


def _stop(tokenizer: Any, llama: Llama, stops: set[int]) -> Check:
    """Check that each stop token ends an answer of the model."""
    turn = end_of_turn(tokenizer)
    tokens = sorted(stops | ({turn} if turn is not None else set()))
    if not tokens:
        return Check("stop", 0, note="the folder names no token that ends an answer")
    problems = (
        f"the answer goes on after {tokenizer.convert_ids_to_tokens(token)!r}, "
        + ("the end of a turn" if token == turn else "at which the folder stops")
        for token in tokens
        if not llama.ends(token)
    )
    return Check("stop", len(tokens), tuple(problems))


def _agreement(
    language: str, lines: Sequence[str], reference: Reference, llama: Llama, positions: int
) -> Agreement:
    """Compare next-token distributions after the first tokens of some texts."""
    import numpy as np

    same: list[float] = []
    divergences: list[float] = []
    texts = [reference.tokenizer(line).input_ids[:LONGEST] for line in lines]
    long_enough = [tokens for tokens in texts if len(tokens) > 1]
    for number, tokens in enumerate(long_enough):
        # Positions are spread over all lines: neighbours in one line tell less.
        share = -(-(positions - len(same)) // (len(long_enough) - number))
        stops = _spread(len(tokens), share)
        if len(stops):
            rows = _log_likelihoods(reference.model, tokens)[stops - 1]
            for stop, row in zip(stops.tolist(), rows, strict=True):
                found = llama.next_tokens(tokens[:stop])
                same.append(float(max(found, key=lambda token: found[token]) == int(row.argmax())))
                divergences.append(divergence(row, found))
    if not same:
        raise EvaluationError(f"{language}: no line of two tokens to compare")
    return Agreement(
        language, len(same), mean_interval(np.array(same)), float(np.mean(divergences))
    )


def _spread(tokens: int, count: int) -> npt.NDArray[np.int64]:
    """Positions in a line after 1 to `tokens` tokens: the middles of `count` equal parts."""
    import numpy as np

    count = max(0, min(count, tokens))
    return (np.arange(count) * 2 + 1) * tokens // (2 * max(1, count)) + 1


def _log_likelihoods(model: Any, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-likelihoods of every next token, `[tokens, vocabulary]`, by transformers."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1).numpy()  # type: ignore[no-any-return]


def divergence(expected: npt.NDArray[np.float64], found: Mapping[int, float]) -> float:
    """The Kullback-Leibler divergence in nats, with the tokens outside `found` as one.

    Merging outcomes never raises the divergence, so it is a lower bound.
    """
    import numpy as np

    listed = np.fromiter(found, np.int64)
    log_q = np.fromiter(found.values(), np.float64)
    log_p = expected[listed]
    p = np.exp(log_p)
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - np.exp(log_q).sum(), 1e-12)
    return float(max(0.0, (p * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q)))
