"""Scripts for nano-vllm: its loop (add_request, step, is_finished, exit), its examples' shapes."""

from __future__ import annotations

import random
import subprocess
import sys

import psutil
import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.sim import SlotRunner, expected_output

TINY = dict(load_format="dummy", device="cpu", max_model_len=256, block_size=4, num_blocks=256)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tiny(**settings) -> LLM:
    return LLM("tiny-llama", **TINY | settings)


def drive(llm, max_steps: int = 1000) -> tuple[dict, list[int]]:
    """nano-vllm's own loop: what ended by id, and the signed numbers of tokens."""
    outputs, numbers = {}, []
    while not llm.is_finished():
        assert len(numbers) < max_steps
        output, num_tokens = llm.step()
        for seq_id, token_ids in output:
            assert seq_id not in outputs
            outputs[seq_id] = token_ids
        numbers.append(num_tokens)
    return outputs, numbers


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
def test_a_loop_of_ones_own_gets_what_generate_gets(overlap, policy):
    prompts = [[5, 6, 7], "hello", [9] * 20]
    with tiny(overlap=overlap, policy=policy) as llm:
        want = [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        assert not llm.is_finished()
        outputs, _ = drive(llm)
        assert [outputs[i] for i in ids] == want == [outputs[i] for i in sorted(outputs)]
        assert llm.is_finished() and llm.step() == ([], 0)
        manager = llm.engine.block_manager
        assert not llm.engine.has_unfinished() and manager.num_free_blocks == manager.num_blocks


def test_the_number_of_tokens_has_nano_vllms_sign():
    with tiny(overlap=0, policy="prefill_first") as llm:
        llm.add_request([1] * 10, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        llm.add_request([2] * 5, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        _, numbers = drive(llm)
    assert numbers == [15, -2, -2]


def test_a_step_that_mixes_counts_its_prompt_tokens():
    with tiny(overlap=0) as llm:
        llm.add_request([1] * 10, GREEDY)
        assert llm.step() == ([], 10)
        llm.add_request([2] * 7, GREEDY)
        assert llm.step() == ([], 7)  # and one decode
        assert llm.step() == ([], -2)


def test_each_call_gets_its_own_requests_and_nothing_is_lost():
    with tiny() as llm:
        short = llm.add_request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
        long = llm.add_request([3, 4], SamplingParams(max_tokens=40, ignore_eos=True))
        outs = llm.generate([[5], [6]], GREEDY, use_tqdm=False)
        assert [out.prompt_token_ids for out in outs] == [[5], [6]]
        assert not {short, long} & {out.request_id for out in outs}
        assert sum(out.finished for out in llm.stream([7], GREEDY)) == 1
        first, _ = llm.step()  # that one was finished by generate's steps, the other one goes on
        assert [seq_id for seq_id, _ in first] == [short] and not llm.is_finished()
        outputs, _ = drive(llm)
        assert list(outputs) == [long] and len(outputs[long]) == 40


def test_what_can_never_be_served_is_refused_and_the_loop_goes_on():
    with tiny() as llm:
        good = llm.add_request([1, 2], GREEDY)
        for bad in ([], [1] * 300, [10**6], ["one", "two"], [[1], [2]], None):
            with pytest.raises(ValueError):
                llm.add_request(bad, GREEDY)
        with pytest.raises(ValueError, match="n=1, got n=2"):
            llm.add_request([1, 2], SamplingParams(n=2))
        with pytest.raises(ValueError, match="n=1, got n=2"):
            llm.add_request([1, 2], [SamplingParams(n=2)])
        assert list(drive(llm)[0]) == [good]


def test_a_request_that_ends_with_an_error_says_why():
    """The loop's tuples have no place for it."""
    with tiny() as llm:
        banned = SamplingParams(allowed_token_ids=[97], bad_words=["a"])
        bad, good = llm.add_request([1, 2], banned), llm.add_request([1, 2], GREEDY)
        with pytest.warns(UserWarning, match=f"request {bad} ended with an error: no token may be drawn"):
            outputs, _ = drive(llm)
        assert outputs[bad] == [] and len(outputs[good]) == 6


def test_a_step_that_fails_loses_no_request():
    class FailsOnce(SlotRunner):
        calls = 0

        def launch(self, batch):
            self.calls += 1
            if self.calls == 3:
                raise OSError("once")
            return super().launch(batch)

    with tiny(runner=FailsOnce(64, 4, 100), vocab_size=100) as llm:
        seq_id = llm.add_request([1, 2, 3], GREEDY)
        llm.step()
        llm.step()
        with pytest.raises(OSError, match="once"):
            llm.step()
        assert drive(llm)[0] == {seq_id: expected_output([1, 2, 3], 6, 100)}


def test_a_cpu_caps_prefills_beside_a_stream_unless_told_otherwise():
    with tiny() as llm, tiny(max_mixed_prefill_tokens=200) as wide:
        for each, first in ((llm, 64), (wide, 100)):
            stream = each.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
            next(stream)
            each.add_request([7] * 100, GREEDY)
            assert each.step()[1] == first
            stream.close()


def test_exit_is_close():
    llm = tiny()
    llm.add_request([1], GREEDY)
    llm.exit()
    assert llm.engine is None
    for call in (llm.step, lambda: llm.add_request([1], GREEDY)):
        with pytest.raises(RuntimeError, match="was closed"):
            call()
    llm.exit()


def test_the_shape_of_nano_vllms_benchmark():
    rng = random.Random(0)
    llm = LLM("tiny-llama", load_format="dummy", enforce_eager=False, max_model_len=256)
    prompts = [[rng.randint(0, 100) for _ in range(rng.randint(10, 60))] for _ in range(16)]
    lengths = [rng.randint(2, 12) for _ in prompts]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in lengths]
    llm.generate(["Benchmark: "], SamplingParams())
    outputs = llm.generate(prompts, params, use_tqdm=False)
    total = sum(p.max_tokens for p in params)
    assert total == sum(len(output["token_ids"]) for output in outputs)
    llm.exit()


CHAT = """
import sys
from nanoengine import LLM, SamplingParams
from nanoengine.loader.resolve import resolve_model
from transformers import AutoTokenizer

def main():
    path = str(resolve_model(None).folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=5)
    asked = ["introduce yourself", "list all prime numbers within 100"]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                             add_generation_prompt=True) for text in asked]
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs):
        assert prompt.count("<|im_start|>") >= 2 and output["text"] is not None
        assert len(output["token_ids"]) == 5
        print(f"Prompt: {prompt!r}, completion: {output['text']!r}")

if __name__ == "__main__":
    main()
"""

RANKS = """
import psutil
from nanoengine import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("tiny-llama", load_format="dummy", device="cpu", tensor_parallel_size=2, num_blocks=16)
    print(*(child.pid for child in psutil.Process().children(recursive=True)))
    llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    while not llm.is_finished():
        output, num_tokens = llm.step()
    print(len(output[0][1]))
"""


def script(text: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_shape_of_nano_vllms_chat_example_with_transformers_own_tokenizer():
    assert len(script(CHAT)) == 2


def test_a_script_with_two_ranks_that_calls_no_exit_leaves_no_process():
    pids, count = script(RANKS)
    assert count == "4" and pids
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.split())
