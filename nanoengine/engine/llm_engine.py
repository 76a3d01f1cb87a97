"""The engine: schedule -> run -> postprocess, again and again.

Each step asks the scheduler who runs, lays the chosen tokens out as one ragged batch, launches it,
and writes the sampled tokens back. All else lives elsewhere: what may be asked in ``admission``,
who gets blocks in ``block_manager``, how a batch is laid out in ``batch``, when an answer ends in
``postprocess``, and text, chat and streaming in ``nanoengine.llm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from nanoengine.config import EngineConfig
from nanoengine.engine.admission import make_sequence
from nanoengine.engine.batch import Batch, build_batch
from nanoengine.engine.parts import choose_parts
from nanoengine.engine.postprocess import InFlight, StepOutput, end, land
from nanoengine.engine.rows import RowTable, num_request_rows
from nanoengine.engine.scheduler import Plan
from nanoengine.engine.sequence import Sequence


class LLMEngine:
    """Token ids in, token ids out. Each part can be your own (engine.protocols); observer: a Trace."""

    def __init__(self, config: EngineConfig, runner, *, block_manager=None, scheduler=None, observer=None):
        self.config, self.runner, self.observer = config, runner, observer
        self.block_manager, self.scheduler = choose_parts(config, runner, block_manager, scheduler)
        self.sequences: dict[int, Sequence] = {}  # all that have not finished, by id, oldest first
        self.in_flight: list[InFlight] = []
        self._ids = itertools.count()
        self.overlap = runner.overlap if config.overlap is None else config.overlap
        self.rows = RowTable(num_request_rows(config.max_num_seqs))

    def add_request(self, prompt_token_ids, params=None, **more) -> Sequence:
        """Queue one request. ValueError if it can never be served; the engine goes on.
        more: prompt, detokenizer, cache_salt (see make_sequence)."""
        pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
        seq = make_sequence(self.config, pool_tokens, next(self._ids), prompt_token_ids, params,
                            runner=self.runner, **more)  # fmt: skip
        self.sequences[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        """End a request now. Its blocks go back at once, or when its step in flight lands."""
        if self.sequences.get(seq.seq_id) is seq:
            del self.sequences[seq.seq_id]
            end(seq, "abort")
            self.scheduler.retire([seq])

    def has_unfinished(self) -> bool:
        return bool(self.sequences or self.in_flight)

    def step(self) -> StepOutput:
        """One turn of the engine. If it raises, nothing is lost: what was running starts over."""
        try:
            if self.in_flight and (self.scheduler.must_land_first() or self.in_flight[0].needs_history):
                return self._land()
            plan = self.scheduler.schedule()  # 1. who runs, and how many tokens of each
            if plan.seqs:
                batch = self.build_batch(plan)
                record = self.observer.before(self, plan, batch) if self.observer is not None else None
                pending = self.runner.launch(batch)  # 2. run: the forward pass and the sampler
                self.in_flight.append(InFlight(plan, batch, pending, record))
                self.scheduler.advance(plan)
            elif self.sequences and not self.in_flight:
                raise RuntimeError(f"the scheduler runs nothing, with {len(self.sequences)} requests unfinished")
            if len(self.in_flight) > (self.overlap if plan.seqs else 0):
                return self._land()  # 3. postprocess: append, stop, free
            return StepOutput()
        except BaseException:
            self.in_flight.clear()
            self.rows.reset()
            self.sequences = {i: seq for i, seq in self.sequences.items() if seq.finish_reason is None}
            self.scheduler.restart(self.sequences.values())
            raise

    def build_batch(self, plan: Plan) -> Batch:
        """Give each scheduled sequence its row, and lay out their tokens."""
        return build_batch(plan.seqs, self.block_manager.block_size, self.rows.assign(plan.seqs))

    def _land(self) -> StepOutput:
        step = self.in_flight.pop(0)
        output = land(step, self.block_manager)
        for seq in output.finished:
            del self.sequences[seq.seq_id]
        if output.finished:
            self.scheduler.retire(output.finished)
        if self.observer is not None:
            self.observer.after(self, step, output)
        return output

    def run(self) -> Iterator[StepOutput]:
        """Steps until every request has finished."""
        while self.has_unfinished():
            yield self.step()
