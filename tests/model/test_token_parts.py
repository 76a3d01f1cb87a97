"""What logprob entries say of their tokens: bytes that join to the text, and characters at which they begin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from nanoengine.server.output_stream import Update
from nanoengine.server.replies import ChatReplies, CompletionReplies
from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer, detokenize
from nanoengine.tokenizer.token_parts import make_parts
from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer

SPACE = "\u2581"
PIECES = [
    "hello",
    SPACE + "hello",
    SPACE,
    "h",
    "e",
    "A",
    "é",
    "\u0301",
    "中",
    SPACE + "中文",
    "。",
    SPACE * 2,
    "👍",
]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    model = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    backend = Backend(model)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:3]])
    return Tokenizer(backend)


LLAMA = decoders.Sequence(
    [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
NO_PREFIX = decoders.Sequence(
    [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
)
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE, "always")])
VOCABULARIES = {
    "llama": sentencepiece(LLAMA),
    "no prefix": sentencepiece(NO_PREFIX),
    "metaspace": sentencepiece(METASPACE),
    "byte-level": byte_tokenizer(300),
}
TEXT = st.text(alphabet=st.sampled_from("hello A é\u0301中文。😀👍🏽\u200d🇨🇳\n"), max_size=12)


def ids_of(tokenizer: Tokenizer, text: str, pick=lambda options: options[0]) -> list[int]:
    """Tokens whose bytes are ``text``; pick: which of the pieces that fit comes next."""
    if tokenizer.is_byte_level:
        return [tokenizer.backend.token_to_id(t) for t in _letters(text.encode())]
    ids, text = [], text.replace(" ", SPACE)
    while text:
        fitting = [p for p in PIECES if text.startswith(p)]
        piece = pick([*fitting, None])
        if piece is None:
            piece = text[0]
            data = (" " if piece == SPACE else piece).encode()
            ids += [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in data]
        else:
            ids.append(tokenizer.backend.token_to_id(piece))
        text = text[len(piece) :]
    return ids


def _letters(data: bytes) -> list[str]:
    from nanoengine.tokenizer.tokenizer import byte_alphabet

    letters = {byte: char for char, byte in byte_alphabet().items()}
    return [letters[b] for b in data]


def updates(tokenizer, ids, *, stop=(), skip=True, every=1, logprobs=None, include=False):
    """What the engine would send: one Update for ``every`` tokens, text held back as the detokenizer does."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop=stop, skip_special_tokens=skip, include_stop_str_in_output=include
    )
    found, pending = [], []
    for i, token in enumerate(ids):
        pending.append(token)
        matched = detokenizer.push(token)
        last = matched is not None or i == len(ids) - 1
        if last:
            detokenizer.finish()
        if last or len(pending) == every:
            reason = ("stop" if matched is not None else "length") if last else None
            entries = [(logprobs or (lambda t: {t: -1.0}))(t) for t in pending]
            found.append(
                Update(0, pending, detokenizer.take(), entries, reason, matched, 1, 0, 0.0, 0.0)
            )
            pending = []
        if last:
            break
    return found


def whole(kind, tokenizer, ids, **options):
    skip, include = options.get("skip", True), options.get("include", False)
    replies = kind("m", tokenizer, num_top=3, skip_special_tokens=skip, with_end=include)
    for update in updates(tokenizer, ids, **options):
        replies.answers[0].add(update)
    return replies.body()["choices"][0]


def streamed(kind, tokenizer, ids, **options):
    """(text, entries) of all chunks; no entry may come before its text."""
    skip, include = options.get("skip", True), options.get("include", False)
    replies = kind("m", tokenizer, num_top=3, skip_special_tokens=skip, with_end=include)
    chunks = [replies.chunk(update) for update in updates(tokenizer, ids, **options)]
    return [chunk["choices"][0] for chunk in chunks if chunk is not None]


CASES = st.tuples(st.sampled_from(sorted(VOCABULARIES)), TEXT, st.randoms(), st.integers(1, 3))


@given(CASES)
def test_bytes_join_to_the_text_and_offsets_are_its_characters(case):
    name, text, draw, _ = case
    tokenizer = VOCABULARIES[name]
    ids = ids_of(tokenizer, text, draw.choice)
    if not ids:
        return
    chat, completion = whole(ChatReplies, tokenizer, ids), whole(CompletionReplies, tokenizer, ids)
    made = chat["message"]["content"]
    assert made == completion["text"] == detokenize(tokenizer, ids)
    data = [bytes(entry["bytes"]) for entry in chat["logprobs"]["content"]]
    assert b"".join(data) == made.encode() and len(data) == len(ids)
    begins = [len(b"".join(data[:i]).decode("utf-8", "ignore")) for i in range(len(ids))]
    assert completion["logprobs"]["text_offset"] == begins


@given(CASES, TEXT.filter(bool))
def test_stop_strings_cut_bytes_and_streams_are_equal(case, stop):
    name, text, draw, every = case
    tokenizer = VOCABULARIES[name]
    ids = ids_of(tokenizer, text, draw.choice)
    if not ids:
        return
    options = dict(stop=(stop,), every=every)
    chat = whole(ChatReplies, tokenizer, ids, **options)
    content = chat["logprobs"]["content"]
    made = chat["message"]["content"]
    assert stop not in made
    assert b"".join(bytes(entry["bytes"]) for entry in content) == made.encode()
    chunks = streamed(ChatReplies, tokenizer, ids, **options)
    assert [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]] == content
    told, shown = "", b""
    for chunk in chunks:
        told += chunk["delta"].get("content", "")
        shown += b"".join(
            bytes(e["bytes"]) for e in (chunk["logprobs"] or {"content": []})["content"]
        )
        assert told.encode().startswith(shown)
    completion = whole(CompletionReplies, tokenizer, ids, **options)["logprobs"]
    pieces = [
        c["logprobs"]
        for c in streamed(CompletionReplies, tokenizer, ids, **options)
        if c["logprobs"]
    ]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == completion[
        "text_offset"
    ]
    assert completion["text_offset"] == sorted(completion["text_offset"])
    assert completion["text_offset"][-1] <= len(made)


@given(
    st.sampled_from(sorted(VOCABULARIES)),
    st.lists(st.integers(0, 299), min_size=1, max_size=30),
    st.booleans(),
)
def test_any_ids_at_all_give_an_entry_each(name, ids, skip):
    """Broken bytes and special tokens, too: offsets never run past the text, and its characters are all told."""
    tokenizer = VOCABULARIES[name]
    ids = [i for i in ids if i < tokenizer.vocab_size] or [0]
    chat, completion = (
        whole(kind, tokenizer, ids, skip=skip) for kind in (ChatReplies, CompletionReplies)
    )
    assert len(chat["logprobs"]["content"]) == len(ids)
    offsets = completion["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] <= len(completion["text"])
    if name == "byte-level":
        data = b"".join(bytes(entry["bytes"]) for entry in chat["logprobs"]["content"])
        assert data.decode("utf-8", "replace") == chat["message"]["content"]
    entries = [
        e
        for c in streamed(ChatReplies, tokenizer, ids, skip=skip)
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert entries == chat["logprobs"]["content"]


def test_an_emoji_of_four_byte_tokens():
    for name in ("llama", "byte-level"):
        tokenizer = VOCABULARIES[name]
        ids = ids_of(tokenizer, "A😀A", lambda options: options[0] if options[0] == "A" else None)
        completion = whole(CompletionReplies, tokenizer, ids)["logprobs"]
        assert completion["text_offset"] == [0, 1, 1, 1, 1, 2]
        assert completion["tokens"] == ["A", *(f"bytes:\\x{b:02x}" for b in "😀".encode()), "A"]


def test_a_leading_blank_is_kept():
    tokenizer = VOCABULARIES["llama"]
    ids = [tokenizer.backend.token_to_id(t) for t in (SPACE + "hello", SPACE + "hello")]
    completion = whole(CompletionReplies, tokenizer, ids)
    assert completion["text"] == "hello hello" == "".join(completion["logprobs"]["tokens"])
    assert completion["logprobs"]["text_offset"] == [0, 5]
    assert tokenizer.token_text(ids[0]) == " hello" and tokenizer.decode(ids[:1]) == "hello"


def test_tokens_of_one_text_stay_apart_in_top_logprobs():
    tokenizer = VOCABULARIES["llama"]
    ids = [tokenizer.backend.token_to_id(t) for t in ("A", "<0x41>", SPACE + "hello", "hello")]
    scores = dict(zip(ids, (-1.0, -2.0, -3.0, -4.0), strict=True))
    for drawn in ids[:2]:
        body = whole(CompletionReplies, tokenizer, [drawn], logprobs=lambda _: scores)["logprobs"]
        other = ids[1] if drawn == ids[0] else ids[0]
        assert body["top_logprobs"][0] == {
            "A": scores[drawn],
            f"token_id:{other}": scores[other],
            " hello": -3.0,
        }
    chat = whole(ChatReplies, tokenizer, [ids[3]], logprobs=lambda _: scores)["logprobs"][
        "content"
    ][0]
    assert [top["token"] for top in chat["top_logprobs"]] == ["A", "A", " hello"]
    assert [bytes(top["bytes"]) for top in chat["top_logprobs"]] == [b"A", b"A", b" hello"]


def test_special_tokens_have_no_bytes_where_they_are_left_out():
    tokenizer = VOCABULARIES["llama"]
    ids = [tokenizer.backend.token_to_id(t) for t in ("A", "</s>", "A")]
    for skip, data in ((True, [b"A", b"", b"A"]), (False, [b"A", b"</s>", b"A"])):
        content = whole(ChatReplies, tokenizer, ids, skip=skip)["logprobs"]["content"]
        assert [bytes(entry["bytes"]) for entry in content] == data
        assert [entry["token"] for entry in content] == ["A", "</s>", "A"]


def test_half_a_character_at_the_end_has_no_bytes():
    tokenizer = VOCABULARIES["byte-level"]
    ids = ids_of(tokenizer, "A😀")[:3]
    choice = whole(ChatReplies, tokenizer, ids)
    assert choice["message"]["content"] == "A"
    assert [bytes(e["bytes"]) for e in choice["logprobs"]["content"]] == [b"A", b"", b""]


@pytest.mark.parametrize(
    "text", ["The café — 你好, мир! 👩‍👩‍👧 ok", "  two blanks", "a\u0301\n\n\tb 🇨🇳"]
)
def test_the_embedded_vocabulary(smollm, text):
    ids = smollm.encode(text, add_special_tokens=False)
    parts = make_parts(smollm)
    found = [parts.push(i) for i in ids]
    assert b"".join(part.data for part in found) == text.encode()
    joined = [b"".join(part.data for part in found[:i]) for i in range(len(found))]
    assert [part.start for part in found] == [
        len(data.decode("utf-8", "ignore")) for data in joined
    ]
