"""The `Modelfile` of Ollama for a folder: chat template, end of a turn, sampling."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from layerswap.checkpoint.loading import load_generation_config, load_tokenizer
from layerswap.deploy.description import added_bos
from layerswap.deploy.proof import end_of_turn

SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}  # fmt: skip
"""Settings of `generation_config.json`, with Ollama's names."""
Sides = dict[str, tuple[str, str]]
"""The texts that a chat template writes before and after a message, by role."""


def sides_of(tokenizer: Any) -> tuple[str, Sides] | None:
    """Find the texts around the messages of each role by rendering conversations.

    The first text is written before a conversation without a system message. A BOS that llama.cpp
    adds is left out. None for a template that is no list of turns.
    """
    bos = added_bos(tokenizer)
    names = {role: f"\0{role}\0" for role in ("system", "user", "assistant", "again")}

    def render(*roles: str, opened: bool = True) -> str:
        chat = [
            {"role": "user" if role == "again" else role, "content": names[role]} for role in roles
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened)
        return str(text).removeprefix(bos)

    def written(*roles: str) -> str:
        texts = ["" if roles[0] == "system" else opening]
        for role in roles:
            before, after = sides["user" if role == "again" else role]
            texts.append(before + names[role] + after)
        return "".join([*texts, sides["assistant"][0]])

    sides: Sides = {}
    opening = ""
    try:
        start, rest = render("user").split(names["user"])
        after_user = render("user", opened=False).split(names["user"])[1]
        after_answer = render("user", "assistant", opened=False).split(names["assistant"])[1]
        between = render("user", "assistant", "again").split(names["assistant"])[1]
        before_user = between.split(names["again"])[0].removeprefix(after_answer)
        opening = start.removesuffix(before_user)
        sides["user"] = before_user, after_user
        sides["assistant"] = rest.removeprefix(after_user), after_answer
        with suppress(Exception):  # a template that refuses system messages raises what it likes
            before, left = render("system", "user").split(names["system"])
            sides["system"] = before, left.split(names["user"])[0].removesuffix(before_user)
        chats = [("user",), ("user", "assistant", "again")]
        chats += [("system", "user", "assistant", "again")] if "system" in sides else []
        same = all(written(*roles) == render(*roles) for roles in chats)
    except Exception:  # as above
        return None
    return (opening, sides) if same else None


def ollama_template(opening: str, sides: Sides) -> str | None:
    """Write a chat template in Ollama's language; None if a text cannot stand there."""
    if any(
        "{{" in text or '"""' in text for pair in [(opening,), *sides.values()] for text in pair
    ):
        return None
    branches = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for role, (before, after) in sides.items()
    )
    start = f"{{{{ if not .System }}}}{opening}{{{{ end }}}}" if opening else ""
    loop = f"{{{{ range .Messages }}}}{{{{ {branches}{{{{ end }}}}{{{{ end }}}}"
    return start + loop + sides["assistant"][0]


def modelfile(folder: Path, file: str) -> str:
    """Write Ollama's `Modelfile` for a GGUF file of a folder."""
    tokenizer, generation = load_tokenizer(folder), load_generation_config(folder)
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template:
        sides = sides_of(tokenizer)
        template = ollama_template(*sides) if sides else None
        note = "# Ollama reads the chat template from the file: it is no list of turns."
        lines.append(f'TEMPLATE """{template}"""' if template else note)
    end = end_of_turn(tokenizer)
    if end is not None:
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"')
    for key, name in SAMPLING.items() if generation and generation.do_sample else ():
        value = getattr(generation, key, None)
        if isinstance(value, int | float):
            lines.append(f"PARAMETER {name} {value:g}")
    return "\n".join(lines) + "\n"
