"""Answers to exercise 06b as learners might write them: right in several shapes, wrong in likely ways."""

from __future__ import annotations

import itertools

from nanoengine.course.checks.lesson_06_order import OrderCase, measured_hits


def by_tree(prompts, block_size):
    """Builds the tree, a node a token, and walks it depth first."""
    root = {"ends": [], "next": {}}
    for i, prompt in enumerate(prompts):
        node = root
        for token in prompt:
            node = node["next"].setdefault(token, {"ends": [], "next": {}})
        node["ends"].append(i)
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order += node["ends"]
        stack += node["next"].values()
    return order


def greedy(prompts, block_size):
    """The neighbour that shares most comes next, the shorter where two share the same."""
    left = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    order = [left.pop(0)]
    while left:
        last = prompts[order[-1]]

        def shares(i, last=last):
            n = 0
            for a, b in zip(last, prompts[i], strict=False):
                if a != b:
                    break
                n += 1
            return n

        best = max(left, key=lambda i: (shares(i) // block_size, -len(prompts[i])))
        left.remove(best)
        order.append(best)
    return order


def asks_the_check(prompts, block_size):
    case = OrderCase(tuple(map(tuple, prompts)), block_size)
    orders = itertools.islice(itertools.permutations(range(len(prompts))), 30)
    return max(orders, key=lambda order: measured_hits(case, order))


def _sort(key):
    return lambda prompts, size: sorted(range(len(prompts)), key=lambda i: key(prompts[i], size))


def sorts_in_place(prompts, block_size):
    numbered = sorted(range(len(prompts)), key=prompts.__getitem__)
    prompts.sort()
    return numbered


RIGHT_ORDERS = {"tree": by_tree, "greedy": greedy}
# name -> (answer, verdict, words of its message in English)
WRONG_ORDERS = {
    "as they come": (lambda prompts, size: list(range(len(prompts))), "wrong", "Finish a branch"),
    "longest first": (_sort(lambda prompt, size: -len(prompt)), "wrong", "Parents first"),
    "shortest first": (_sort(lambda prompt, size: len(prompt)), "wrong", "Finish a branch"),
    "by the first block": (_sort(lambda prompt, size: prompt[:size]), "wrong", "Parents first"),
    "children first": (lambda prompts, size: _sort(lambda p, _: p)(prompts, size)[::-1], "wrong", "Parents first"),
    "as text": (_sort(lambda prompt, size: str(prompt)), "wrong", "Parents first"),
    "prompts": (lambda prompts, size: sorted(prompts), "wrong", "prompts' numbers"),
    "asks the check": (asks_the_check, "imported", "measured_hits"),
    "in place": (sorts_in_place, "wrong", "Sort numbers"),
}
