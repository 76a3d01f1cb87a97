"""Token ids that a model's files name are checked as those of users are: at load, with file and id."""

import json
import warnings

import numpy as np
import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.tokenizer.tokenizer import byte_tokenizer
from tests.model.small_gguf import TOKENS, arrays, hf_model, write_gguf

CONFIG = {
    "model_type": "llama", "vocab_size": 276, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def folder(path, tokens=276, **fields):
    byte_tokenizer(tokens).backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    return path


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_end_token_beyond_the_vocabulary_harms_no_request(tmp_path, overlap):
    with pytest.warns(UserWarning, match="config.json: eos_token_id 999 is outside the vocabulary"):
        llm = LLM(folder(tmp_path, eos_token_id=[2, 999]), load_format="dummy", device="cpu", overlap=overlap)
    with llm:
        assert llm.config.eos_token_ids == (2,)
        held = SamplingParams(min_tokens=1, max_tokens=4, seed=1)
        outputs = llm.generate([[5, 6], [7]], [held, SamplingParams(max_tokens=4, seed=2)], use_tqdm=False)
        assert [out.error for out in outputs] == [None, None]
        assert all(out.token_ids for out in outputs)


def test_no_end_token_left_is_told_and_answers_end_by_length(tmp_path):
    with pytest.warns(UserWarning, match="eos_token_id 276, -1 is outside"):
        llm = LLM(folder(tmp_path, eos_token_id=[276, -1]), load_format="dummy", device="cpu")
    with llm:
        out = llm.generate([[5]], SamplingParams(max_tokens=3, min_tokens=3), use_tqdm=False)[0]
        assert (llm.config.eos_token_ids, out.finish_reason) == ((), "length")


def test_tokens_that_the_model_does_not_have_are_told_and_their_prompts_refused(tmp_path):
    with pytest.warns(UserWarning, match=r"24 tokens have ids outside .*\[0, 276\), the first is '<276>' = 276"):
        llm = LLM(folder(tmp_path, tokens=300), load_format="dummy", device="cpu")
    with llm:
        assert llm.generate("plain text", SamplingParams(max_tokens=2), use_tqdm=False)[0].token_ids
        with pytest.raises(ValueError, match=r"prompt_token_ids\[1\] is 299, outside the vocabulary \[0, 276\)"):
            llm.generate([[5, 299]], use_tqdm=False)


def test_ids_that_fit_are_told_of_by_nobody(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(folder(tmp_path, tokens=270, eos_token_id=275, bos_token_id=0), load_format="dummy") as llm:
            assert llm.config.eos_token_ids == (275,)


def test_a_gguf_file_with_fewer_rows_than_tokens(tmp_path, cache):
    """Its rows are the vocabulary: nothing beyond them can be fed or drawn."""
    rows = 260
    tensors = {name: array[:rows] if len(array) == len(TOKENS) else array
               for name, array in arrays(hf_model("llama")).items()}  # fmt: skip
    file = write_gguf(tmp_path / "short.gguf", "llama", tensors, tokenizer__ggml__eos_token_id=265)
    with pytest.warns(UserWarning) as seen:
        llm = LLM(file, device="cpu", max_model_len=64)
    told = " ".join(str(warning.message) for warning in seen)
    assert "eos_token_id 265" in told and "outside the vocabulary [0, 260)" in told
    with llm:
        held = SamplingParams(min_tokens=1, max_tokens=4, seed=1)
        outputs = llm.generate([[5, 6], [7]], [held, SamplingParams(max_tokens=4, seed=2)], use_tqdm=False)
        assert [out.error for out in outputs] == [None, None]
        assert 265 not in llm.config.eos_token_ids and np.all(np.array(llm.config.eos_token_ids) < rows)
