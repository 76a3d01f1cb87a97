"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

``tokenizer.ggml.model`` says the algorithm (``gpt2``: byte-level BPE; ``llama``: SentencePiece) and
``tokenizer.ggml.pre`` which rule cuts text into words first. The rule itself is not in the file: it
is llama.cpp's source that knows it by name (src/llama-vocab.cpp), so each one is spelt out here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanoengine.loader.gguf_reader import metadata

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type; 2 unknown, 6 byte
_WORDS = (  # Llama 3 and Qwen cut alike but for the number of digits in a word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}
_PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")
# Tokens that end an answer whatever else the file says, if it has them as control tokens.
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(f"tokenizer.{key}")
    return default if field is None else field.contents()


def end_token_ids(reader: gguf.GGUFReader) -> list[int]:
    """Every id that ends an answer: eos first, then end of turn, then those known by their text."""
    found = [_value(reader, f"ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = _value(reader, "ggml.token_type", [])
    tokens = _value(reader, "ggml.tokens", [])
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    found += [control.get(text) for text in _END_TEXTS]
    return list(dict.fromkeys(i for i in found if i is not None))


def write_tokenizer(path: Path, reader: gguf.GGUFReader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into ``folder``.

    Errors: ValueError naming the file and the key or kind of tokenizer that is not supported.
    """
    tokens = _check_keys(path, reader)
    kinds = _value(reader, "ggml.token_type") or [_NORMAL] * len(tokens)
    model = _value(reader, "ggml.model")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    if model == "gpt2":
        tokenizer = _byte_level(path, reader, vocab)
        add_bos = _value(reader, "ggml.pre") == "llama-bpe"
    elif model == "llama":
        tokenizer = _sentencepiece(path, reader, vocab, tokens)
        add_bos = True
    else:
        raise ValueError(f"{path}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' and 'llama'")
    tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL))
    tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED))
    _add_ends(tokenizer, reader, tokens, _value(reader, "ggml.add_bos_token", add_bos))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(_config(reader, tokens), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def _check_keys(path: Path, reader: gguf.GGUFReader) -> list[str]:
    """The tokens, after a check of the type of all keys that are read. ValueError naming file and key."""
    keys = metadata(path, reader, "tokenizer.ggml.")
    tokens: list[str] = keys.texts("tokens", None)
    if not tokens:
        raise ValueError(f"{path}: the metadata key tokenizer.ggml.tokens is missing: the file has no tokenizer")
    kinds = keys.integers("token_type", None) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.token_type lists {len(kinds)} kinds for {len(tokens)} tokens")
    for key in _ID_KEYS:
        i = keys.integer(f"{key}_token_id", None, least=0)
        if i is not None and i >= len(tokens):
            raise ValueError(f"{path}: tokenizer.ggml.{key}_token_id is {i}, but there are {len(tokens)} tokens")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        keys.flag(key, None)
    keys.text("model", None), keys.text("pre", None), keys.texts("merges", None), keys.numbers("scores", None)
    metadata(path, reader, "tokenizer.", only="chat_template").text("chat_template", None)
    return tokens


def _added(tokens: list[str], kinds: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=wanted == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == wanted
    ]


def _byte_level(path: Path, reader: gguf.GGUFReader, vocab: dict[str, int]) -> Tokenizer:
    pre = _value(reader, "ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"{path}: tokenizer.ggml.pre {pre!r} is not supported, only {', '.join(_PRE_TOKENIZERS)}")
    merges = _value(reader, "ggml.merges")
    if merges is None:
        raise ValueError(f"{path}: the metadata key tokenizer.ggml.merges is missing")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 looks a whole word up before it merges: some of its words no merge leads to.
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: tokenizer.ggml.merges does not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _DIGITS:
        words = pre_tokenizers.Split(Regex(_WORDS % _DIGITS[pre]), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    else:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own rule
        # SmolLM reads numbers digit by digit, and a space before a number is a word of its own.
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as in Qwen's tokenizer.json; llama.cpp leaves it out
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(path: Path, reader: gguf.GGUFReader, vocab: dict[str, int], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: of all neighbouring pieces whose union is a piece, the best score merges first."""
    scores = _value(reader, "ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"{path}: the metadata key tokenizer.ggml.scores is missing or not one score a token")
    kinds = _value(reader, "ggml.token_type") or [_NORMAL] * len(tokens)
    pieces = {t: i for t, i in vocab.items() if kinds[i] == _NORMAL}
    ranked = []
    for piece, i in pieces.items():
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        ranked += [(-scores[i], i, pair) for pair in splits if pair[0] in pieces and pair[1] in pieces]
    ranked.sort(key=lambda entry: entry[:2])
    unknown = _value(reader, "ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[pair for _, _, pair in ranked],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )  # fmt: skip
    )
    space = "\u2581"  # how SentencePiece writes a space
    prefix = _value(reader, "ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(space)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", space)])
    decode = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decode + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _add_ends(tokenizer: Tokenizer, reader: gguf.GGUFReader, tokens: list[str], add_bos: bool) -> None:
    bos, eos = _value(reader, "ggml.bos_token_id"), _value(reader, "ggml.eos_token_id")
    first = [(tokens[bos], bos)] if add_bos and bos is not None else []
    last = [(tokens[eos], eos)] if _value(reader, "ggml.add_eos_token", False) and eos is not None else []
    if first or last:
        single = " ".join([*(text for text, _ in first), "$A", *(text for text, _ in last)])
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=first + last)


def _config(reader: gguf.GGUFReader, tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json; the class that takes tokenizer.json as it is."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        i = _value(reader, f"ggml.{key}_token_id")
        if i is not None:
            config[f"{name}_token"] = tokens[i]
    template = _value(reader, "chat_template")
    if template:
        config["chat_template"] = template
    return config
