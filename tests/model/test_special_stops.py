"""Stop strings that hold a special token, and stop strings that stay in the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer, detokenize
from tests.model.test_detokenizer import Pieces, run, sentencepiece

SPECIALS = {"<s>": b"<s>", "<|im_end|>": b"<|im_end|>", "<né>": "<né>".encode()}
marks = st.sampled_from(sorted(SPECIALS))


def special_oracle(tokens, stop, min_tokens, include):
    """(text, matched, tokens used), from the whole text at each token: what is shown, and with specials written out.

    tokens: (text, is special), each of whole characters.
    """
    shown_before = written_before = ""
    for n, (text, special) in enumerate(tokens, 1):
        shown, written = shown_before + ("" if special else text), written_before + text
        candidates = []
        for whole, before, wanted in (
            (shown, shown_before, stop),
            (written, written_before, [s for s in stop if any(mark in s for mark in SPECIALS)]),
        ):
            for end in range(len(before) + 1, len(whole) + 1) if n >= min_tokens else ():
                for s in wanted:
                    if whole[:end].endswith(s):
                        left = len(whole) - end + len(s)  # characters from the match's beginning on
                        if whole is written:
                            kept = visible_length(tokens[:n], len(written) - left)
                        else:
                            kept = len(shown) - left
                        candidates.append((end - len(before), -len(s), kept, s))
        if candidates:
            *_, kept, s = min(candidates, key=lambda c: c[:2])
            return shown[:kept] + (s if include else ""), s, n
        shown_before, written_before = shown, written
    return shown_before, None, len(tokens)


def visible_length(tokens, length):
    """Of the first ``length`` characters with specials written out, how many are shown."""
    flags = [not special for text, special in tokens for _ in text]
    return sum(flags[:length])


@given(
    st.lists(st.one_of(marks, st.text("ab中<s>", min_size=1, max_size=3)), max_size=14),
    st.lists(
        st.one_of(
            marks,
            st.tuples(st.text("ab中", max_size=2), marks, st.text("ab中<", max_size=2)).map(
                "".join
            ),
            st.text("ab中<s", min_size=1, max_size=4),
        ),
        max_size=3,
    ),
    st.integers(0, 6),
    st.booleans(),
)
def test_stop_strings_that_hold_special_tokens(texts, stop, min_tokens, include):
    """A piece of ordinary text may spell a special token, too."""
    tokens = [(text, text in SPECIALS and i % 4 != 0) for i, text in enumerate(texts)]
    every = [text.encode() for text, _ in tokens] + list(SPECIALS.values())
    special_ids = [i for i, (_, special) in enumerate(tokens) if special] + [
        len(tokens) + i for i in range(3)
    ]
    want, matched, used = special_oracle(tokens, stop, min_tokens, include)
    pushed = IncrementalDetokenizer(
        Pieces(every, special_ids),
        stop=stop,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
    )
    streamed = ""
    for i in range(used):
        found = pushed.push(i)
        streamed += pushed.take()
        assert want.startswith(streamed), "text that was shown is taken back"
        assert found == (matched if i + 1 == used else None)
    pushed.finish()
    assert pushed.text == want == streamed + pushed.take()


IM_END = Pieces([b"A", b"<|im_end|>", b"\n", b"B", b"<|x|>", b"<add>"], special_ids=[1, 4])


@pytest.mark.parametrize(
    ("stop", "ids", "text", "found"),
    [
        ("<|im_end|>", [0, 1, 3], "A", 2),
        ("A<|im_end|>", [3, 0, 1, 3], "B", 3),
        ("<|im_end|>\n", [0, 1, 2, 3], "A", 3),
        ("<|im_end|>\n", [0, 1, 3, 2], "AB\n", None),  # other text between them
        ("<|im_end|>\n", [0, 1, 4, 2], "A\n", None),  # another special token between them
        ("<|x|><|im_end|>", [0, 4, 1, 3], "A", 3),
        ("end", [0, 1, 3], "AB", None),  # a part of the token's name is no text of the answer
        ("AB", [0, 1, 3], "", 3),  # what is shown holds no stop string
        ("<add>", [0, 5, 3], "A", 2),  # an added token that is not special is text as any other
    ],
)
def test_a_special_token_as_stop_string(stop, ids, text, found):
    for include in (False, True):
        pushed = IncrementalDetokenizer(IM_END, stop=stop, include_stop_str_in_output=include)
        results = [pushed.push(i) for i in ids]
        pushed.finish()
        assert results.index(stop) + 1 == found if found else set(results) == {None}
        assert pushed.text == text + (stop if include and found else "")
        seen = IncrementalDetokenizer(IM_END, stop=stop, skip_special_tokens=False)
        assert any(seen.push(i) for i in ids) == (
            stop in detokenize(IM_END, ids, skip_special_tokens=False)
        )


def test_min_tokens_counts_special_tokens_as_well():
    for min_tokens, used in ((2, 2), (3, 4), (5, None)):
        pushed = IncrementalDetokenizer(IM_END, stop="<|im_end|>", min_tokens=min_tokens)
        results = [pushed.push(i) for i in [0, 1, 3, 1]]
        assert results == [None if used is None or i < used else "<|im_end|>" for i in range(1, 5)]


def test_a_sentencepiece_special_token_as_stop_string():
    tokenizer = sentencepiece()
    ids = [*tokenizer.encode("a"), 1, *tokenizer.encode("b")]
    for stop, text in (("<s>", "a"), ("a<s>", ""), ("<s> b", "a"), ("x<s>", "a b")):
        pushed = IncrementalDetokenizer(tokenizer, stop=stop)
        found = [pushed.push(i) for i in ids]
        pushed.finish()
        assert (pushed.text, any(found)) == (text, stop != "x<s>")


def test_a_stop_string_that_stays():
    assert run("one<", "e", "nd>two", stop=["<end>"], include_stop_str_in_output=True) == (
        "one<end>",
        [None, None, "<end>"],
    )
