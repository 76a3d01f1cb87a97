"""Check of ex06a: an index of cached blocks that no hash function can make lie.

The answer is a class; a case is a life of one object, given as operations. The oracle hashes nothing: it writes down,
for each block, the whole prefix that was stored in it, and compares prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanoengine.course.checks.exercise import Failure, Text, call

# Three hash functions: honest; one under which the blocks 1, 1, … and 3, 3, … collide; one that tells nothing apart.
HASHES = ("good", "collides", "constant")


@dataclass(frozen=True)
class IndexCase:
    """operations: ("insert", tokens, blocks), ("match", tokens) or ("evict", block), in order."""

    operations: tuple[tuple, ...]
    hash_name: str = "good"
    block_size: int = 2


class Hash:
    """What the answer is given. Remembers how it was called."""

    def __init__(self, name: str, size: int):
        self.name, self.size, self.calls, self.wrong = name, size, 0, ""
        self._keys: dict[tuple, int] = {}

    def __call__(self, parent_key: int, tokens) -> int:
        tokens, self.calls = tuple(tokens), self.calls + 1
        if len(tokens) != self.size and not self.wrong:
            self.wrong = f"hash_function(…, {tokens})"
        if self.name == "constant":
            return 1
        if self.name == "collides" and tokens == (3,) * self.size:
            tokens = (1,) * self.size
        return self._keys.setdefault((parent_key, tokens), len(self._keys) + 1)


class Truth:
    """What lies in which block. ``sure``: prefixes that must be found; others may be."""

    def __init__(self, size: int):
        self.size = size
        self.held: dict[int, tuple] = {}  # block -> the prefix whose last block it holds
        self.sure: set[tuple] = set()

    def prefixes(self, tokens: tuple, spare: int = 0) -> list[tuple]:
        return [tokens[:n] for n in range(self.size, len(tokens) - spare + 1, self.size)]

    def insert(self, tokens: tuple, blocks: tuple) -> None:
        for prefix, block in zip(self.prefixes(tokens), blocks, strict=False):
            self.held[block] = prefix
            self.sure.add(prefix)

    def evict(self, block: int) -> None:
        gone = self.held.pop(block, None)
        if gone is not None:  # what came after it is out of reach; another copy of it may have been kept, or not
            self.sure = {prefix for prefix in self.sure if prefix[: len(gone)] != gone}

    def at_least(self, tokens: tuple) -> int:
        found = 0
        for prefix in self.prefixes(tokens, spare=1):
            if prefix not in self.sure:
                break
            found += 1
        return found


def run_index(answer, case: IndexCase) -> Failure | None:
    function, truth = Hash(case.hash_name, case.block_size), Truth(case.block_size)
    index = call(answer, case.block_size, function)
    missing = [name for name in ("insert", "match", "evict") if not callable(getattr(index, name, None))]
    if missing:
        return Failure("a class with the methods insert, match and evict", f"no {' and no '.join(missing)}", METHODS)
    for number, (kind, *rest) in enumerate(case.operations, 1):
        where = f"operation {number}"
        if kind == "insert":
            before = function.calls
            call(index.insert, list(rest[0]), list(rest[1]))
            truth.insert(*rest)
            if truth.prefixes(rest[0]) and function.calls == before:
                return Failure("insert calls hash_function, once a full block", f"{where} never called it", NO_HASH)
        elif kind == "evict":
            call(index.evict, rest[0])
            truth.evict(rest[0])
        else:
            failure = _match(call(index.match, list(rest[0])), rest[0], truth, case, where)
            if failure is not None:
                return failure
        if function.wrong:
            size = case.block_size
            return Failure(f"hash_function(parent key, the {size} tokens of one block)", function.wrong, NOT_A_BLOCK)
    return None


def _match(got, tokens: tuple, truth: Truth, case: IndexCase, where: str) -> Failure | None:
    if not isinstance(got, (list, tuple)) or not all(isinstance(block, int) for block in got):
        return Failure("a list of block ids", f"{where} returned {got!r:.100}", SHAPE)
    allowed = truth.prefixes(tokens, spare=1)
    if len(got) > len(allowed):
        why = LEAVE_ONE if len(got) == len(truth.prefixes(tokens)) else SHAPE
        return Failure(f"at most {len(allowed)} blocks: one token is left to compute", f"{where}: {list(got)}", why)
    for i, (block, prefix) in enumerate(zip(got, allowed, strict=False)):
        held = truth.held.get(block)
        if held != prefix:
            holds = f"holds the last block of {list(held)}" if held else "holds nothing that is known"
            return Failure(f"block {i} of the match holds the end of {list(prefix)}",
                           f"{where}: {list(got)}, and block {block} {holds}",
                           _why(held, prefix, case))  # fmt: skip
    least = truth.at_least(tokens) if case.hash_name == "good" else 0
    if len(got) < least:
        return Failure(f"{least} blocks are known", f"{where}: {list(got)}", MISSED)
    return None


def _why(held: tuple | None, prefix: tuple, case: IndexCase) -> Text:
    if held is None:
        return EVICTED
    size = case.block_size
    if held[-size:] != prefix[-size:]:
        return TOKENS
    return PREFIX if case.hash_name == "good" else PARENT


def tokens_of(blocks: str, size: int = 2, rest: int = 1) -> tuple[int, ...]:
    """``AB`` -> (1, 1, 2, 2, 9): a block a letter, then ``rest`` tokens that fill none."""
    return tuple(token for letter in blocks for token in ["ABC".index(letter) + 1] * size) + (9,) * rest


def insert(blocks: str, *ids: int, size: int = 2, rest: int = 1) -> tuple:
    return ("insert", tokens_of(blocks, size, rest), ids)


def match(blocks: str, size: int = 2, rest: int = 1) -> tuple:
    return ("match", tokens_of(blocks, size, rest))


def random_case(rng: random.Random) -> IndexCase:
    """A small pool: a block is evicted before it is given away again, as an engine does it."""
    size, operations, used = rng.choice((1, 2, 3)), [], set()
    for _ in range(rng.randint(3, 12)):
        names, rest = "".join(rng.choice("ABC") for _ in range(rng.randint(0, 3))), rng.randint(0, size > 1)
        if rng.random() < 0.4:
            operations.append(match(names, size, rest))
            continue
        ids = rng.sample(range(6), len(names))
        operations += [("evict", block) for block in ids if block in used]
        used.update(ids)
        operations.append(("insert", tokens_of(names, size, rest), tuple(ids)))
    operations.append(match("".join(rng.choice("ABC") for _ in range(3)), size))
    return IndexCase(tuple(operations), rng.choice(HASHES), size)


def smaller(case: IndexCase) -> Iterator[IndexCase]:
    """Fewer operations; an eviction only goes where nothing is inserted into that block afterwards, or before."""
    operations = case.operations
    for i, operation in enumerate(operations):
        rest = operations[:i] + operations[i + 1 :]
        if operation[0] != "evict" or _each_block_once(rest):
            yield replace(case, operations=rest)
    if case.hash_name == "constant":
        yield replace(case, hash_name="collides")


def _each_block_once(operations: tuple[tuple, ...]) -> bool:
    held: set[int] = set()
    for kind, *rest in operations:
        if kind == "evict":
            held.discard(rest[0])
        elif kind == "insert":
            if held & set(rest[1]):
                return False
            held.update(rest[1])
    return True


def show(case: IndexCase) -> str:
    size = case.block_size
    lines = [f"block_size {size}, hash: {HASH_TEXT[case.hash_name].format(one=(1,) * size, two=(3,) * size)}"]
    for number, (kind, *rest) in enumerate(case.operations, 1):
        lines.append(f"{number}. {kind}({', '.join(str(list(r) if isinstance(r, tuple) else r) for r in rest)})")
    return "\n".join(lines)


HASH_TEXT: dict[str, str] = {
    "good": "no two blocks collide",
    "collides": "{one} and {two} collide after any parent",
    "constant": "always 1",
}

BOUNDARIES: tuple[IndexCase, ...] = (
    IndexCase((insert("A", 0), match("A"))),
    IndexCase((match("A"),)),
    IndexCase((insert("", rest=1), match("A"))),  # nothing full
    IndexCase((insert("AB", 4, 2), match("AB"), match("AC"), match("B"), match("BB"))),
    IndexCase((insert("AB", 0, 1), insert("AC", 2, 3), match("AB"), match("AC"))),  # a family: A's note is kept
    IndexCase((insert("AB", 4, 2, rest=0), match("AB", rest=0))),  # the last token is left to compute
    IndexCase((insert("ABC", 0, 1, 2), ("evict", 1), match("ABC"))),  # the chain is broken in its middle
    IndexCase((insert("AB", 0, 1), ("evict", 0), insert("C", 0), match("AB"), match("CB"))),
    IndexCase((insert("A", 0), insert("C", 1), match("C"), match("A")), "collides"),
    IndexCase((insert("AB", 0, 1), insert("C", 2), match("CB")), "collides"),  # in the parent
    IndexCase((insert("AB", 0, 1), ("evict", 0), insert("C", 0), match("CB")), "collides"),  # and its block came back
    IndexCase((insert("ABA", 0, 1, 2), insert("CB", 3, 4), match("CBA"), match("ABA")), "collides"),
    IndexCase((insert("AB", 0, 1), match("AB"), insert("BA", 2, 3), match("BA"), match("AB")), "constant"),
    IndexCase((insert("A", 0), insert("A", 1), ("evict", 0), match("A"), ("evict", 1), match("A"))),  # two copies
    IndexCase((insert("AA", 0, 1, size=1, rest=0), match("AA", size=1), match("AAA", size=1)), block_size=1),
)

SHAPE = dict(en="match returns the blocks of the longest known prefix, in order, as a list; [] where there is none.",
             zh="match 返回最长已知前缀的块,按顺序,是个列表;没有就返回 []。")  # fmt: skip
METHODS = dict(en="The class needs all three; indent them like __init__, inside the class.",
               zh="三个方法都要有,缩进和 __init__ 对齐,写在类里面。")  # fmt: skip
LEAVE_ONE = dict(en="The logits come from computing the last token (section 7): look only at full blocks among the "
                 "first len - 1 tokens.",
                 zh="logits 要靠算最后一个 token 得到(第 7 节):只看前 len - 1 个 token 里的满块。")  # fmt: skip
NO_HASH = dict(en="The exercise is about the chain: find a note by hash_function(parent key, tokens of the block).",
               zh="这道题练的就是链:把上一块的键和这一块的 token 交给 hash_function,用所得哈希找记录。")  # fmt: skip
NOT_A_BLOCK = dict(en="Hash one full block at a time, together with the key of the block before; never a half-full "
                   "one.",
                   zh="一次只哈希一个满块,外加上一块的键;没写满的不要哈希。")  # fmt: skip
MISSED = dict(
    en="These blocks were inserted and nothing of their chain was evicted since. Walk from the first block to the "
    "first miss; give each block of an insert its note; and keep the number of a note that is there already, or its "
    "children lose their parent.",
    zh="这些块存过,整条链上也没有谁被驱逐。从第一块走到第一个没命中为止;insert 的每一块都要有记录;"
    "已经有记录的,编号别换,换了它的子块就找不到父亲了。",
)
EVICTED = dict(en="That block was evicted (section 6), or never stored: evict must forget every note that names it.",
               zh="那个块已经被驱逐(第 6 节),或者从没存过:evict 要忘掉所有提到它的记录。")  # fmt: skip
TOKENS = dict(en="Other tokens, same key: a collision in the block itself. Compare the note's tokens before you "
              "believe it.",
              zh="键一样,token 不一样:块自己撞了。信一条记录之前,先比它的 token。")  # fmt: skip
PARENT = dict(
    en="The block's own tokens agree, its prefix does not: the collision is in a parent. A note must name the note "
    "before it, by a number that is never used again (a key collides, a block id comes back), and it must be the one "
    "just matched.",
    zh="这一块的 token 对得上,前缀对不上:碰撞在父块里。记录要写明上一条记录是谁,用永不重用的编号(键会碰撞,块号会回来),"
    "而且必须是刚匹配上的那一条。",
)
PREFIX = dict(
    en="Same tokens after another prefix are other KV. Chain the keys; and when a parent was evicted, its children "
    "belong to a note that is gone.",
    zh="同样的 token 接在别的前缀后面,KV 就不同。键要成链;父块被驱逐之后,它的子块属于一条已经没了的记录。",
)
