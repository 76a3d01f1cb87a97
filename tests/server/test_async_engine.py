"""AsyncEngine over slots: many tasks, refusals, aborts, failing steps, the end."""

import asyncio
import random

import pytest

from nanoengine.sampling_params import SamplingParams
from nanoengine.server.async_engine import AsyncEngine, EngineStopped, Overloaded
from nanoengine.server.output_stream import Request
from nanoengine.sim import expected_output
from tests.server.conftest import VOCAB, PacedRunner, go_on, hold, make_engine


def request(prompt, max_tokens: int = 8, **params) -> Request:
    return Request(prompt, SamplingParams(max_tokens=max_tokens, **params))


async def read(generation) -> list[tuple[list[int], str]]:
    """(token ids, finish_reason) of each request."""
    found = [([], None) for _ in range(generation.count)]
    async for update in generation:
        ids, _ = found[update.index]
        found[update.index] = (ids + update.token_ids, update.finish_reason)
    return found


def serve(engine, main, **options):
    """Run ``await main(async_engine)`` and shut down; afterwards every block must be free."""

    async def whole():
        served = AsyncEngine(engine, **options)
        served.start()
        try:
            return await asyncio.wait_for(main(served), 30)
        finally:
            go_on(engine.runner)
            await served.shutdown(5)
            assert served.num_open == 0

    result = asyncio.run(whole())
    engine.block_manager.check_invariants([])
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert not engine.has_unfinished()
    return result


@pytest.mark.parametrize("overlap", [0, 1])
def test_many_tasks_each_get_their_own_right_answer(overlap):
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))] for _ in range(60)]

    async def main(served):
        async def one(prompt):
            return await read(await served.add([request(prompt, 12)]))

        return await asyncio.gather(*map(one, prompts))

    engine = make_engine(num_blocks=40, overlap=overlap)  # 160 tokens for 8 sequences of up to 42: it must preempt
    for prompt, [answer] in zip(prompts, serve(engine, main), strict=True):
        assert answer == (expected_output(prompt, 12, VOCAB), "length")
    assert engine.scheduler.num_preemptions


def test_several_prompts_in_one_call_come_with_their_index():
    prompts = [[1], [2, 3], [4, 5, 6]]

    async def main(served):
        return await read(await served.add([request(prompt, 5) for prompt in prompts]))

    assert serve(make_engine(), main) == [(expected_output(prompt, 5, VOCAB), "length") for prompt in prompts]


@pytest.mark.parametrize("overlap", [0, 1])
def test_samples_come_with_their_index_and_share_their_prompt(overlap):
    prompts = [list(range(20)), [4, 5, 6]]

    async def main(served):
        params = SamplingParams(max_tokens=5, n=3)
        return await read(await served.add([r for prompt in prompts for r in Request.samples(prompt, params)]))

    engine = make_engine(overlap=overlap)
    found = serve(engine, main)
    assert found == [(expected_output(prompt, 5, VOCAB), "length") for prompt in prompts for _ in range(3)]
    assert engine.block_manager.num_hit_tokens == 2 * 16
    with pytest.raises(ValueError, match="n must be 1 for one sequence"):
        serve(make_engine(), lambda served: served.add([request([1], n=2)]))


def test_what_is_refused_queues_nothing_and_the_engine_goes_on():
    async def main(served):
        for bad in ([[1], []], [[VOCAB]], [[1] * 600]):
            with pytest.raises(ValueError, match="prompt"):
                await served.add([request(prompt) for prompt in bad])
        assert served.num_open == 0
        return await read(await served.add([request([1], 3)]))

    assert serve(make_engine(), main) == [(expected_output([1], 3, VOCAB), "length")]


def test_a_full_queue_refuses_and_says_when_to_come_back():
    engine = make_engine(max_num_seqs=2)
    engine.runner.delay = 0.1

    async def main(served):
        generations = [await served.add([request([i], 20)]) for i in range(3)]
        with pytest.raises(Overloaded) as refused:
            await served.add([request([9])])
        assert 1 <= refused.value.retry_after <= 60
        with pytest.raises(ValueError, match="1 to 3 prompts"):  # more than may ever be open: no use in waiting
            await served.add([request([i]) for i in range(4)])
        engine.runner.delay = 0.0
        answers = [await read(generation) for generation in generations]
        again = await read(await served.add([request([9], 4)]))
        return answers, again

    answers, again = serve(engine, main, max_waiting=1)
    assert answers == [[(expected_output([i], 20, VOCAB), "length")] for i in range(3)]
    assert again == [(expected_output([9], 4, VOCAB), "length")]


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_abort_frees_the_blocks_when_the_step_in_flight_has_landed(overlap):
    engine = make_engine(overlap=overlap)
    engine.runner.delay = 0.005

    async def main(served):
        other = await served.add([request([3], 400)])  # goes on
        generation = await served.add([request([7] * 40, 400)])
        async for _ in generation:
            break
        await asyncio.to_thread(hold, engine.runner)
        begun = len(engine.runner.launches)
        generation.abort()
        await asyncio.sleep(0.02)
        assert len(engine.runner.launches) == begun
        engine.runner.gate.set()
        rest = await read(generation)
        while not served.aborted:
            await asyncio.sleep(0.001)
        # with overlap one step more was launched while the one in flight had not landed; it does not run there
        assert served.aborted == {overlap: 1}
        assert all(1 not in ids for ids in engine.runner.launches[begun:])
        generation.abort()  # once more does nothing
        other.abort()
        await read(other)
        return rest

    [(ids, reason)] = serve(engine, main)
    assert reason == "abort"
    assert len(ids) < 400


def test_no_step_begins_between_an_abort_and_its_blocks():
    """Aborts at any moment of a step, under threads that fight for the interpreter."""
    engine = make_engine(num_blocks=400)
    draw = random.Random(5)

    async def main(served):
        async def one(i: int) -> None:
            generation = await served.add([request([i, i + 1], 60)])
            async for _ in generation:
                if draw.random() < 0.2:
                    break
            await asyncio.sleep(draw.random() * 1e-3)
            generation.abort()
            await read(generation)

        await asyncio.gather(*(one(i) for i in range(60)))
        return served.aborted

    aborted = serve(engine, main)
    assert set(aborted) == {0}
    assert aborted[0] > 30


def test_a_task_cancelled_while_it_adds_leaves_nothing_behind():
    engine = make_engine()
    engine.runner.delay = 0.02

    async def main(served):
        other = await served.add([request([1], 10)])
        tasks = [asyncio.create_task(served.add([request([i], 400)])) for i in range(2, 6)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer = await read(other)
        while served.num_open:
            await asyncio.sleep(0.001)
        return answer

    assert serve(engine, main) == [(expected_output([1], 10, VOCAB), "length")]


def test_shutdown_lets_finish_what_can():
    engine = make_engine()
    engine.runner.delay = 0.002

    async def main(served):
        reader = asyncio.create_task(read(await served.add([request([1], 40)])))
        await served.shutdown(20)
        with pytest.raises(EngineStopped):
            await served.add([request([1])])
        return await reader

    assert serve(engine, main) == [(expected_output([1], 40, VOCAB), "length")]


@pytest.mark.parametrize("overlap", [0, 1])
def test_shutdown_aborts_what_takes_too_long(overlap):
    engine = make_engine(overlap=overlap)
    engine.runner.delay = 0.01

    async def main(served):
        reader = asyncio.create_task(read(await served.add([request([1], 400)])))
        await served.shutdown(0.05)
        return await reader

    [(ids, reason)] = serve(engine, main)
    assert reason == "abort"
    assert ids == expected_output([1], len(ids), VOCAB)


def test_what_a_slow_reader_has_not_read_is_one_update():
    async def main(served):
        slow = await served.add([request([1], 50)])
        while served.num_open:
            await asyncio.sleep(0.001)
        return [update async for update in slow]

    [update] = serve(make_engine(), main)
    assert update.token_ids == expected_output([1], 50, VOCAB)
    assert update.finish_reason == "length"
    assert update.before is None


def test_the_thread_may_prepare_itself():
    called = []

    async def main(served):
        return await read(await served.add([request([1], 2)]))

    serve(make_engine(runner=PacedRunner()), main, on_thread_start=lambda: called.append(1))
    assert called == [1]
