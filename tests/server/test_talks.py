"""Conversations as clients send them: what an assistant's message may lack, and by which path an error is found."""

import openai
import pytest

from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams
from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer
from tests.server.conftest import ask, make_engine, running
from tests.server.test_refusals import assert_error

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% if 'tool_calls' in m %}!{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}{{ 'think ' if enable_thinking }}assistant: {% endif %}"
)


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(
        byte_tokenizer(256).backend, {"chat_template": template}, source="/models/private/base"
    )


@pytest.fixture(scope="module")
def served():
    with running(make_engine(), with_template(TEMPLATE)) as server, server.client() as client:
        yield client


def num_prompt(client, messages, **body) -> int:
    return ask(client, CHAT, messages=messages, max_tokens=1, **body).json()["usage"][
        "prompt_tokens"
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "tool_calls": None},
        {"content": None},
        {},
        {"content": []},
        {"content": None, "tool_calls": []},
        {"content": None, "refusal": None, "audio": None, "function_call": None, "annotations": []},
        {"content": "", "reasoning_content": None, "reasoning": ""},
    ],
)
def test_an_assistants_message_without_content_counts_as_empty(served, said):
    talk = [USER, {"role": "assistant"} | said, USER]
    empty = [USER, {"role": "assistant", "content": ""}, USER]
    text = with_template(TEMPLATE).apply_chat_template(empty)
    assert "assistant: ;|" in text
    assert with_template(TEMPLATE).apply_chat_template(talk) == text
    assert num_prompt(served, talk) == len(text)


@pytest.mark.parametrize(
    ("content", "path", "words"),
    [
        (None, "content", "a string or a list of text parts, got null"),
        (5, "content", "must be a string or a list, got an integer"),
        ({"str": 1}, "content", "must be a string or a list, got an object"),
        ([True], "content[0]", "must be an object"),
        ([None], "content[0]", "must be an object"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "content[1].type",
            "text",
        ),
        ([{"type": "text"}], "content[0].text", "missing"),
        ([{"type": "text", "text": None}], "content[0].text", "a string, got null"),
        ([{"type": "text", "text": "a", "x": 1}], "content[0].x", "unknown"),
        ([["a"]], "content[0]", "must be an object"),
    ],
)
def test_an_error_has_a_path_that_a_client_can_follow(served, content, path, words):
    error = assert_error(
        ask(served, CHAT, messages=[USER, {"role": "user", "content": content}]), 400
    )
    assert error["param"] == f"messages[1].{path}"
    assert words in error["message"] and error["param"] in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (dict(prompt=[1, "a"]), "prompt[1]", "an integer, got a string"),
        (dict(prompt=["a", 1]), "prompt[1]", "a string, got an integer"),
        (dict(prompt=[[1], ["a"]]), "prompt[1][0]", "an integer, got a string"),
        (dict(prompt=[True]), "prompt[0]", "an integer, a string or a list, got a boolean"),
        (dict(prompt=None), "prompt", "a string or a list, got null"),
        (dict(prompt={"int": 1}), "prompt", "a string or a list, got an object"),
        (dict(stop=5), "stop", "a string or a list, got an integer"),
        (dict(stop=["a", None]), "stop[1]", "a string, got null"),
        (dict(metadata={"stop": 1}), "metadata.stop", "a string"),
        (
            dict(stream_options={"include_usage": 1}, stream=True),
            "stream_options.include_usage",
            "a boolean",
        ),
    ],
)
def test_of_a_value_that_may_be_of_several_types_the_nearest_is_told(served, body, param, words):
    error = assert_error(ask(served, **body), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_only_an_assistant_may_say_nothing(served, role):
    assert (
        assert_error(ask(served, CHAT, messages=[{"role": role}]), 400)["param"]
        == "messages[0].content"
    )
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content must be"):
        with_template(TEMPLATE).apply_chat_template([{"role": role, "content": None}])


def test_llm_chat_takes_the_same_and_names_the_same_paths():
    with LLM("tiny-llama", load_format="dummy", max_model_len=256, num_blocks=64) as llm:
        params = SamplingParams(max_tokens=1)
        empty, null = (
            [USER, {"role": "assistant", "content": text, "tool_calls": None}]
            for text in ("", None)
        )
        outs = [
            llm.chat(talk, params, use_tqdm=False)[0].prompt_token_ids for talk in (empty, null)
        ]
        assert outs[0] == outs[1]
        with pytest.raises(ValueError, match=r"^messages\[0\]\.content\[0\] must be"):
            llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], params)
        with pytest.raises(ValueError, match="may not hold 'enable_thinkng'"):
            llm.chat([USER], params, chat_template_kwargs={"enable_thinkng": False})
        with pytest.raises(ValueError, match="chat_template_kwargs must be a dict"):
            llm.chat([USER], params, chat_template_kwargs=["x"])
        with pytest.raises(ValueError, match="may not hold 'messages'"):
            llm.chat([USER], params, chat_template_kwargs={"messages": []})
        [out] = llm.chat(
            [USER], params, use_tqdm=False, chat_template_kwargs={"continue_final_message": True}
        )
        assert out.prompt == "user: a"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 1 % 0 }}", "ZeroDivisionError"),
        ("{{ messages.x.y }}", "no attribute"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{{ {}['a'] + 1 }}", "no attribute"),
        ("{{ 'a'.encode('x') }}", "LookupError"),
        ("{{ 'x' | int('y') + 1 }}", "TypeError"),
        ("{{ [].index(1) }}", "ValueError"),
        ("{{" + "(" * 5000, "RecursionError"),
        ("{% if %}", "Expected"),
        ("{{ raise_exception('no system role') }}", "no system role"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template, words):
    tokenizer = with_template(template)
    with pytest.raises(ValueError, match=f"chat template refuses these messages: .*{words}"):
        tokenizer.apply_chat_template([USER])
    with running(make_engine(), tokenizer) as server, server.client() as client:
        error = assert_error(ask(client, CHAT, messages=[USER]), 400)
        assert error["param"] == "messages" and words in error["message"]
        assert ask(client, max_tokens=1).is_success


def test_the_refusal_of_a_base_model_shows_no_path_of_the_server():
    with running(make_engine(), with_template(None)) as server, server.client() as client:
        error = assert_error(ask(client, CHAT, messages=[USER]), 400)
    assert "no chat template" in error["message"] and "/v1/completions" in error["message"]
    assert "private" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "tokens"),
    [
        ("/v1/completions", {"prompt": [1] * 64}, "prompt", "64"),
        ("/v1/completions", {"prompt": ["a", "b" * 100]}, "prompt", "100"),
        (
            "/v1/completions",
            {"prompt": "a" * 5000, "max_tokens": 1},
            "prompt",
            "at least 1667",
        ),  # told without encoding
        (CHAT, {"messages": [{"role": "user", "content": "a" * 80}]}, "messages", "99"),
        (CHAT, {"messages": [USER] * 2000, "stream": True}, "messages", "at least 6004"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it(path, body, param, tokens):
    """litellm looks for the beginning of the message, LangChain for the code or "prompt is too long", both in what
    the official client makes of it: its newer versions print the message alone."""
    with (
        running(make_engine(max_model_len=64), with_template(TEMPLATE)) as server,
        server.client() as client,
    ):
        error = assert_error(ask(client, path, **body), 400)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert error["message"].startswith(
            "This model's maximum context length is 64 tokens. However, "
        )
        assert f" {tokens} tokens" in error["message"]
        official = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            official.post(path.removeprefix("/v1"), body={"model": "tiny"} | body, cast_to=object)
        assert refused.value.code == "context_length_exceeded"
        for words in (
            "context_length_exceeded",
            "prompt is too long",
            "This model's maximum context length is",
        ):
            assert words in refused.value.message and words in str(refused.value)


def test_a_prompt_larger_than_the_pool_is_too_long_as_well():
    with running(make_engine(num_blocks=4)) as server, server.client() as client:
        error = assert_error(ask(client, prompt=[1] * 17), 400)
        assert error["code"] == "context_length_exceeded"
        assert "length is 16 tokens" in error["message"]


def test_a_limit_beyond_the_room_is_no_error_but_an_end(served):
    """max_tokens asks for at most so many; OpenAI's API and vLLM refuse where prompt and limit exceed the model."""
    choice = ask(served, prompt=[1] * 500, max_tokens=10**6).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_template_variables_that_nothing_reads_are_refused_by_name(served):
    plain = num_prompt(served, [USER])
    assert num_prompt(
        served, [USER], chat_template_kwargs={"enable_thinking": True}
    ) == plain + len("think ")
    for name in ("enable_thinkng", "thinking", "m", ""):
        error = assert_error(
            ask(served, CHAT, messages=[USER], chat_template_kwargs={name: True}), 400
        )
        assert error["param"] == "chat_template_kwargs"
        assert repr(name) in error["message"] and "enable_thinking" in error["message"]


def test_the_last_message_can_be_continued(served):
    talk = [USER, {"role": "assistant", "content": "Once upon "}]
    text = "user: a;|assistant: Once upon "
    tokenizer = with_template(TEMPLATE)
    assert tokenizer.apply_chat_template(talk, continue_final_message=True) == text
    trimming = with_template(TEMPLATE.replace("m.content", "m.content | trim"))
    assert trimming.apply_chat_template(talk, continue_final_message=True) == text.rstrip()
    assert num_prompt(served, talk, chat_template_kwargs={"continue_final_message": True}) == len(
        text
    )
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for kwargs in (both, {"continue_final_message": "yes"}, {"add_generation_prompt": "no"}):
        error = assert_error(ask(served, CHAT, messages=talk, chat_template_kwargs=kwargs), 400)
        assert error["param"] == next(iter(kwargs))
    without = num_prompt(served, talk, chat_template_kwargs={"add_generation_prompt": False})
    assert num_prompt(served, talk) == without + len("assistant: ")
    assert talk[-1]["content"] == "Once upon "
    with pytest.raises(ValueError, match="does not write the last message"):
        with_template("{{ messages[0].content }}").apply_chat_template(
            talk, continue_final_message=True
        )
