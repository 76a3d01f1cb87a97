"""The embedded model's real text: the same on the GPU as on the CPU."""

from nanoengine import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):", "1, 2,"]


def text(**settings):
    with LLM(max_model_len=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=48)
        return [out.text for out in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_greedy_text_in_float32():
    assert text(device="cuda", dtype="float32", num_blocks=200) == text(device="cpu")


def test_the_gpus_own_format_writes_the_known_answer():
    assert "Paris" in text(device="cuda", num_blocks=200)[0]
