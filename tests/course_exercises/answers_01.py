"""Answers to the exercises of lesson 01 as learners might write them: right in several shapes, wrong in likely ways.

The solutions in exercises/src are one more right answer each. With a wrong answer stand words of its message.
"""

from __future__ import annotations

from nanoengine.engine.batch import build_batch
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.postprocess import InFlight, land

NOTHING = {"prefill": 0, "decode": 0, "finished": []}


def _finish(engine, flight):
    out = land(flight, engine.block_manager)
    for seq in out.finished:
        engine.sequences.pop(seq.seq_id)
    engine.scheduler.retire(out.finished)
    ids = [seq.seq_id for seq in out.finished]
    return {"prefill": out.num_prefill_tokens, "decode": out.num_decode_tokens, "finished": ids}


def _launch(engine, plan, batch=None):
    batch = batch or engine.build_batch(plan)
    engine.in_flight.append(InFlight(plan, batch, engine.runner.launch(batch)))
    engine.scheduler.advance(plan)


def lands_then_goes_on(engine):
    """Where it must land first it schedules in the same call; counts from the batch, not from StepOutput."""
    report = dict(NOTHING)
    flying = engine.in_flight
    if flying and engine.scheduler.must_land_first():
        report = _count_and_finish(engine, flying.pop())
    plan = engine.scheduler.schedule()
    if not plan.seqs:
        return _count_and_finish(engine, flying.pop()) if flying else report
    _launch(engine, plan)
    return _count_and_finish(engine, flying.pop(0)) if len(flying) == 2 else report


def _count_and_finish(engine, flight):
    lens, samples = flight.batch.query_lens, set(flight.batch.sample_rows.tolist())
    decode = sum(1 for row, n in enumerate(lens) if n == 1 and row in samples)
    finished = _finish(engine, flight)["finished"]
    return {"prefill": int(sum(lens)) - decode, "decode": decode, "finished": finished}


class _Loop:
    """The same as an object with state of its own."""

    def __call__(self, engine):
        old = engine.in_flight[0] if engine.in_flight else None
        if old is None or not engine.scheduler.must_land_first():
            plan = engine.scheduler.schedule()
            if plan.seqs:
                _launch(engine, plan)
        if old is None:
            return dict(NOTHING)
        engine.in_flight.remove(old)
        return _finish(engine, old)


def waits(engine):
    """The lesson's own step, with the report."""
    plan = engine.scheduler.schedule()
    _launch(engine, plan, build_batch(plan.seqs, engine.block_manager.block_size))
    return _finish(engine, engine.in_flight.pop())


def lands_before_launching(engine):
    """A launch is in flight between calls, and yet nothing overlaps."""
    report = _finish(engine, engine.in_flight.pop()) if engine.in_flight else dict(NOTHING)
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan, build_batch(plan.seqs, engine.block_manager.block_size))
    return report


def never_lands_the_last(engine):
    if engine.in_flight and engine.scheduler.must_land_first():
        return _finish(engine, engine.in_flight.pop(0))
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan)
    return _finish(engine, engine.in_flight.pop(0)) if len(engine.in_flight) > 1 else dict(NOTHING)


def forgets_the_rows(engine):
    if engine.in_flight and engine.scheduler.must_land_first():
        return _finish(engine, engine.in_flight.pop(0))
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan, build_batch(plan.seqs, engine.block_manager.block_size))
    return _finish(engine, engine.in_flight.pop(0)) if len(engine.in_flight) > bool(plan.seqs) else dict(NOTHING)


def does_not_ask_whether_to_land_first(engine):
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan)
    return _finish(engine, engine.in_flight.pop(0)) if len(engine.in_flight) > bool(plan.seqs) else dict(NOTHING)


def reports_what_it_launched(engine):
    if engine.in_flight and engine.scheduler.must_land_first():
        return _finish(engine, engine.in_flight.pop(0))
    plan = engine.scheduler.schedule()
    report = dict(NOTHING)
    if plan.seqs:
        _launch(engine, plan)
        lens = engine.in_flight[-1].batch.query_lens
        report = {"prefill": int(sum(n for n in lens if n > 1)), "decode": int(sum(lens == 1)), "finished": []}
    if len(engine.in_flight) > bool(plan.seqs):
        report["finished"] = _finish(engine, engine.in_flight.pop(0))["finished"]
    return report


def one_kind_a_step(engine):
    """The sign of nano-vllm in other clothes: a step is prefill or decode as a whole."""
    report = _Loop()(engine)
    total = report["prefill"] + report["decode"]
    kind = "prefill" if report["prefill"] else "decode"
    return {**NOTHING, kind: total, "finished": report["finished"]}


def keeps_the_blocks(engine):
    flying = engine.in_flight
    if flying and engine.scheduler.must_land_first():
        return _leave(engine, flying.pop(0))
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan)
    return _leave(engine, flying.pop(0)) if len(flying) > bool(plan.seqs) else dict(NOTHING)


def _leave(engine, flight):
    out = land(flight, engine.block_manager)
    for seq in out.finished:
        engine.sequences.pop(seq.seq_id)
        engine.scheduler.running.remove(seq)
    ids = [seq.seq_id for seq in out.finished]
    return {"prefill": out.num_prefill_tokens, "decode": out.num_decode_tokens, "finished": ids}


def returns_the_record(engine):
    flying = engine.in_flight
    plan = engine.scheduler.schedule()
    if plan.seqs:
        _launch(engine, plan)
    if len(flying) > bool(plan.seqs):
        return land(flying.pop(0), engine.block_manager)


def asks_the_package(engine):
    out = engine.step()
    ids = [seq.seq_id for seq in out.finished]
    return {"prefill": out.num_prefill_tokens, "decode": out.num_decode_tokens, "finished": ids}


def copies_the_package():
    """The package's source, pasted and compiled anew."""
    import inspect
    import textwrap

    import nanoengine.engine.llm_engine as home

    namespace = dict(vars(home))
    exec(compile(textwrap.dedent(inspect.getsource(LLMEngine.step)), "pasted", "exec"), namespace)
    return namespace["step"]


RIGHT = {"ex01a": {"goes on": lands_then_goes_on, "object": _Loop()}}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex01a": {
        "waits": (waits, "wrong", "plain loop of the lesson"),
        "lands first": (lands_before_launching, "wrong", "plain loop of the lesson"),
        "never ends": (never_lands_the_last, "wrong", "requests [0] unfinished, 1 launches never landed"),
        "no rows": (forgets_the_rows, "wrong", "a batch that stands alone has none"),
        "no must_land_first": (does_not_ask_whether_to_land_first, "wrong", "must_land_first() before schedule()"),
        "launched counts": (reports_what_it_launched, "wrong", "Report the one that landed"),
        "one kind": (one_kind_a_step, "wrong", "One step may have both kinds"),
        "keeps blocks": (keeps_the_blocks, "wrong", "scheduler.retire(...)"),
        "record": (returns_the_record, "wrong", "a dict with the keys prefill, decode, finished"),
        "the package's": (LLMEngine.step, "imported", "LLMEngine.step"),
        "calls the package's": (asks_the_package, "imported", "LLMEngine.step"),
        "copies the package's": (copies_the_package(), "imported", "LLMEngine.step"),
    }
}


def _ledger(gb=10**9, gib=2**30, heads="num_key_value_heads", pair=2, token=None, head_dim=None, width=None,
            late=False, refuse=True, by_tokens=False):  # fmt: skip
    """A kv_ledger with one thing done differently."""

    def kv_ledger(model, gpu, utilization, block_size, max_model_len):
        amount, unit = gpu.split()
        size = float(amount) * {"GB": gb, "GiB": gib}[unit]
        each = width or (4 if model.dtype == "float32" else 2)
        weights = model.num_parameters() * each
        left = (size - weights) * utilization if late else size * utilization - weights
        if left < 0 and refuse:
            raise ValueError(f"weights {weights} do not fit into {size * utilization}")
        dim = head_dim(model) if head_dim else model.head_dim
        kv = token(model, each) if token else pair * model.num_hidden_layers * getattr(model, heads) * dim * each
        blocks = int(left // (kv * block_size))
        sequences = blocks * block_size // max_model_len if by_tokens else blocks // -(-max_model_len // block_size)
        return {"blocks": blocks, "tokens": blocks * block_size, "sequences": sequences}

    return kv_ledger


def by_counting(model, gpu, utilization, block_size, max_model_len):
    """Right, in whole numbers only, with percent in place of a fraction and divmod in place of a ceiling."""
    number, unit = gpu.replace("GiB", "*2**30").replace("GB", "*10**9").split()
    bytes_each = {"float32": 4}.get(model.dtype, 2)
    room = int(number) * eval("1" + unit) * round(utilization * 1000) // 1000 if "." not in number else None
    if room is None:
        room = int(float(number) * eval("1" + unit) * utilization)
    room -= bytes_each * model.num_parameters()
    if room < 0:
        raise ValueError("no room for the weights")
    row = model.num_key_value_heads * model.head_dim * bytes_each
    blocks = room // (row * 2 * model.num_hidden_layers * block_size)
    whole, rest = divmod(max_model_len, block_size)
    return dict(blocks=blocks, tokens=block_size * blocks, sequences=blocks // (whole + (rest > 0)))


RIGHT["ex01b"] = {"float": _ledger(), "counting": by_counting}
WRONG["ex01b"] = {
    "GB is GiB": (_ledger(gb=2**30), "wrong", "GiB is 2**30"),
    "GiB is GB": (_ledger(gib=10**9), "wrong", "GiB is 2**30"),
    "query heads": (_ledger(heads="num_attention_heads"), "wrong", "not the query heads"),
    "K only": (_ledger(pair=1), "wrong", "keeps K and V"),
    "head_dim divided": (
        _ledger(head_dim=lambda m: m.hidden_size // m.num_attention_heads), "wrong", "head_dim is a field of its own"),
    "always two bytes": (_ledger(width=2), "wrong", "float32 four"),
    "utilization last": (_ledger(late=True), "wrong", "weights come off that"),
    "tokens divided": (_ledger(by_tokens=True), "wrong", "A sequence owns whole blocks"),
    "negative blocks": (_ledger(refuse=False), "wrong", "raise ValueError"),
    "no number": (lambda *a: None, "wrong", "a dict with the keys blocks, tokens, sequences"),
    "asks the package": (_ledger(token=lambda m, each: m.kv_bytes_per_token(each)), "imported", "kv_bytes_per_token"),
}  # fmt: skip
