"""Text <-> token ids, around the ``tokenizers`` library alone (transformers takes seconds to import)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from nanoengine.model.fields import read_json
from nanoengine.tokenizer.chat_template import check_template_kwargs, render_chat
from nanoengine.tokenizer.token_parts import bytes_or_text

_DUMMY_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's way to write any byte as one printable character: character -> byte.

    Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up, in order.
    Source: openai/gpt-2, encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_CHAR_TO_BYTE = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's, for what it has no piece for


class Tokenizer:
    """A model's tokenizer. Load one with ``load_tokenizer``, or ``byte_tokenizer`` for dummy models.

    vocab_size: one more than the largest id that has a token. special_ids: ids that are no text
    (end tokens, chat marks). is_byte_level: every token is a string of bytes (GPT-2's scheme: Llama
    3, Qwen, SmolLM). bos_token, eos_token: their text, or None. chat_template: Jinja, or None.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None, source: str = "tokenizer") -> None:
        config = config or {}
        self.backend = backend
        self.source = source
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        # a decoder's own JSON: the whole tokenizer's would take a second for 150,000 tokens
        decoder = backend.decoder
        self.is_byte_level = decoder is not None and _only_byte_level(json.loads(decoder.__getstate__()))
        self.special_tokens = {k: _token_text(v) for k, v in config.items() if k.endswith("_token") and _token_text(v)}
        self.chat_template = _pick_template(config.get("chat_template"))
        self._has_byte_tokens = decoder is not None and '"ByteFallback"' in decoder.__getstate__().decode()
        self._bytes: dict[int, bytes | None] = {}
        self._texts: dict[int, str] = {}

    def warn_of_ids_from(self, vocab_size: int) -> None:
        """Warn of tokens that a model of ``vocab_size`` tokens lacks: added here and not there, say."""
        if self.vocab_size <= vocab_size:
            return
        vocab = self.backend.get_vocab(with_added_tokens=True)
        beyond = {i: text for text, i in vocab.items() if i >= vocab_size}
        first = min(beyond)
        begin = [i for i in self.encode("") if i >= vocab_size]
        refused = "a prompt with one of them"
        if begin:
            refused = f"every text, which begins or ends with {begin[0]},"
        text = f"{len(beyond)} tokens have ids outside the model's vocabulary [0, {vocab_size})"
        text += f", the first is {beyond[first]!r} = {first}: {refused} is refused"
        warnings.warn(f"{self.source}: {text}", stacklevel=2)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; add_special_tokens puts the model's begin token first, if it has one.

        Errors: ValueError for anything but a str; UnicodeEncodeError (a ValueError) for half a surrogate pair.
        """
        if not isinstance(text, str):
            raise ValueError(f"text to encode must be a str, got {type(text).__name__}")
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # how the library refuses a str that has no UTF-8 form
            text.encode()
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all ids at once; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes one id stands for: of a byte-level vocabulary any token's, else that of a byte token (<0xE4>).

        None if the id has no token, or what it stands for depends on its neighbours.
        """
        try:
            return self._bytes[token_id]
        except KeyError:
            value = self._bytes[token_id] = self._find_bytes(token_id)
            return value

    def _find_bytes(self, token_id: int) -> bytes | None:
        if token_id < 0 or not (self.is_byte_level or self._has_byte_tokens):
            return None
        token = self.backend.id_to_token(token_id)
        if token is None:
            return None
        if self.is_byte_level:
            return _to_bytes(token)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else None

    def token_text(self, token_id: int) -> str:
        """What one id adds in the middle of a text, its leading blank included; ``bytes:\\xe4`` for a piece of a
        character; nothing for an id without a token."""
        try:
            return self._texts[token_id]
        except KeyError:
            data = self.token_bytes(token_id)
            if data is None:  # after itself it is in the middle of a text
                once, twice = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
                text = twice.removeprefix(once)
            else:
                text = bytes_or_text(data)
            self._texts[token_id] = text
            return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool | None = None,
        continue_final_message: bool = False, **kwargs: Any,
    ) -> str:  # fmt: skip
        """The prompt text of a chat: messages are dicts with ``role`` and ``content``.

        add_generation_prompt: end with the mark after which the assistant speaks; by default yes,
        unless the last message is continued. continue_final_message: end with the last message's
        text, so that the model goes on with it. kwargs are passed to the template (``tools``,
        ``enable_thinking``, ...). Encode the result with add_special_tokens=False: a template
        writes the begin token itself.

        A control token that stands in a message's text (``<|im_end|>``) is taken as that token,
        as transformers does: what must not be, take out of the text before.

        Errors: ValueError if the model has no template, or a message is malformed or refused.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): it is a base model. Complete a plain prompt instead "
                "(generate(), /v1/completions), or use an instruct model."
            )
        for name, value in (("add_generation_prompt", add_generation_prompt),
                            ("continue_final_message", continue_final_message)):  # fmt: skip
            if value not in (True, False, None):
                raise ValueError(f"{name} must be True or False, got {value!r:.100}")
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: one goes on "
                "with the last message, the other begins a new one"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        variables = {"tools": None, "documents": None, **self.special_tokens}
        variables |= {"add_generation_prompt": bool(add_generation_prompt), **kwargs}
        going_on = bool(continue_final_message)
        return render_chat(self.chat_template, messages, variables, continue_final_message=going_on)

    def check_template_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """ValueError naming what in ``kwargs`` the model's template does not read: it would change nothing."""
        if self.chat_template is not None:
            check_template_kwargs(self.chat_template, kwargs, self.special_tokens)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

    Errors: FileNotFoundError saying what is there instead; ValueError naming the damaged file.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise FileNotFoundError(f"{file} does not exist; the folder holds {', '.join(there[:8]) or 'nothing'}")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} cannot be read: {error}. Download or convert it again.") from error
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = {}
    if config_file.exists():
        config = read_json(config_file)
    if template_file.exists():  # newer exports keep it apart, and then it counts
        try:
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{template_file} is damaged: it is not UTF-8 ({error})") from None
    return Tokenizer(backend, config, source=str(folder))


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """For dummy models: id b < 256 is the byte b, any further id decodes to its number, as ``<300>``.

    Errors: ValueError if vocab_size < 256.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size must be at least 256 for a byte tokenizer, got {vocab_size}")
    vocab = dict(_CHAR_TO_BYTE) | {f"<{i}>": i for i in range(256, vocab_size)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"chat_template": _DUMMY_TEMPLATE}, source="the byte tokenizer")


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(_CHAR_TO_BYTE[c] for c in token)
    except KeyError:  # an added token with, say, a space in it stands for its own text
        return token.encode()


def _only_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(_only_byte_level(d) for d in decoder["decoders"])
    return decoder["type"] == "ByteLevel"


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json has a token as text or as {"content": text, ...}."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _pick_template(value: Any) -> str | None:
    """One template, or of a list of {"name", "template"} the one named default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
