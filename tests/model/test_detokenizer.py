"""Against an oracle that decodes the whole text anew at every token and looks for stop strings letter by letter."""

import codecs
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from nanoengine.model.detokenizer import IncrementalDetokenizer, detokenize
from nanoengine.model.tokenizer import Tokenizer, byte_tokenizer


class Pieces:
    """A byte-level vocabulary whose token i is the i-th byte string."""

    is_byte_level = True

    def __init__(self, pieces, special_ids=()):
        self.pieces, self.special_ids = pieces, frozenset(special_ids)

    def token_bytes(self, token_id):
        return self.pieces[token_id] if token_id < len(self.pieces) else None

    def decode(self, ids, skip_special_tokens=True):
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.pieces[i] for i in shown).decode("utf-8", "replace")


def finished_text(pieces):
    """All whole characters of the joined bytes."""
    return codecs.utf_8_decode(b"".join(pieces), "replace", False)[0]


def oracle(pieces, stop, min_tokens):
    """(text, matched stop string, tokens used)."""
    before = ""
    for n in range(1, len(pieces) + 1):
        text = finished_text(pieces[:n])
        for end in range(len(before) + 1, len(text) + 1) if n >= min_tokens else ():
            matching = [s for s in stop if text[:end].endswith(s)]
            if matching:
                longest = max(matching, key=len)
                return text[: end - len(longest)], longest, n
        before = text
    return before, None, len(pieces)


def check(pieces, stop, min_tokens):
    text, matched, used = oracle(pieces, stop, min_tokens)
    detokenizer = IncrementalDetokenizer(Pieces(pieces), stop=stop, min_tokens=min_tokens)
    streamed = ""
    for i in range(used):
        found = detokenizer.push(i)
        shown = detokenizer.text
        streamed += detokenizer.take()
        assert streamed == shown and text.startswith(shown), "text that was shown is taken back"
        if i + 1 < used:
            assert found is None
            held = finished_text(pieces[: i + 1])[len(shown) :]
            assert not held or any(s.startswith(held) and s != held for s in stop), "held back for nothing"
    assert detokenizer.matched == matched
    detokenizer.finish()
    assert detokenizer.text == text == streamed + detokenizer.take()


@st.composite
def chopped(draw, alphabet):
    """The bytes of a text, cut anywhere."""
    data = draw(st.text(alphabet, max_size=30)).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


few_letters = "ab中\N{GRINNING FACE}"
stops = st.lists(st.text(few_letters, min_size=1, max_size=5), max_size=3)


@given(chopped(few_letters), stops, st.integers(0, 8))
def test_stop_strings_in_chopped_text(pieces, stop, min_tokens):
    check(pieces, stop, min_tokens)


@given(st.lists(st.binary(max_size=4), max_size=20), stops, st.integers(0, 4))
def test_any_bytes(pieces, stop, min_tokens):
    check(pieces, stop, min_tokens)


@given(chopped(st.characters(exclude_categories=["Cs"])))
def test_streamed_text_joins_to_the_whole(pieces):
    detokenizer = IncrementalDetokenizer(Pieces(pieces))
    for i in range(len(pieces)):
        detokenizer.push(i)
        assert "\ufffd" not in detokenizer.text or b"\xef\xbf\xbd" in b"".join(pieces)
    assert detokenizer.text == b"".join(pieces).decode() == detokenize(Pieces(pieces), range(len(pieces)))


@given(ids=st.lists(st.integers(0, 49_200), max_size=60), skip=st.booleans())
def test_random_ids_equal_the_librarys_own_decode(smollm, ids, skip):
    whole = smollm.decode(ids, skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(smollm, skip_special_tokens=skip)
    for i in ids:
        assert detokenizer.push(i) is None
    detokenizer.finish()
    assert detokenizer.text == detokenize(smollm, ids, skip)
    # at most one unfinished character is left out, where the library shows U+FFFD
    assert whole in (detokenizer.text, detokenizer.text + "\ufffd")


@given(text=st.text(st.sampled_from("你好世界, hello 123 é\N{GRINNING FACE}"), max_size=40))
def test_encoded_text_comes_back(smollm, text):
    ids = smollm.encode(text)
    pushed = IncrementalDetokenizer(smollm)
    for i in ids:
        pushed.push(i)
    assert pushed.text == text == detokenize(smollm, ids)


# Cases by hand ------------------------------------------------------------------------------------


def run(*pieces, **options):
    detokenizer = IncrementalDetokenizer(Pieces([p.encode() if isinstance(p, str) else p for p in pieces]), **options)
    found = [detokenizer.push(i) for i in range(len(pieces))]
    detokenizer.finish()
    return detokenizer.text, found


@pytest.mark.parametrize("letter", ["é", "中", "\N{GRINNING FACE}"])
def test_half_a_character_at_the_end_is_dropped_and_never_shown(letter):
    data = letter.encode()
    for cut in range(1, len(data)):
        assert run("x", data[:cut])[0] == "x"
    assert run("x", *[data[i : i + 1] for i in range(len(data))])[0] == "x" + letter


def test_invalid_bytes_in_the_middle_are_shown_as_such():
    assert run(b"a", b"\xff", b"b", b"\xe4\xb8", b"c")[0] == "a\ufffdb\ufffdc"


def test_the_stop_string_that_is_complete_first_wins_and_then_the_longest():
    assert run("xabcd", stop=["abcd", "bc"]) == ("xa", ["bc"])
    assert run("xabc", stop=["c", "abc", "bc"]) == ("x", ["abc"])


def test_a_stop_string_over_three_tokens_and_in_the_middle_of_the_last():
    assert run("one<", "e", "nd>two", stop=["<end>"]) == ("one", [None, None, "<end>"])


def test_what_a_stop_string_held_back_is_flushed_at_the_end():
    detokenizer = IncrementalDetokenizer(Pieces([b"one<en"]), stop=["<end>"])
    detokenizer.push(0)
    assert detokenizer.text == "one"
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == "one<en"


def test_min_tokens_counts_tokens_from_one():
    assert run("a.", "b.", "c.", stop=["."], min_tokens=2) == ("a.b", [None, ".", "."])
    # begun before, complete after: it counts
    assert run("a<", "/a", ">b", stop=["</a>"], min_tokens=3) == ("a", [None, None, "</a>"])


def test_nothing_is_added_after_a_match():
    assert run("a.", "b", stop=["."])[0] == "a"


def test_special_tokens_are_left_out_unless_wanted():
    vocabulary = Pieces([b"a", b"<|end|>"], special_ids=[1])
    for skip, text in ((True, "aa"), (False, "a<|end|>a")):
        pushed = IncrementalDetokenizer(vocabulary, skip_special_tokens=skip)
        for i in (0, 1, 0):
            pushed.push(i)
        assert pushed.text == text == detokenize(vocabulary, [0, 1, 0], skip)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        IncrementalDetokenizer(Pieces([]), stop=["a", ""])


def test_ids_without_a_token_are_no_text():
    assert detokenize(byte_tokenizer(256), [104, 99_999, 105]) == "hi"


# Vocabularies that are not byte-level: SentencePiece with byte fallback -----------------------------


def sentencepiece(record=None):
    letters = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abc", "\u2581a", "\u2581b", "ab"]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b")]
    vocab = {piece: i for i, piece in enumerate(letters)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    space, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    if record is not None:
        decode = tokenizer.decode
        tokenizer.decode = lambda ids, skip_special_tokens=True: (record.append(len(ids)), decode(ids))[1]
    return tokenizer


@given(st.text(st.sampled_from("ab c中é\N{GRINNING FACE}"), max_size=30))
def test_offset_method_joins_to_the_whole(text):
    tokenizer = sentencepiece()
    assert not tokenizer.is_byte_level
    ids = tokenizer.encode(text)
    pushed = IncrementalDetokenizer(tokenizer)
    for i in ids:
        pushed.push(i)
        assert "\ufffd" not in pushed.text
    assert pushed.text == detokenize(tokenizer, ids) == tokenizer.decode(ids)


def test_offset_method_keeps_the_space_after_a_special_token():
    tokenizer = sentencepiece()
    ids = [*tokenizer.encode("a"), 1, *tokenizer.encode("b")]
    assert detokenize(tokenizer, ids) == tokenizer.decode(ids) == "a b"


def test_offset_method_looks_at_a_bounded_window():
    sizes: list[int] = []
    tokenizer = sentencepiece(record=sizes)
    broken = [tokenizer.backend.token_to_id("<0xE4>")] * 200  # never a whole character
    push = partial(IncrementalDetokenizer.push, IncrementalDetokenizer(tokenizer, stop=["zzz"]))
    for i in [*broken, *tokenizer.encode("ab c" * 200)]:
        push(i)
    assert max(sizes) <= 16
