"""Many tasks, one engine: the engine's loop in a thread of its own.

    tasks on the event loop   --add, abort-->   inbox   -->   loop thread: apply, step, look what is new
    Generation.__anext__      <--Updates, one wake-up a step--   call_soon_threadsafe

The engine is not thread-safe, so nobody but the loop thread touches it. What the event loop sees of
it are ``Update`` and ``Stats``: plain values, made between two steps.

A step begins only while the inbox is empty. So an abort that is posted during a step is done when that
step has landed, and its blocks are free before the next one is scheduled; with one step kept in flight
(overlap) they come back when that has landed, while the next one already runs. ``aborted`` counts it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.sequence import Sequence
from nanoengine.server.output_stream import EngineStopped, Generation, Guarded, Open, Overloaded, Request, Update
from nanoengine.server.stats import Stats, take_stats

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps that raise, one after the other, before their requests are given up
RECENT = 32  # finished requests that the guess for retry_after looks at


class AsyncEngine:
    """Runs ``engine`` for the tasks of one event loop.

    max_waiting: requests beyond config.max_num_seqs that may be open at the same time; one more is
        refused with Overloaded. (Where the KV pool holds fewer than max_num_seqs, so many more wait.)
    listener: called on the event loop with each Update as it happens, for metrics.
    on_thread_start: called first in the loop thread, for what is set per thread.
    stats: how the engine stood after the last step.
    aborted: of the requests that were aborted by their reader, {steps that began after that and before their
        blocks were free: requests}.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        max_waiting: int = 256,
        listener: Callable[[Update], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ):
        self.capacity = engine.config.max_num_seqs + max_waiting
        self.num_open = 0  # requests added and not ended: the event loop's own count
        self.stats: Stats = take_stats(engine, 0, 0)
        self.aborted: Counter[int] = Counter()
        self._engine, self._listener, self._on_thread_start = engine, listener, on_thread_start
        self._inbox: deque[tuple] = deque()
        self._wake = threading.Condition()  # guards the inbox, _begun and _ended
        self._begun = 0  # steps
        self._ended = False
        self._leaving: list[tuple[Sequence, int]] = []  # aborted, with a step in flight; _begun when it was posted
        self._by_seq: dict[int, Open] = {}
        self._steps = self._failures = self._failed_in_row = 0
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._accepting = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    # for tasks on the event loop

    def start(self) -> None:
        """Start the loop thread; to be called on the event loop that will use it, once."""
        self._loop, self._idle = asyncio.get_running_loop(), asyncio.Event()
        self._idle.set()
        self._thread.start()
        self._accepting = True

    @property
    def is_running(self) -> bool:
        """True while requests are taken."""
        return self._accepting and not self._ended

    async def add(self, requests: list[Request]) -> Generation:
        """Queue all of ``requests``, or none. Of a prompt with n > 1 samples come n (Request.samples).

        Errors: ValueError if one can never be served; Overloaded; EngineStopped.
        """
        count = len(requests)
        if not self.is_running:
            raise EngineStopped("the server is shutting down and takes no new requests")
        if not 1 <= count <= self.capacity:
            raise ValueError(f"one call may hold 1 to {self.capacity} prompts (times n samples), got {count}")
        if self.num_open + count > self.capacity:
            raise Overloaded(max(0, self.num_open - self.stats.running), self.retry_after())
        generation = Generation(count, lambda generation: self._post("abort", generation, stamped=True))
        added = self._loop.create_future()
        self._count(count)

        def settle(done: asyncio.Future) -> None:
            if done.result() is not None:
                self._count(-count)

        added.add_done_callback(settle)
        if not self._post("add", generation, requests, time.monotonic(), added):
            added.set_result(EngineStopped("the engine has stopped"))
        try:
            error = await asyncio.shield(added)
        except asyncio.CancelledError:  # the caller has gone; commands keep their order, so this ends what was queued
            generation.abort()
            raise
        if error is not None:
            raise error
        return generation

    def retry_after(self) -> int:
        """Seconds, 1 to 60: after how long, going by the last requests, one of the running ones ends."""
        if not self._durations:
            return 1
        mean = sum(self._durations) / len(self._durations)
        return min(60, max(1, math.ceil(mean / max(1, self.stats.running))))

    async def shutdown(self, grace_s: float = 30.0) -> None:
        """Take nothing more, let what is open finish for ``grace_s`` seconds, abort the rest, end the thread."""
        self._accepting = False
        try:
            await asyncio.wait_for(self._idle.wait(), max(0.0, grace_s))
        except TimeoutError:
            log.warning("shutting down: %d requests are aborted after %g s", self.num_open, grace_s)
        self._post("stop")
        await asyncio.to_thread(self._thread.join, 30.0)

    def _post(self, *command, stamped: bool = False) -> bool:
        """Leave a command for the loop thread; ``stamped``: with the number of steps that have begun."""
        with self._wake:
            if not self._ended:
                self._inbox.append((*command, self._begun) if stamped else command)
                self._wake.notify()
            return not self._ended

    def _count(self, change: int) -> None:
        self.num_open += change
        if self.num_open:
            self._idle.clear()
        else:
            self._idle.set()

    def _deliver(self, updates: list[tuple[Generation, Update]]) -> None:
        """Called on the event loop with what a step has brought."""
        for generation, update in updates:
            if self._listener is not None:
                self._listener(update)
            if update.finish_reason is not None:
                self._count(-1)
                if update.finish_reason not in ("abort", "error"):
                    self._durations.append(update.at - update.arrival)
            generation.put(update)

    # the loop thread

    def _run(self) -> None:
        try:
            if self._on_thread_start is not None:
                self._on_thread_start()
            while True:
                commands = self._take()
                if not commands:
                    self._step()
                elif not self._apply(commands):
                    break
        except BaseException:
            log.exception("the engine's thread has died")
        finally:
            self._finish()

    def _take(self) -> list[tuple]:
        """The commands that have come; waits for one if there is nothing else to do. None: a step begins now."""
        with self._wake:
            while not self._inbox and not self._engine.has_unfinished():
                self._wake.wait()
            commands = list(self._inbox)
            self._inbox.clear()
            if not commands:  # under the lock: a command is either seen here or knows of this step
                self._begun += 1
        return commands

    def _apply(self, commands: list[tuple]) -> bool:
        """Do what the commands say; False to stop."""
        for kind, *arguments in commands:
            if kind == "add":
                self._add(*arguments)
            elif kind == "abort":
                generation, begun = arguments
                records = [record for record in self._by_seq.values() if record.generation is generation]
                self._leaving += [(record.seq, begun) for record in records]
                self._abort(records)
        return not any(kind == "stop" for kind, *_ in commands)

    def _add(self, generation: Generation, requests: list[Request], arrival: float, added: asyncio.Future) -> None:
        """Queue all, or none if one is refused; ``added`` gets the reason, or None."""
        seqs: list[Sequence] = []
        error = None
        try:
            for request in requests:
                text = None if request.detokenizer is None else Guarded(request.detokenizer)
                seqs.append(self._engine.add_request(request.prompt_token_ids, request.params, prompt=request.prompt,
                                                     detokenizer=text, cache_salt=request.cache_salt))  # fmt: skip
        except Exception as refused:
            error = refused
            for seq in seqs:
                self._engine.abort(seq)
        else:
            for index, seq in enumerate(seqs):
                self._by_seq[seq.seq_id] = Open(seq, generation, index, arrival)
        self._call(added.set_result, error)

    def _abort(self, records: list[Open]) -> None:
        for record in records:
            self._engine.abort(record.seq)
        self._report(records)

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except Exception:
            # What ran starts over, by the engine's own rule. What ended in this very step stands in no
            # output, only its finish_reason tells: so all are looked at.
            log.exception("a step of the engine failed; its requests start over")
            self._failures += 1
            self._failed_in_row += 1
            if self._engine.runner.failure:  # a rank is lost: no step will ever succeed again
                self._give_up(failed=True)
                raise
            self._look_at(list(self._by_seq.values()))
            if self._failed_in_row >= MAX_FAILURES:
                self._give_up(failed=True)
            return
        self._steps += 1
        if output.seqs:
            self._failed_in_row = 0
        self._look_at([self._by_seq[seq.seq_id] for seq in output.seqs if seq.seq_id in self._by_seq])

    def _look_at(self, records: list[Open]) -> None:
        """Report what is new, and end with an error what cannot go on."""
        for record in records:
            if record.is_broken:
                record.failed = True
                self._engine.abort(record.seq)
        self._report(records)

    def _give_up(self, failed: bool) -> None:
        """Abort everything."""
        records = list(self._by_seq.values())
        for record in records:
            record.failed = failed
        self._abort(records)
        self._failed_in_row = 0

    def _report(self, records: list[Open]) -> None:
        """Tell the event loop what is new of these requests, and how the engine stands."""
        self.stats = take_stats(self._engine, self._steps, self._failures)
        self._count_left()
        now, updates = time.monotonic(), []
        for record in records:
            if record.has_news:
                updates.append((record.generation, record.update(now)))
                if record.seq.error is not None:
                    log.error("a request ended with an error: %s", record.seq.error)
            if record.seq.finish_reason is not None:
                del self._by_seq[record.seq.seq_id]
        if updates:
            self._call(self._deliver, updates)

    def _count_left(self) -> None:
        """Of those aborted, whose blocks have come back? With nothing in flight nobody's are held any more."""
        held = [(seq, begun) for seq, begun in self._leaving if seq.block_table and self._engine.in_flight]
        self.aborted.update(self._begun - begun for seq, begun in self._leaving if (seq, begun) not in held)
        self._leaving = held

    def _finish(self) -> None:
        """Nobody shall wait for an engine that has stopped; its last step in flight gives its blocks back."""
        with self._wake:
            self._ended = True
            left = [command for command in self._inbox if command[0] == "add"]
        for _, _, _, _, added in left:
            self._call(added.set_result, EngineStopped("the engine has stopped"))
        try:
            self._give_up(failed=False)
            while self._engine.in_flight:
                self._step()
        except BaseException:
            log.exception("the engine could not be put in order")

    def _call(self, function, *arguments) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop has closed: nobody is left to hear it
            log.debug("the event loop has closed")
