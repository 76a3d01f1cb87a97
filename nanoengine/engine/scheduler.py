"""Which sequences compute how many tokens in the next step.

Two policies over the same state and the same progress counter:
    TokenBudgetScheduler   running first, then waiting, one token budget, phases mixed (as vLLM V1)
    PrefillFirstScheduler  a step is all prefill or all decode, prefill first (as nano-vllm)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoengine.config import EngineConfig
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.sequence import Sequence, Status


@dataclass(slots=True)
class Plan:
    """What schedule() decided: rows of the batch (each with its num_scheduled_tokens) and why.

    events: plain dicts {"kind": "admit" | "hit" | "preempt", "seq": id, ...}, in order.
    land_first: it would have to preempt while a step is in flight; the plan stays empty, the engine
        lands that step, and the next schedule() is free to preempt.
    """

    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    events: list[dict] = field(default_factory=list)
    land_first: bool = False

    def add(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_scheduled_tokens = num_tokens
        self.seqs.append(seq)
        self.num_tokens += num_tokens


class Scheduler:
    """State and moves that both policies share; a policy is one method, ``schedule``.

    waiting: first come, first served; preempted sequences go back to its front.
    running: in order of admission, so that the last one is the victim of a preemption and the
    first one always makes progress.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager):
        self.block_manager = block_manager
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        cap = config.max_mixed_prefill_tokens
        self.max_mixed_prefill_tokens = cap or self.max_num_batched_tokens
        self.watermark_blocks = int(config.watermark * block_manager.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    # what the engine calls

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> Plan:
        raise NotImplementedError("use TokenBudgetScheduler or PrefillFirstScheduler, or write your own")

    def must_land_first(self) -> bool:
        """True if the next schedule() might preempt, which needs every step landed.

        A running sequence needs one block a step at most (a prefill has all of its own already).
        After several new tokens it may need more: if they are not there, see Plan.land_first.
        """
        return self.block_manager.num_free_blocks < len(self.running)

    def advance(self, plan: Plan) -> None:
        """The plan was launched: its tokens count as computed, and the last one brings a new token.

        If it brings several, ``land`` sets num_tokens right.
        """
        as_planned = len(plan.seqs) == len(self.running)
        for seq in plan.seqs:
            seq.num_in_flight += 1
            seq.num_computed_tokens = computed = seq.num_computed_tokens + seq.num_scheduled_tokens
            if computed == seq.num_tokens:
                seq.num_tokens = computed + 1
            else:
                as_planned = False
        if not as_planned:  # a chunk, or a row left out: has a policy cut what was registered as scheduled?
            self._check_registered()

    def retire(self, finished: list[Sequence]) -> None:
        """Sequences that have ended leave the queues; their blocks go back once nothing is in flight."""
        for seq in finished:
            if seq.status is Status.WAITING:
                self.waiting.remove(seq)
            seq.status = Status.FINISHED
            if not seq.num_in_flight:
                self.block_manager.free(seq)
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def restart(self, unfinished: Iterable[Sequence]) -> None:
        """After a step that failed half-way: all KV is dropped, nothing else is lost."""
        self.block_manager.reset()
        self.running, self.waiting = [], deque(unfinished)
        for seq in self.waiting:
            seq.restart()

    # what policies are made of

    def schedule_running(self, plan: Plan, seqs: list[Sequence]) -> None:
        """Give each of ``seqs``, in order, its next tokens; preempt from the end where blocks run out."""
        if plan.land_first:
            return
        budget = self.max_num_batched_tokens - plan.num_tokens
        rows, running = plan.seqs, Status.RUNNING  # locals: this loop is the scheduler's hot path
        for seq in seqs:
            computed, total = seq.num_computed_tokens, seq.num_tokens
            if total >= seq.max_total_tokens or seq.status is not running:
                continue  # its last token is already in flight; or it was preempted a moment ago
            wanted = total - computed
            if wanted > 1 or not budget:  # a prefill, several new tokens, or nothing left to give
                if not budget:
                    break
                wanted = min(wanted, budget)
                if computed < seq.num_prefill_tokens:
                    wanted = min(wanted, self.prefill_room(plan))
                if not wanted:
                    continue  # this step's share of prefills is spent: decodes may follow
            if computed + wanted > seq.capacity and not self._make_room(plan, seq, wanted):
                if plan.land_first:
                    rows.clear()
                    return
                continue
            seq.num_scheduled_tokens = wanted
            budget -= wanted
            rows.append(seq)
        plan.num_tokens = self.max_num_batched_tokens - budget
        if plan.num_tokens > len(rows):  # chunks of prompts among them: see admit_waiting
            for seq in rows:
                if seq.num_scheduled_tokens > 1 or seq.num_computed_tokens < seq.num_prompt_tokens:
                    self.block_manager.commit(seq, seq.num_computed_tokens + seq.num_scheduled_tokens)

    def prefill_room(self, plan: Plan) -> int:
        """Tokens of prefills that this step may still take.

        While a running sequence decodes, all prefills of a step together get at most
        max_mixed_prefill_tokens, whatever the decodes take; else all that is left of the budget.
        """
        left, most = self.max_num_batched_tokens - plan.num_tokens, self.max_mixed_prefill_tokens
        if most < self.max_num_batched_tokens and any(map(_decodes, self.running)):
            rows = (seq for seq in plan.seqs if seq.num_computed_tokens < seq.num_prefill_tokens)
            left = min(left, max(0, most - sum(seq.num_scheduled_tokens for seq in rows)))
        return left

    def _make_room(self, plan: Plan, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the latest sequences until ``seq`` can grow; False if that was ``seq`` itself.

        False, too, and nobody is preempted, if a step in flight has to land first.
        """
        while not self.block_manager.grow(seq, num_tokens):
            if any(other.num_in_flight for other in self.running):
                plan.land_first = True
                return False
            victim = self.running[-1]
            self.preempt(plan, victim, seq)
            if victim is seq:
                return False
        return True

    def preempt(self, plan: Plan, victim: Sequence, needed_by: Sequence) -> None:
        """Take all blocks of ``victim``; its tokens stay and their KV is computed again later."""
        if victim.num_in_flight:
            raise RuntimeError(f"sequence {victim.seq_id} has a step in flight: land it before preempting")
        if victim in plan.seqs:
            raise RuntimeError(f"sequence {victim.seq_id} is already in this plan: schedule in order of admission")
        self.running.remove(victim)
        plan.events.append({"kind": "preempt", "seq": victim.seq_id, "needed_by": needed_by.seq_id,
                            "blocks": len(victim.block_table), "computed": victim.num_computed_tokens})  # fmt: skip
        self.block_manager.free(victim)
        victim.restart()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def admit_waiting(self, plan: Plan) -> None:
        """Start waiting sequences, in order, while slots, budget and blocks last.

        A sequence starts only if its whole prompt fits. While others run, the watermark stays
        free; with nothing running the first in line always fits (add_request made sure of it).
        The full blocks that it computes in this step are registered at once: the next one in line
        may share them, as a step stores all of its KV before any row attends (see Runner).
        """
        manager = self.block_manager
        while self.waiting and len(self.running) < self.max_num_seqs and not plan.land_first:
            budget = self.prefill_room(plan)
            seq = self.waiting[0]
            cached = manager.lookup(seq) if budget else []
            reserve = self.watermark_blocks if self.running else 0
            if not budget or not manager.can_allocate(seq, cached, reserve):
                break
            self.waiting.popleft()
            manager.allocate(seq, cached)
            seq.status = Status.RUNNING
            self.running.append(seq)
            plan.events.append({"kind": "admit", "seq": seq.seq_id, "blocks": len(seq.block_table)})
            if cached:
                plan.events.append({"kind": "hit", "seq": seq.seq_id, "tokens": seq.num_computed_tokens,
                                    "own": seq.num_preemptions > 0})  # fmt: skip
            plan.add(seq, min(seq.num_tokens - seq.num_computed_tokens, budget))
            manager.commit(seq, seq.num_computed_tokens + seq.num_scheduled_tokens)

    def _check_registered(self) -> None:
        """RuntimeError if a block is registered that no launched step writes: it would be a false hit."""
        for seq in self.running:
            registered = seq.num_committed_blocks * self.block_manager.block_size
            if registered > seq.num_computed_tokens:
                raise RuntimeError(
                    f"sequence {seq.seq_id} has computed {seq.num_computed_tokens} tokens, but {registered} are in the "
                    "prefix cache: a policy may not take back tokens that were scheduled (others may share them in "
                    "the same step); give fewer in the first place, or set enable_prefix_caching=False"
                )


def _decodes(seq: Sequence) -> bool:
    """True if a running ``seq`` wants a next token, and its last one is not in flight already."""
    prefilled = seq.num_computed_tokens >= seq.num_prefill_tokens
    return prefilled and seq.num_tokens < seq.max_total_tokens


class TokenBudgetScheduler(Scheduler):
    """No phases: running sequences first (one token, or the next chunk), then newcomers.

    All share one budget; while others decode, prefills get max_mixed_prefill_tokens of it at most.
    """

    def schedule(self) -> Plan:
        plan = Plan()
        self.schedule_running(plan, self.running[:])
        if not any(event["kind"] == "preempt" for event in plan.events):
            self.admit_waiting(plan)
        return plan


class PrefillFirstScheduler(Scheduler):
    """One kind of work a step: prompts as long as there are any, else one token of all that run.

    It never mixes, so max_mixed_prefill_tokens means nothing: decodes wait until no prompt is left.
    """

    def prefill_room(self, plan: Plan) -> int:
        return self.max_num_batched_tokens - plan.num_tokens

    def schedule(self) -> Plan:
        plan = Plan()
        # in place, not a function: every decode is asked. A last token left alone costs what a decode costs.
        prefills = [
            seq
            for seq in self.running
            if seq.num_tokens - seq.num_computed_tokens > 1 and seq.num_computed_tokens < seq.num_prefill_tokens
        ]
        self.schedule_running(plan, prefills)
        self.admit_waiting(plan)
        if not plan.seqs:
            self.schedule_running(plan, self.running[:])
        return plan


POLICIES = {"token_budget": TokenBudgetScheduler, "prefill_first": PrefillFirstScheduler}
