"""The public face: text in, text out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.sequence import Sequence
from nanoengine.interrupt import interruptible
from nanoengine.loader.resolve import resolve_model
from nanoengine.outputs import CompletionOutput, RequestOutput
from nanoengine.own_loop import OwnLoop
from nanoengine.prompts import cache_salt_of, conversations, params_list, prompt_list, prompt_parts
from nanoengine.rebinding import about_to_be_replaced
from nanoengine.runners import make_runner
from nanoengine.sampling_params import SamplingParams, with_bad_words_ids
from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer, detokenize
from nanoengine.tokenizer.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

PARTS = ("engine_class", "scheduler", "block_manager", "runner", "sampler", "attention_backend", "observer")


class LLM(OwnLoop):
    """A model and the engine that runs it.

        with LLM() as llm:
            print(llm.generate("The capital of France is")[0].text)

    model: None (the embedded SmolLM2-135M-Instruct), a folder, a .gguf file, a Hugging Face repo id,
        or with load_format="dummy" the name of a shape ("qwen3-0.6b", …) with random weights.
    tokenizer: a folder with a tokenizer.json, where the model's own is not wanted.
    settings: the fields of EngineConfig (max_model_len, max_num_seqs, block_size, policy, device, …).
        max_model_len: by default what the model was trained for.
    Of the model's generation_config.json the end tokens count; its sampling values do not (see SamplingParams).
    parts: your own engine_class, scheduler, block_manager, runner, sampler, attention_backend or observer.

    Not thread-safe: call it from one thread at a time. A notebook line ``llm = LLM()`` that runs again
    closes the LLM that the name held before; if the new one then cannot be made, both are gone.
    Errors: TypeError for an unknown keyword; ValueError or an error that names file and tensor;
        what a part of yours raises. Then nothing stays behind: no weights, no KV pool, no process.
        A runner of yours is not closed then: only once the LLM is made, close() closes it.
    """

    def __init__(self, model: str | Path | None = None, *, tokenizer=None, load_format: str = "auto", **settings):
        unknown = [name for name in settings if name not in (*EngineConfig.names(), *PARTS)]
        if unknown:
            raise TypeError(f"LLM() got an unexpected keyword argument {unknown[0]!r}; it takes model, tokenizer, "
                            f"load_format, {', '.join((*EngineConfig.names(), *PARTS))}")  # fmt: skip
        parts = {name: settings.pop(name) for name in PARTS if name in settings}
        files = resolve_model(model, load_format=load_format)
        if settings.get("max_model_len") is None:
            settings["max_model_len"] = files.config.max_position_embeddings
        self.model_config = files.config
        self.config = EngineConfig(
            **{"vocab_size": files.config.vocab_size, "eos_token_ids": files.config.eos_token_ids} | settings
        )
        self.tokenizer = self._load_tokenizer(tokenizer, files)
        self.tokenizer.warn_of_ids_from(files.config.vocab_size)
        self.engine: LLMEngine | None = None
        replaced = about_to_be_replaced(LLM, sys._getframe(1))
        if replaced is not None:
            replaced.close()
        engine_class, runner = parts.pop("engine_class", LLMEngine), parts.pop("runner", None)
        is_mine, brought = runner is None, [name for name in ("sampler", "attention_backend") if name in parts]
        if brought and not is_mine:
            raise TypeError(f"{', '.join(brought)}: a runner of your own brings its own parts")
        if is_mine:
            sampler, attention = parts.pop("sampler", None), parts.pop("attention_backend", None)
            runner = make_runner(self.config, model=files, sampler=sampler, attention=attention)
        try:
            self.engine = engine_class(self.config, runner, **parts)
        except BaseException:  # whatever a part of yours raises: who made the runner closes it
            if is_mine:
                runner.close()
            raise

    def generate(self, prompts, sampling_params=None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts.

        prompts: a str, a list of token ids, a dict(prompt=…) or dict(prompt_token_ids=…), or a list
            of such; a dict may have a cache_salt, then only prompts of the same salt share its KV.
            A control token in a text (``<|im_end|>``) is taken as that token, as transformers does:
            take it out of what strangers typed, or give token ids.
        sampling_params: one for all, or a list with one a prompt; n samples stand in ``outputs``.
        Errors: ValueError for a request that can never be served; then nothing was started. A request
            of which no token can be drawn raises nothing: see RequestOutput.error.
        Ctrl-C ends the call between two steps; its requests are aborted and hold no block.
        """
        groups = self._add_all(prompts, sampling_params, incremental=False)
        seqs = [seq for group in groups for seq in group]
        try:
            bar = tqdm(total=len(seqs), desc="requests", disable=not use_tqdm or not seqs, dynamic_ncols=True)
            with bar, interruptible() as check, _counting(bar) as count:
                ours, left = set(seqs), list(seqs)
                while left:
                    check()
                    out = self._engine().step()
                    while left and left[-1].finish_reason is not None:
                        left.pop()
                    count(out, sum(seq in ours for seq in out.finished))
        finally:
            self._abort(seqs)
        return [self._output(group, index) for index, group in enumerate(groups)]

    def stream(self, prompts, sampling_params=None) -> Iterator[RequestOutput]:
        """Yield a RequestOutput each time a request gets tokens; ``delta`` is the new text.

        Of n > 1 samples an item is about one, ``outputs[0].index``; ``index`` tells the prompt.

        Text that may still become part of a stop string, or is half a character, is held back. The
        deltas of a request join to its final ``text``. Leaving the loop aborts what is unfinished.
        The requests are checked and queued at once, not at the first item. Streams may be read in
        turns, and generate may be called in between: each goes on where it was.
        """
        stream = self._stream(self._add_all(prompts, sampling_params, incremental=True))
        next(stream)
        return stream

    def chat(
        self, messages, sampling_params=None, *, use_tqdm: bool = True, chat_template_kwargs: dict | None = None
    ) -> list[RequestOutput]:
        """Answer a conversation (list of {"role", "content"}), a list of conversations, or one user message.

        chat_template_kwargs: variables that the model's template reads (enable_thinking, …); also
            continue_final_message=True, to go on with the last message's text.
        Control tokens in a message's text count as such: see ``generate``.
        Errors: ValueError naming the field (messages[0].content, …) or the name that no template reads.
        """
        return self.generate(self._chat_prompts(messages, chat_template_kwargs), sampling_params, use_tqdm=use_tqdm)

    def stream_chat(
        self, messages, sampling_params=None, *, chat_template_kwargs: dict | None = None
    ) -> Iterator[RequestOutput]:
        """``stream`` for what ``chat`` takes."""
        return self.stream(self._chat_prompts(messages, chat_template_kwargs), sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, and nothing changes, while a request holds blocks of it."""
        manager = self._engine().block_manager
        if unused := manager.num_free_blocks == manager.num_blocks:
            manager.reset()
        return unused

    def close(self) -> None:
        """Give weights and KV memory back; the object is of no further use."""
        if self.engine is not None:
            for seq in list(self.engine.sequences.values()):
                self.engine.abort(seq)
            self.engine.runner.close()
            self.engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _engine(self) -> LLMEngine:
        if self.engine is None:
            raise RuntimeError(
                "this LLM was closed: make a new one "
                "(a notebook line that makes one anew closes the old one first)"
            )
        return self.engine

    @staticmethod
    def _load_tokenizer(tokenizer, files) -> Tokenizer:
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        folder = tokenizer or files.folder
        if files.load_format == "dummy" and not (folder and (Path(folder) / "tokenizer.json").exists()):
            return byte_tokenizer(files.config.vocab_size)
        return load_tokenizer(folder)

    def _add_all(self, prompts, sampling_params, *, incremental: bool) -> list[list[Sequence]]:
        """Queue all requests of one call, or none: one that is refused takes the others back. Samples by prompt."""
        engine, groups = self._engine(), []
        prompts, before = prompt_list(prompts), set(engine.sequences)
        try:
            wanted = params_list(sampling_params, len(prompts), SamplingParams())
            for prompt, params in zip(prompts, wanted, strict=True):
                (text, ids), salt = prompt_parts(prompt, self.tokenizer.encode), cache_salt_of(prompt)
                params = with_bad_words_ids(params, self.tokenizer.encode)
                groups.append([])
                for each in params.samples() if isinstance(params, SamplingParams) else [params]:
                    detokenizer = self._detokenizer(each) if incremental or getattr(each, "stop", ()) else None
                    seq = engine.add_request(ids, each, prompt=text, detokenizer=detokenizer, cache_salt=salt)
                    ids = seq.token_ids  # checked; the prompt may be an iterator, and is spent
                    groups[-1].append(seq)
        except BaseException:  # by what is new in the engine: Ctrl-C may come before the append
            self._abort([seq for seq in engine.sequences.values() if seq.seq_id not in before])
            raise
        return groups

    def _detokenizer(self, params: SamplingParams | None) -> IncrementalDetokenizer | None:
        params = params if isinstance(params, SamplingParams) else SamplingParams()
        if not params.detokenize:
            return None
        return IncrementalDetokenizer.of(self.tokenizer, params)

    def _stream(self, groups: list[list[Sequence]]) -> Iterator[RequestOutput | None]:
        # Items follow the sequences, not this loop's steps: steps of other calls bring tokens, too.
        left = {(i, k): seq for i, group in enumerate(groups) for k, seq in enumerate(group)}
        seqs, num_tokens, num_chars = list(left.values()), dict.fromkeys(left, 0), dict.fromkeys(left, 0)
        try:
            yield None  # for stream(): only a generator that was started cleans up if it is dropped unread
            while left:
                told = False
                for i, seq in list(left.items()):
                    if seq.finish_reason is not None:
                        del left[i]
                    elif seq.num_output_tokens == num_tokens[i]:
                        continue
                    item = self._output([seq], *i)
                    item.delta = item.text[num_chars[i] :]
                    num_tokens[i], num_chars[i] = len(item.token_ids), len(item.text)
                    told = True
                    yield item
                if not told:  # else look again first: much may have happened meanwhile
                    with interruptible():
                        self._engine().step()
        finally:
            self._abort(seqs)

    def _abort(self, seqs: list[Sequence]) -> None:
        """End what has not ended; with nothing else to do, land the step in flight: it holds blocks."""
        if self.engine is not None:
            for seq in seqs:
                if seq.finish_reason is None:
                    self.engine.abort(seq)
            while self.engine.in_flight and not self.engine.sequences:
                self.engine.step()

    def _chat_prompts(self, messages, kwargs: dict | None) -> list[dict]:
        kwargs = {} if kwargs is None else kwargs
        self.tokenizer.check_template_kwargs(kwargs)
        texts = [self.tokenizer.apply_chat_template(talk, **kwargs) for talk in conversations(messages)]
        # the template wrote the special tokens: encoding must not add them again
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids, strict=True)]

    def _output(self, group: list[Sequence], index: int, first_sample: int = 0) -> RequestOutput:
        samples = [self._sample(seq, k) for k, seq in enumerate(group, first_sample)]
        seq, first = group[0], samples[0]
        metrics = {"arrival": seq.arrival, "first_token": seq.first_token, "finished": seq.finished_at}
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=seq.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=first.token_ids,
            text=first.text,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            error=seq.error,
            logprobs=first.logprobs,
            prompt_logprobs=None if seq.prompt_logprobs is None else list(seq.prompt_logprobs),
            num_cached_tokens=seq.num_cached_tokens,
            metrics={k: v for k, v in metrics.items() if v is not None} | {"preemptions": seq.num_preemptions},
            index=index,
            outputs=samples,
        )

    def _sample(self, seq: Sequence, index: int) -> CompletionOutput:
        ids, logprobs = seq.output_ids, None if seq.logprobs is None else list(seq.logprobs)
        return CompletionOutput(index, self._text(seq, ids), ids, seq.finish_reason, seq.stop_reason, logprobs,
                                seq.error)

    def _text(self, seq: Sequence, ids: list[int]) -> str:
        if seq.detokenizer is not None:
            return seq.detokenizer.text
        if not seq.params.detokenize:
            return ""
        # without stop strings the last id is the end token
        if seq.finish_reason == "stop" and not seq.params.include_stop_str_in_output:
            ids = ids[:-1]
        return detokenize(self.tokenizer, ids, seq.params.skip_special_tokens)


@contextmanager
def _counting(bar):
    """Show how many tokens a second the engine computes and generates."""
    totals = dataclasses.make_dataclass("Totals", [("prompt", int, 0), ("new", int, 0)])()

    def count(out, finished: int) -> None:
        totals.prompt += out.num_prefill_tokens
        totals.new += sum(map(len, out.new_tokens))
        if not bar.disable:
            elapsed = max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"in {totals.prompt / elapsed:.0f} tok/s, out {totals.new / elapsed:.0f} tok/s", False)
            bar.update(finished)

    yield count
