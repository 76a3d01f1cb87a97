import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<b> & 'yo'"},
    {"role": "user", "content": "再见"},
]


@pytest.fixture(scope="module")
def theirs(embedded_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_folder)


# Encoding and decoding --------------------------------------------------------------------------------


@given(text=st.text(st.sampled_from("ab 0123456789\n\t.,'sé世界½<|im_end|>"), max_size=40))
def test_ids_are_transformers_ids(smollm, theirs, text):
    ids = smollm.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert smollm.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_facts_about_the_embedded_vocabulary(smollm):
    assert smollm.vocab_size == 49152 and smollm.is_byte_level
    assert smollm.special_ids == frozenset(range(17))
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.encode("<|im_end|>") == [2]
    assert [smollm.decode([i]) for i in smollm.encode("12 345")] == ["1", "2", " ", "3", "4", "5"]


def test_token_bytes_join_to_the_text(smollm):
    text = "Grüße, 世界 \N{GRINNING FACE}\n"
    assert b"".join(smollm.token_bytes(i) for i in smollm.encode(text)) == text.encode()
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.token_bytes(49152) is None and smollm.token_bytes(-1) is None


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_only_text_can_be_encoded(smollm, text):
    with pytest.raises(ValueError, match=f"must be a str, got {type(text).__name__}"):
        smollm.encode(text)


def test_half_a_surrogate_pair_is_refused(smollm):
    with pytest.raises(ValueError, match="position 2: surrogates not allowed"):
        smollm.encode("ab\ud800")


def test_other_vocabularies_have_no_bytes():
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a")))
    assert not tokenizer.is_byte_level and tokenizer.token_bytes(0) is None


BYTES = byte_tokenizer(1024)


@given(st.binary(max_size=20), st.text(max_size=20))
def test_byte_tokenizer(data, text):
    tokenizer = BYTES
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(data)) == data.decode("utf-8", "replace")
    assert b"".join(tokenizer.token_bytes(i) for i in data) == data


def test_every_id_of_a_byte_tokenizer_is_something():
    tokenizer = byte_tokenizer(1024)
    assert tokenizer.vocab_size == 1024 and not tokenizer.special_ids
    assert all(tokenizer.token_bytes(i) for i in range(1024))
    assert tokenizer.decode([300, 1023]) == "<300><1023>"
    assert tokenizer.apply_chat_template(CHAT[:1]) == "user: hi\nassistant: "
    with pytest.raises(ValueError, match="at least 256 for a byte tokenizer, got 255"):
        byte_tokenizer(255)


# Chat templates ---------------------------------------------------------------------------------------


def with_template(template, **config):
    return Tokenizer(byte_tokenizer(256).backend, {"chat_template": template, **config}, source="folder")


def render(template, messages=CHAT, **kwargs):
    return with_template(template).apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", [CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]])
def test_the_embedded_template_is_transformers(smollm, theirs, chat, prompt):
    ours = smollm.apply_chat_template(chat, add_generation_prompt=prompt)
    assert ours == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert ("named SmolLM" in ours) is (chat is CHAT), "a default system prompt is put in"


TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ bos_token }}{{ tools }}{{ documents }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% generation %}{% set ns.n = ns.n + 1 %}{% endgeneration %}"
    "{% endfor %}{{ ns.n }} {{ 'no' if enable_thinking is false else 'yes' }} {{ messages[-1].content.strip() }}",
    "{{ strftime_now('%Y') }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(eos_token) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_mean_what_they_mean_in_transformers(theirs, smollm, template):
    ours = Tokenizer(smollm.backend, {**smollm.special_tokens, "chat_template": template})
    for kwargs in ({}, {"enable_thinking": False}, {"tools": [{"name": "f", "description": "<é>"}]}):
        if "tools" in kwargs and "tools" not in template:
            continue
        expected = theirs.apply_chat_template(CHAT, chat_template=template, tokenize=False, **kwargs)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=False, **kwargs) == expected


def test_a_template_cannot_reach_out_of_its_sandbox():
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__init__.__globals__ }}",
    ):
        with pytest.raises(ValueError, match="chat template refuses"):
            render(attack)


def test_messages_given_are_not_changed():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", chat) == "ab"
    assert chat[0]["content"][1] == {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "messages must be a non-empty list"),
        ([], "messages must be a non-empty list"),
        ({"role": "user", "content": "hi"}, "messages must be a non-empty list"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([CHAT[0], {"content": "hi"}], r"messages\[1\].role must be a non-empty string"),
        ([{"role": "user"}], r"messages\[0\].content must be a string or a list of text parts, got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list of text parts, got 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"\[0\].content\[0\] must be .*image_url"),
    ],
)
def test_malformed_messages_are_named(smollm, messages, words):
    with pytest.raises(ValueError, match=words):
        smollm.apply_chat_template(messages)


def test_a_templates_own_refusal_is_passed_on():
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="chat template refuses"):
        render("{% if %}")


def test_content_may_be_missing_beside_tool_calls():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[-1].tool_calls[0].name }}", [*CHAT, call]) == "f"


# Files ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer(300).backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_no_template(folder):
    with pytest.raises(ValueError, match="has no chat template.*base model"):
        load_tokenizer(folder).apply_chat_template(CHAT)


def test_where_a_template_may_be(folder):
    write_config(folder, chat_template="from config")
    assert load_tokenizer(folder).chat_template == "from config"
    write_config(folder, chat_template=[{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}])
    assert load_tokenizer(folder).chat_template == "b"
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(folder).chat_template == "from file"


def test_special_tokens_as_text_or_object(folder):
    write_config(folder, bos_token=None, eos_token={"content": "<e>", "lstrip": False}, pad_token="<p>")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "<e>")
    assert tokenizer.special_tokens == {"eos_token": "<e>", "pad_token": "<p>"}


def test_damaged_and_missing_files_are_named(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.txt")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist; the folder holds .*vocab\.txt"):
        load_tokenizer(folder)
