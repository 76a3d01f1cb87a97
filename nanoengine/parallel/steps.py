"""A batch on its way to the other ranks: what they need of it, and no block table twice.

A step of 256 decoding sequences is some 16 KB. Block tables are kept at the other end by request row
and only what is new is sent, so that no step sends more because its contexts are long.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nanoengine.engine.batch import Batch
from nanoengine.engine.prompt_rows import PromptRows
from nanoengine.engine.rows import SentBlocks, TableUpdate


@dataclass(slots=True)
class StepMessage:
    """batch: without its sequences and block tables. updates: what is new in which rows' tables."""

    batch: Batch
    updates: list[TableUpdate]


class StepSender:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._sent = SentBlocks()

    def pack(self, batch: Batch) -> StepMessage:
        """Plain data, to be pickled at once."""
        prompt = None if batch.prompt is None else PromptRows(batch.prompt.tokens)
        sent = dataclasses.replace(batch, seqs=[], block_tables=[], prompt=prompt)
        return StepMessage(sent, self._sent.updates(batch))


class StepReceiver:
    """Another rank's side: gives the batch that was packed, its rows in the same order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}  # by request row

    def unpack(self, message: StepMessage) -> Batch:
        """``seqs`` are bare numbers: nobody samples here."""
        for update in message.updates:
            self._tables.setdefault(update.row, [])[update.start :] = update.blocks
        rows = message.batch.rows.tolist()
        return dataclasses.replace(
            message.batch,
            seqs=list(range(len(rows))),
            block_tables=[self._tables[row] for row in rows],
        )
