"""Logprob entries of a text that ends with its stop string (include_stop_str_in_output)."""

import pytest

from nanoengine.server.replies import ChatReplies, CompletionReplies
from tests.model.test_token_parts import VOCABULARIES, streamed, whole


@pytest.mark.parametrize("every", [1, 2, 9])
@pytest.mark.parametrize(
    "stop, pieces",
    [
        ("lo<s>he", [b"hello", b"<s>", b"he"]),
        ("<s>he", [b"hello", b"<s>", b"he"]),
        ("<s>", [b"hello", b"<s>"]),
        ("o<s>", [b"hello", b"<s>"]),
        ("hello", [b"hello"]),
        ("ll", [b"hell"]),
    ],
)
def test_a_stop_string_that_stays_in_the_text_has_its_special_tokens_bytes(stop, pieces, every):
    tokenizer = VOCABULARIES["no prefix"]
    hello = tokenizer.backend.token_to_id("hello")
    options = dict(stop=[stop], include=True, every=every)
    choice = whole(ChatReplies, tokenizer, [hello, 1, hello], **options)
    entries = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == pieces
    assert choice["message"]["content"].encode() == b"".join(pieces)
    chunks = streamed(ChatReplies, tokenizer, [hello, 1, hello], **options)
    assert [e for c in chunks for e in (c["logprobs"] or {"content": []})["content"]] == entries
    offsets = whole(CompletionReplies, tokenizer, [hello, 1, hello], **options)["logprobs"]["text_offset"]
    assert offsets == [sum(map(len, pieces[:i])) for i in range(len(pieces))]


def test_a_special_token_before_the_stop_string_has_no_bytes_and_comes_in_order():
    tokenizer = VOCABULARIES["no prefix"]
    hello = tokenizer.backend.token_to_id("hello")
    for kind in (ChatReplies, CompletionReplies):
        options = dict(stop=["<s>h"], include=True)
        choice = whole(kind, tokenizer, [1, 1, hello], **options)
        if kind is ChatReplies:
            entries = choice["logprobs"]["content"]
            assert [bytes(e["bytes"]) for e in entries] == [b"", b"<s>", b"h"]
        else:
            assert choice["logprobs"]["text_offset"] == [0, 0, 3]
