"""Streams and chat: deltas that join to the text, stop strings, streams left early or read in turns."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from nanoengine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONTEXT = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, "device": "cpu"}


class Script:
    """A sampler that writes the bytes of a text, whatever the model says; then the end token."""

    end = 1000

    def __init__(self, text: str):
        self.data = text.encode()

    def __call__(self, logits, seqs, positions):
        places = [p - seq.num_prompt_tokens for p, seq in zip(positions.tolist(), seqs, strict=True)]
        return torch.tensor([self.data[i] if i < len(self.data) else self.end for i in places])


def scripted(text: str, **settings) -> LLM:
    settings = CONTEXT | {"sampler": Script(text), "eos_token_ids": (Script.end,)} | settings
    return LLM("tiny-llama", load_format="dummy", **settings)


@pytest.fixture(scope="module")
def shared():
    with LLM("tiny-llama", load_format="dummy", **CONTEXT) as llm:
        yield llm


@pytest.fixture(params=[0, 1], ids=["plain", "overlap"])
def llm(shared, request):
    object.__setattr__(shared.engine.config, "overlap", request.param)  # frozen for users
    yield shared
    assert is_empty(shared)


def is_empty(llm: LLM) -> bool:
    engine = llm.engine
    engine.block_manager.check_invariants([])
    return not engine.has_unfinished() and engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def joined(items) -> dict[int, str]:
    """index -> deltas joined; each must equal the text so far, and the last item tell the end."""
    text: dict[int, str] = {}
    last = {}
    for item in items:
        assert item.index not in last or not last[item.index].finished, "an item after the end"
        text[item.index] = text.get(item.index, "") + item.delta
        assert item.text == text[item.index]
        last[item.index] = item
    assert all(item.finished for item in last.values())
    return text


def many(n: int, seed: int = 0) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = ["".join(rng.choices("abc xyz", k=rng.randint(1, 20))) for _ in range(n)]
    return prompts, [SamplingParams(seed=i, max_tokens=rng.randint(1, 12), ignore_eos=True) for i in range(n)]


def test_deltas_join_to_what_generate_gives(llm):
    prompts, params = many(6)
    want = llm.generate(prompts, params, use_tqdm=False)
    got = joined(llm.stream(prompts, params))
    assert [got[i] for i in range(6)] == [out.text for out in want]


def test_an_item_for_each_token(llm):
    items = list(llm.stream("x", GREEDY))
    assert [len(item.token_ids) for item in items] == list(range(1, 9))
    assert [item.finish_reason for item in items] == [None] * 7 + ["length"]


def test_without_text(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    assert [(i.text, i.delta, len(i.token_ids)) for i in llm.stream("x", params)] == [("", "", n) for n in (1, 2, 3)]
    assert llm.generate("x", params, use_tqdm=False)[0].text == ""


def test_leaving_a_stream_frees_its_blocks(llm):
    for item in llm.stream(["one", "two"], SamplingParams(max_tokens=100, ignore_eos=True)):
        if len(item.token_ids) == 3:
            break
    del item
    assert is_empty(llm)


def test_requests_are_queued_at_once(llm):
    stream = llm.stream("x", GREEDY)
    assert len(llm.engine.sequences) == 1
    assert joined(stream).keys() == {0}


def test_an_unread_stream_that_is_dropped_holds_nothing(llm):
    llm.stream("x", GREEDY).close()
    assert is_empty(llm)
    llm.stream("x", GREEDY)
    assert is_empty(llm)


@pytest.mark.parametrize("seed", range(5))
def test_two_streams_read_in_turns(llm, seed):
    (p1, s1), (p2, s2) = many(3, seed), many(4, seed + 50)
    want = [[out.text for out in llm.generate(p, s, use_tqdm=False)] for p, s in ((p1, s1), (p2, s2))]
    rng, items = random.Random(seed), ([], [])
    streams = [llm.stream(p1, s1), llm.stream(p2, s2)]
    open_ = [0, 1]
    while open_:
        i = rng.choice(open_)
        item = next(streams[i], None)
        items[i].append(item) if item else open_.remove(i)
    for got, expected in zip(items, want, strict=True):
        text = joined(got)
        assert [text[i] for i in range(len(expected))] == expected


@pytest.mark.parametrize("read", [0, 1, 4, 7])
def test_generate_while_a_stream_is_open(llm, read):
    """generate takes steps for the stream as well; the stream loses none of its text, nor its end."""
    want = llm.generate("x", GREEDY, use_tqdm=False)[0].text
    stream = llm.stream("x", GREEDY)
    items = list(itertools.islice(stream, read))
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert len(llm.generate("y", long, use_tqdm=False)[0].token_ids) == 20
    items += stream
    assert joined(items) == {0: want}
    assert items[-1].finish_reason == "length"


def test_aborted_from_outside_ends_the_stream(llm):
    stream = llm.stream("x", GREEDY)
    next(stream)
    llm.engine.abort(next(iter(llm.engine.sequences.values())))
    assert [item.finish_reason for item in stream] == ["abort"]


def test_aborted_from_outside_ends_generate(llm, monkeypatch):
    """An observer or a scheduler may end a request: generate must not wait for it for ever."""

    class Impatient:
        def before(self, engine, plan, batch):
            return {}

        def after(self, engine, step, output):
            for seq in list(engine.sequences.values()):
                if seq.num_output_tokens >= 2:
                    engine.abort(seq)

    monkeypatch.setattr(llm.engine, "observer", Impatient())
    out = llm.generate("x", GREEDY, use_tqdm=False)[0]
    assert (out.finish_reason, len(out.token_ids)) == ("abort", 2)


# text


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("script", "stop", "text", "reason"),
    [
        ("one two three", "two", "one ", "two"),
        ("one two three", ["three", "tw"], "one ", "tw"),
        ("one two three", "xyz", "one two three", Script.end),
        ("abcab", "abcd", "abcab", Script.end),  # held back at the end, then let out
        ("分页内存管理", "管理", "分页内存", "管理"),
        ("分页", None, "分页", Script.end),
    ],
)
def test_stop_strings_and_the_end(script, stop, text, reason, overlap):
    with scripted(script, overlap=overlap) as llm:
        params = SamplingParams(max_tokens=100, stop=stop)
        out = llm.generate("x", params, use_tqdm=False)[0]
        assert (out.text, out.finish_reason, out.stop_reason) == (text, "stop", reason)
        items = list(llm.stream("x", params))
        assert joined(items) == {0: text} and items[-1].stop_reason == reason
        assert not any("�" in item.text for item in items)
        assert is_empty(llm)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_character_cut_by_max_tokens_is_left_out(cut):
    with scripted("分页") as llm:
        params = SamplingParams(max_tokens=cut)
        text = "分页".encode()[:cut].decode(errors="ignore")
        assert llm.generate("x", params, use_tqdm=False)[0].text == text
        assert joined(llm.stream("x", params)) == {0: text}


# chat


def test_chat_shapes_and_history(llm):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    out = llm.chat(talk, GREEDY, use_tqdm=False)[0]
    assert out.prompt == "user: a\nassistant: b\nuser: c\nassistant: "
    assert bytes(out.prompt_token_ids).decode() == out.prompt
    both = llm.chat([talk, talk[:1]], GREEDY, use_tqdm=False)
    assert [o.prompt for o in both] == [out.prompt, "user: a\nassistant: "] and both[0].text == out.text
    assert llm.chat("a", GREEDY, use_tqdm=False)[0].text == both[1].text
    assert joined(llm.stream_chat([talk, talk[:1]], GREEDY)) == {0: out.text, 1: both[1].text}


def test_chat_template_kwargs_reach_the_template(llm):
    kwargs = {"add_generation_prompt": False}
    assert llm.chat("a", GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)[0].prompt == "user: a\n"
    item = next(iter(llm.stream_chat("a", GREEDY, chat_template_kwargs=kwargs)))
    assert item.prompt == "user: a\n"


@pytest.mark.parametrize("messages", [[], None, ["a"], [[]], [{"role": "user"}], [{"content": "x"}], 5])
def test_bad_messages_are_value_errors(llm, messages):
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(ValueError, match="message"):
            call(messages, GREEDY)
        assert is_empty(llm)


class Ids:
    """A sampler that gives these tokens, whatever the model says."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, logits, seqs, positions):
        places = [p - seq.num_prompt_tokens for p, seq in zip(positions.tolist(), seqs, strict=True)]
        return torch.tensor([self.ids[i] for i in places])


def with_special_tokens():
    """Bytes, a special token <|im_end|> (300) and an added one that is not special, <add> (301)."""
    from tokenizers import AddedToken

    from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer

    backend = byte_tokenizer(300).backend
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.add_tokens([AddedToken("<add>", special=False)])
    return Tokenizer(backend)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_a_special_token(include, overlap):
    """Batch and stream; with ignore_eos, or as no end token at all. A, end, B."""
    cases = [
        # stop, tokens generated, text, with it the stop string
        ("<|im_end|>", 3, "AA", "AA<|im_end|>"),
        ("A<|im_end|>", 3, "A", "AA<|im_end|>"),
        ("<|im_end|>B", 4, "AA", "AA<|im_end|>B"),
        ("<add>", 5, "AAB", "AAB<add>"),
        ("im_end", 6, "AAB<add>B", None),
    ]
    for eos in ((), (300,)):
        settings = CONTEXT | dict(sampler=Ids([65, 65, 300, 66, 301, 66]), eos_token_ids=eos, overlap=overlap,
                                  tokenizer=with_special_tokens())  # fmt: skip
        with LLM("tiny-llama", load_format="dummy", **settings) as llm:
            for stop, count, left, kept in cases:
                params = SamplingParams(stop=stop, max_tokens=6, ignore_eos=True, include_stop_str_in_output=include)
                [out] = llm.generate("x", params, use_tqdm=False)
                text = kept if include and kept else left
                reasons = ("stop", stop) if kept else ("length", None)
                assert (out.text, len(out.token_ids)) == (text, count), stop
                assert (out.finish_reason, out.stop_reason) == reasons
                assert joined(llm.stream("x", params)) == {0: text}


def test_what_include_stop_str_in_output_does_to_an_end_token():
    """As in vLLM: its text stays, unless it is a special token that is left out of the text anyway."""
    ids = Ids([65, 300, 66])
    with LLM("tiny-llama", load_format="dummy", **CONTEXT, sampler=ids, tokenizer=with_special_tokens()) as llm:
        for stop_id, include, skip, text in (
            (300, True, True, "A"), (300, True, False, "A<|im_end|>"), (300, False, False, "A"),
            (65, True, True, "A"), (65, False, True, ""),
        ):  # fmt: skip
            for stop in (None, "zz"):
                params = SamplingParams(stop_token_ids=[stop_id], stop=stop, include_stop_str_in_output=include,
                                        skip_special_tokens=skip, max_tokens=3)  # fmt: skip
                [out] = llm.generate("x", params, use_tqdm=False)
                assert (out.text, out.finish_reason, out.stop_reason) == (text, "stop", stop_id)
                assert joined(llm.stream("x", params)) == {0: text}


def test_an_end_token_counts_before_a_stop_string():
    with LLM("tiny-llama", load_format="dummy", **CONTEXT, sampler=Ids([65, 300]), eos_token_ids=(300,),
             tokenizer=with_special_tokens()) as llm:  # fmt: skip
        [out] = llm.generate("x", SamplingParams(stop=["<|im_end|>", "A<|im_end|>"], max_tokens=3), use_tqdm=False)
        assert (out.text, out.finish_reason, out.stop_reason) == ("A", "stop", 300)
