"""Answers to the exercises of lesson 06 as learners might write them: right in several shapes, wrong in likely ways.

The solutions in exercises/src are one more right answer each. With a wrong answer stand words of its message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from tests.course_exercises.answers_06_order import RIGHT_ORDERS, WRONG_ORDERS


def _blocks(size, token_ids):
    return [tuple(token_ids[i : i + size]) for i in range(0, len(token_ids) - size + 1, size)]


@dataclass(eq=False)
class _Node:
    """A note that is compared by identity: the parent is an object, so nothing has to be numbered."""

    parent: _Node | None
    tokens: tuple
    block: int


class ParentIsAnObject:
    def __init__(self, block_size, hash_function):
        self.size, self.hash = block_size, hash_function
        self.by_key, self.by_block = {}, {}

    def insert(self, token_ids, blocks):
        key, parent = 0, None
        for tokens, block in zip(_blocks(self.size, token_ids), blocks, strict=False):
            key = self.hash(key, tokens)
            node = self.by_key.get(key)
            if node is None or node.parent is not parent or node.tokens != tokens:
                node = self.by_key[key] = self.by_block[block] = _Node(parent, tokens, block)
            parent = node

    def match(self, token_ids):
        key, parent, found = 0, None, []
        for tokens in _blocks(self.size, token_ids[:-1]):
            key = self.hash(key, tokens)
            node = self.by_key.get(key)
            if node is None or node.parent is not parent or node.tokens != tokens:
                return found
            found.append(node.block)
            parent = node
        return found

    def evict(self, block):
        node = self.by_block.pop(block, None)
        for key in [key for key, known in self.by_key.items() if known is node]:
            del self.by_key[key]


class KeepsWholePrefix:
    """A bucket a key, the whole prefix kept in each note: no parents at all, and more memory."""

    def __init__(self, block_size, hash_function):
        self.size, self.hash, self.buckets = block_size, hash_function, {}

    def _keys(self, token_ids):
        key = 0
        for i, tokens in enumerate(_blocks(self.size, token_ids), 1):
            key = self.hash(key, tokens)
            yield key, tuple(token_ids[: i * self.size])

    def insert(self, token_ids, blocks):
        for block, (key, prefix) in zip(blocks, self._keys(token_ids), strict=False):
            self.buckets.setdefault(key, {})[block] = prefix

    def match(self, token_ids):
        found = []
        for key, prefix in self._keys(token_ids[: len(token_ids) - 1]):
            block = next((b for b, held in self.buckets.get(key, {}).items() if held == prefix), None)
            if block is None:
                break
            found.append(block)
        return found

    def evict(self, block):
        for bucket in self.buckets.values():
            bucket.pop(block, None)


@dataclass
class _Choices:
    """An index with one thing done differently."""

    block_size: int
    hash_function: object
    notes: dict = field(default_factory=dict)
    spare = 1
    chained = True

    def agree(self, note, parent, tokens, parent_block, parent_key):
        return note["tokens"] == tokens and note["parent"] == parent

    def walk(self, token_ids):
        key = 0
        for tokens in _blocks(self.block_size, token_ids):
            key = self.hash_function(key if self.chained else 0, tokens)
            yield key, tokens

    def insert(self, token_ids, blocks):
        parent = parent_block = parent_key = 0
        for block, (key, tokens) in zip(blocks, self.walk(token_ids), strict=False):
            note = self.notes.get(key)
            if note is None or not self.agree(note, parent, tokens, parent_block, parent_key):
                note = dict(number=object(), parent=parent, tokens=tokens, block=block, parent_block=parent_block,
                            parent_key=parent_key)  # fmt: skip
                self.notes[key] = note
            parent, parent_block, parent_key = note["number"], note["block"], key

    def match(self, token_ids):
        found, parent, parent_block, parent_key = [], 0, 0, 0
        for key, tokens in self.walk(token_ids[: len(token_ids) - self.spare]):
            note = self.notes.get(key)
            if note is None or not self.agree(note, parent, tokens, parent_block, parent_key):
                break
            found.append(note["block"])
            parent, parent_block, parent_key = note["number"], note["block"], key
        return found

    def evict(self, block):
        for key in [key for key, note in self.notes.items() if note["block"] == block]:
            del self.notes[key]


class TrustsTheHash(_Choices):
    def agree(self, note, *rest):
        return True


class TokensOnly(_Choices):
    def agree(self, note, parent, tokens, *rest):
        return note["tokens"] == tokens


class ParentByBlock(_Choices):
    def agree(self, note, parent, tokens, parent_block, parent_key):
        return note["tokens"] == tokens and note["parent_block"] == parent_block


class ParentByKey(_Choices):
    def agree(self, note, parent, tokens, parent_block, parent_key):
        return note["tokens"] == tokens and note["parent_key"] == parent_key


class NoChain(_Choices):
    chained = False

    def agree(self, note, parent, tokens, *rest):
        return note["tokens"] == tokens


class HitsItAll(_Choices):
    spare = 0


class NeverForgets(_Choices):
    def evict(self, block):
        pass


class HashesTheRest(_Choices):
    def walk(self, token_ids):
        key, size = 0, self.block_size
        for i in range(0, len(token_ids), size):
            tokens = tuple(token_ids[i : i + size])
            key = self.hash_function(key, tokens)
            yield key, tokens


class FirstBlockOnly(_Choices):
    def insert(self, token_ids, blocks):
        super().insert(token_ids[: self.block_size], blocks)


class NumbersAnew(_Choices):
    """Each insert writes new notes, also where the content is known: prompts of one family undo each other."""

    known = True

    def agree(self, *rest):
        return self.known and super().agree(*rest)

    def insert(self, token_ids, blocks):
        self.known = False
        super().insert(token_ids, blocks)
        self.known = True


class NoEvict:
    def __init__(self, block_size, hash_function):
        self.index = _Choices(block_size, hash_function)
        self.insert, self.match = self.index.insert, self.index.match


class NoHash(KeepsWholePrefix):
    def _keys(self, token_ids):
        for i in range(1, len(token_ids) // self.size + 1):
            prefix = tuple(token_ids[: i * self.size])
            yield prefix, prefix


class NoneForNothing(_Choices):
    def match(self, token_ids):
        return super().match(token_ids) or None


class AsksThePackage:
    def __init__(self, block_size, hash_function):
        self.manager = BlockManager(6, block_size)

    def _seq(self, token_ids, blocks=()):
        return Sequence(0, list(token_ids) or [0], SamplingParams(), 100, block_table=list(blocks))

    def insert(self, token_ids, blocks):
        self.manager.commit(self._seq(token_ids, blocks), len(token_ids))

    def match(self, token_ids):
        return self.manager.lookup(self._seq(token_ids))

    def evict(self, block):
        pass


RIGHT = {
    "ex06a": {"parent is an object": ParentIsAnObject, "whole prefix": KeepsWholePrefix, "numbered": _Choices},
    "ex06b": RIGHT_ORDERS,
}
# name -> (answer, verdict, words of its message in English)
WRONG = {
    "ex06a": {
        "trusts the hash": (TrustsTheHash, "wrong", "a collision in the block itself"),
        "tokens only": (TokensOnly, "wrong", "the collision is in a parent"),
        "parent by block": (ParentByBlock, "wrong", "a block id comes back"),
        "parent by key": (ParentByKey, "wrong", "the collision is in a parent"),
        "no chain": (NoChain, "wrong", "Same tokens after another prefix are other KV"),
        "hits it all": (HitsItAll, "wrong", "The logits come from computing the last token"),
        "never forgets": (NeverForgets, "wrong", "evict must forget"),
        "hashes the rest": (HashesTheRest, "wrong", "never a half-full one"),
        "first block only": (FirstBlockOnly, "wrong", "give each block of an insert its note"),
        "numbers anew": (NumbersAnew, "wrong", "keep the number of a note"),
        "no evict": (NoEvict, "wrong", "needs all three"),
        "no hash": (NoHash, "wrong", "The exercise is about the chain"),
        "None": (NoneForNothing, "wrong", "[] where there is none"),
        "the package's": (AsksThePackage, "imported", "BlockManager.commit"),
    },
    "ex06b": WRONG_ORDERS,
}
