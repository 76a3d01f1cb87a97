"""LLM(tensor_parallel_size=k) on gloo against one rank: teacher-forced, and token by token, in fp32.

Each engine is used for all that its size can show: starting k - 1 processes is the dear part.
"""

import pytest
import torch

from nanoengine import LLM, SamplingParams

BOUND = 2e-3
SMALL = dict(device="cpu", max_model_len=128, max_num_batched_tokens=123, num_blocks=110, block_size=8,
             max_mixed_prefill_tokens=123)  # fmt: skip (many rows run together: some are preempted)
DUMMY = SMALL | dict(load_format="dummy")
ENGINES = {
    "tiny-llama, 2": ("tiny-llama", 2, DUMMY),
    "tiny-llama, 4": ("tiny-llama", 4, DUMMY | dict(overlap=1)),
    "tiny-qwen3, 2": ("tiny-qwen3", 2, DUMMY | dict(overlap=1)),
    "tiny-qwen2, 2": ("tiny-qwen2", 2, DUMMY),
    "tiny-qwen3, 4": ("tiny-qwen3", 4, DUMMY | dict(policy="prefill_first")),
    "smollm2, 3": (None, 3, SMALL | dict(num_blocks=18, max_num_batched_tokens=61)),
}
PROMPT, LENGTH = 8, 14  # chunked prompts; rows x 6 logits are compared: few steps of many rows are quickest
# SmolLM2 adds trained weights and 3 ranks, at 100 times the work
ROWS = {None: 10, "tiny-llama": 86, "tiny-qwen2": 86, "tiny-qwen3": 86}
MIXED = [SamplingParams(temperature=0, max_tokens=7, ignore_eos=True), SamplingParams(seed=3, max_tokens=5),
         SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=6),
         SamplingParams(seed=5, top_p=0.8, max_tokens=6),
         SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)]  # fmt: skip


class Teacher:
    """A sampler that writes logits down and answers with the next token of a given text; without texts, the model's."""

    def __init__(self):
        from nanoengine.worker.sampler import Sampler

        self.own, self.texts, self.logits = Sampler(), {}, {}

    def __call__(self, logits, seqs, positions):
        if not self.texts:
            return self.own(logits, seqs, positions)
        answer = []
        for row, seq, position in zip(logits, seqs, positions.tolist(), strict=True):
            key = tuple(seq.token_ids[:4])
            self.logits[key, position] = row.clone()
            answer.append(self.texts[key][position])
        return torch.tensor(answer)


def texts(count, vocab=1000):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(vocab, (count, LENGTH), generator=generator).tolist()


def observe(name, size, settings):
    """What one engine does: tokens of a mixed batch, the same from the cache, logits of forced texts, and facts."""
    teacher, forced = Teacher(), texts(ROWS[name])
    prompts = [(text + text)[: 13 + 3 * i] for i, text in enumerate(texts(5))]
    seen = {}
    with LLM(name, tensor_parallel_size=size, dtype="float32", sampler=teacher, **settings) as llm:
        for when in ("first", "cached"):
            outputs = llm.generate(prompts, MIXED, use_tqdm=False)
            seen[when] = [out.token_ids for out in outputs]
            seen["hits"] = sum(out.num_cached_tokens for out in outputs)
            seen["logprobs"] = [[sorted(entry) for entry in out.logprobs or ()] for out in outputs]
            seen["prompt"] = [[sorted(entry) for entry in (out.prompt_logprobs or ())[1:]] for out in outputs]
            assert [len(entries) for entries in seen["prompt"]] == [0, 0, 0, 0, len(prompts[4]) - 1]
        teacher.texts = {tuple(text[:4]): text for text in forced}
        params = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT, ignore_eos=True)
        llm.generate([text[:PROMPT] for text in forced], params, use_tqdm=False)
        runner = llm.engine.runner
        facts = getattr(runner, "facts", None)
        one = {p.data_ptr(): p.nbytes for p in runner.model.parameters()}
        seen |= dict(num_blocks=runner.num_blocks, preemptions=llm.engine.scheduler.num_preemptions)
        return seen, teacher.logits, facts, sum(one.values()), runner.kv_cache.nbytes


@pytest.mark.parametrize("which", ENGINES)
def test_as_one_rank(which):
    name, size, settings = ENGINES[which]
    wanted, logits, _, weight_bytes, kv_bytes = observe(name, 1, settings)
    found, parallel_logits, facts, *_ = observe(name, size, settings)
    assert wanted["hits"] > 0 and wanted["preemptions"] > 0
    assert found == wanted
    assert parallel_logits.keys() == logits.keys() and len(logits) >= (LENGTH - PROMPT) * ROWS[name]
    decided = 0
    for key, row in parallel_logits.items():
        assert (row - logits[key]).abs().max() < BOUND, key
        first, second = logits[key].topk(2).values.tolist()
        if first - second > BOUND:
            decided += 1
            assert row.argmax() == logits[key].argmax(), key
    assert decided >= len(logits) / 2

    assert len(facts) == size and len({fact.pid for fact in facts}) == size
    copied = max(1, size // (3 if name is None else 2))  # ranks that hold the same KV head
    assert [fact.kv_bytes for fact in facts] == [kv_bytes * copied // size] * size
    for fact in facts:
        assert weight_bytes / size < fact.weight_bytes < 1.2 * weight_bytes / size
        assert fact.loaded_bytes == fact.weight_bytes  # fp32 in the file, too, and nothing loaded that is not held


def test_two_engines_at_once_in_two_threads_and_closed_twice():
    import threading

    prompts, params = [[5, 6, 7], [8] * 30], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    results = {}

    def work(name):
        with LLM("tiny-llama", tensor_parallel_size=2, **DUMMY) as llm:
            results[name] = [[out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]
        llm.close()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with LLM("tiny-llama", **DUMMY) as llm:
        wanted = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert results == {"a": [wanted] * 2, "b": [wanted] * 2}


def test_what_is_refused_before_anything_starts(monkeypatch):
    from nanoengine.attention.torch_attention import TorchAttention

    for settings, message in (
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3 does not divide the model's 8 query heads"),
        (dict(tensor_parallel_size=0), "tensor_parallel_size must lie in"),
        (dict(tensor_parallel_size=2, attention_backend=TorchAttention()), "attention backend of your own"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM("tiny-llama", **DUMMY | settings)
    for name, value in dict(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but torchrun has started WORLD_SIZE=4"):
        LLM("tiny-llama", tensor_parallel_size=2, **DUMMY)


def test_fewer_gpus_than_ranks(monkeypatch):
    from nanoengine.parallel import launch

    monkeypatch.setattr(launch, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [launch.device_of("cuda", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match="3 ranks from device='cuda' on need 3 GPUs, and this machine has 2"):
        launch.device_of("cuda", 0, 3)
    with pytest.raises(ValueError, match="device='cuda:1'"):
        launch.device_of("cuda:1", 0, 2)


@pytest.mark.parametrize("overlap", [0, 1])
def test_logits_that_are_nan_end_one_request(overlap):
    """NaN in rank 0's part of the embedding goes through the sums to all ranks and to no other row."""
    bad, mates = [3, 100, 4] * 4, [[1, 5, 7] * 4, [9, 8] * 6]
    made = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6, ignore_eos=True) for i in range(3)]
    with LLM("tiny-llama", tensor_parallel_size=2, overlap=overlap, dtype="float32", **DUMMY) as llm:
        wanted = llm.generate(mates, made[:2], use_tqdm=False)
        llm.engine.runner.model.embed_tokens.weight.data[100] = float("nan")
        llm.engine.block_manager.reset()
        *found, out = llm.generate([*mates, bad], made, use_tqdm=False)
        assert (out.finish_reason, out.token_ids) == ("error", []) and "non-finite" in out.error
        assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
        drawn = wanted[0].token_ids[2]  # now one that comes with an answer, fed while the host does not know it
        llm.engine.runner.model.embed_tokens.weight.data[drawn % 512] = float("nan")
        again = llm.generate(mates, made[:2], use_tqdm=False)
        assert {o.finish_reason for o in again} <= {"error", "length"}
        assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks
