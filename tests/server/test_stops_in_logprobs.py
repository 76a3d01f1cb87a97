"""Stop strings that stay in the text, special tokens in them, and the logprobs of both."""

from copy import deepcopy

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoengine.sampling_params import SamplingParams
from nanoengine.server.output_stream import Update
from nanoengine.server.replies import ChatReplies, CompletionReplies
from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer
from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer

S, END = 256, 257
pieces = st.sampled_from([[S], [END], *([*text.encode()] for text in ("a", "b", "<s>", "中", "😀", "\u2028"))])
stops = st.lists(st.sampled_from(["a", "ab", "b", "<s>", "<|im_end|>", "a<s>", "<s>b", "中<s>b", "a😀"]), max_size=3)


@pytest.fixture(scope="module")
def tokenizer():
    plain = byte_tokenizer(256)
    plain.backend.add_special_tokens(["<s>", "<|im_end|>"])
    made = Tokenizer(plain.backend)
    assert made.special_ids == {S, END}
    return made


def updates(tokenizer, tokens, params):
    """What the engine reports, a token at a time."""
    text, found = IncrementalDetokenizer.of(tokenizer, params), []
    for n, token in enumerate(tokens, 1):
        matched = text.push(token)
        reason = "stop" if matched else "length" if n == len(tokens) else None
        if reason:
            text.finish()
        entry = {token: -1.0, (token + 1) % 256: -2.0}
        found.append(Update(0, [token], text.take(), [entry], reason, matched, 1, 0, arrival=0, at=0))
        if reason:
            return found


@given(st.lists(pieces, min_size=1, max_size=8).map(lambda found: sum(found, [])), stops, st.booleans(), st.booleans())
@example([ord("a"), END], ["<|im_end|>"], True, True)
@example([S, S, ord("b")], ["<s>b"], True, True)
def test_bytes_join_to_the_text_and_a_stream_to_the_whole(tokenizer, tokens, stop, include, skip):
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    came = updates(tokenizer, tokens, params)
    for kind in (ChatReplies, CompletionReplies):
        whole, stream = (
            kind("m", tokenizer, num_top=2, skip_special_tokens=skip, with_end=include) for _ in range(2)
        )
        for update in deepcopy(came):
            whole.answers[0].add(update)
        [choice] = whole.body()["choices"]
        text, entries = "".join(update.text for update in came), choice["logprobs"]
        streamed: dict = {}
        for update in deepcopy(came):
            chunk = stream.chunk(update)
            for name, new in ((chunk and chunk["choices"][0]["logprobs"]) or {}).items():
                streamed[name] = streamed.get(name, []) + new if new else None
        assert streamed == entries
        if kind is ChatReplies:
            data = b"".join(bytes(entry["bytes"]) for entry in entries["content"])
            assert data.decode("utf-8", "ignore") == text
            continue
        offsets = entries["text_offset"]
        assert offsets == sorted(offsets)
        for name, offset in zip(entries["tokens"], offsets, strict=True):
            rest = text[offset:]
            if not name.startswith("bytes:") and name not in ("<s>", "<|im_end|>"):
                assert rest.startswith(name[: len(rest)])
