"""The loop in your own hands, with nano-vllm's names and shapes."""

from __future__ import annotations

import warnings

from nanoengine.engine.sequence import Sequence
from nanoengine.interrupt import interruptible
from nanoengine.prompts import params_list, prompt_list


class OwnLoop:
    """Mixed into LLM.

        llm.add_request("The capital of France is", SamplingParams(max_tokens=8))
        while not llm.is_finished():
            finished, num_tokens = llm.step()
            for seq_id, token_ids in finished:
                print(llm.tokenizer.decode(token_ids))
        llm.exit()

    generate, stream and chat may be called in between: each call returns its own requests only, and
    what was added here is reported by step() alone, even if another call's steps have finished it.
    """

    _added: dict[int, Sequence] | None = None  # added here and not yet reported by step(), by id

    def add_request(self, prompt, sampling_params=None) -> int:
        """Queue one prompt (whatever ``generate`` takes for one); returns its id, as in step().

        Errors: ValueError for a request that can never be served, or for a list of prompts.
        """
        count = len(prompt_list(prompt))
        if count != 1:
            raise ValueError(f"add_request takes one prompt, got {count}: call it for each")
        (params,) = params_list(sampling_params, 1, None)
        if getattr(params, "n", 1) != 1:
            raise ValueError(f"add_request takes n=1, got n={params.n}: add each of params.samples()")
        (seqs,) = self._add_all(prompt, params, incremental=False)
        if self._added is None:
            self._added = {}
        self._added.update((seq.seq_id, seq) for seq in seqs)
        return seqs[0].seq_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """One step of the engine: (requests of add_request that have ended, number of tokens).

        Each as (id, generated token ids), by id. The number is nano-vllm's: prompt tokens computed
        in this step, or, if there were none, minus the number of tokens decoded. In nano-vllm a
        step is one phase; here it may be both (policy="prefill_first" never mixes), and then its
        decodes are not counted. 0 while a result is on its way (overlap=1), or with nothing to do.
        A request that ended with an error has the tokens before it; Python's warnings say why.
        """
        engine, added, num_tokens = self._engine(), self._added or {}, 0
        if any(seq.finish_reason is None for seq in added.values()):
            with interruptible():
                output = engine.step()
            num_tokens = output.num_prefill_tokens or -output.num_decode_tokens
        done = [seq for seq in added.values() if seq.finish_reason is not None]
        for seq in done:
            del added[seq.seq_id]
            if seq.error is not None:
                warnings.warn(f"request {seq.seq_id} ended with an error: {seq.error}", stacklevel=2)
        self._abort([])  # with nothing left, land the step in flight: it holds blocks
        return [(seq.seq_id, seq.output_ids) for seq in done], num_tokens

    def is_finished(self) -> bool:
        """True once step() has reported every request that add_request has queued."""
        return not self._added

    def exit(self) -> None:
        """close(). Without it the end of the program ends the processes of other ranks, too."""
        self.close()
