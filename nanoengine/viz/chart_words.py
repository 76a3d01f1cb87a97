"""What charts say, in Chinese. A lesson's code is shared by both languages, so it names its labels in English.

``#`` stands for a number, which is put back. A label that is not here stays as it is: names such as
prefill, decode or TFLOP/s are said in English by Chinese engineers too.
"""

from __future__ import annotations

import re

from nanoengine.viz.words import typeset

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d(?:[\d,.:-]*\d)?")

CHINESE = {
    # axes and legends
    "step": "步",
    "tokens": "token 数",
    "blocks": "块数",
    "in use": "在用",
    "budget #": "预算 #",
    "pool #": "共 # 块",
    "no cache": "没有缓存",
    "cache": "有缓存",
    "prefix cache": "前缀缓存",
    "tokens generated": "生成的 token 数",
    "TFLOP in all": "总计算量(TFLOP)",
    "context #": "上下文 #",
    "H200: # FLOP/byte": "H200 的拐角:# FLOP/字节",
    "FLOP a byte": "算术强度(FLOP/字节)",
    "this machine": "这台机器",
    "static #": "静态预留 #",
    "blocks of #": "每块 #",
    "empty": "空槽",
    "tokens a block": "每块 token 数",
    "% of owned slots": "占已分配槽的百分比",
    "turn": "第几轮",
    "prompt tokens computed": "算了多少 prompt token",
    "hit rate": "命中率",
    "users taking turns": "轮流来的用户数",
    "% of prompt tokens": "占 prompt token 的百分比",
    # titles
    "Tokens per step": "每步的 token 数",
    "KV blocks in use": "在用的 KV 块",
    "Roofline": "屋顶线",
    "Qwen3-0.6B: work to generate n tokens": "Qwen3-0.6B:生成 n 个 token 的计算量",
    "Decode at context #, and a prefill of #": "上下文 # 时的 decode,和 # token 的 prefill",
    "Arithmetic intensity of decode": "decode 的算术强度",
    "KV slots that never hold a token": "从头到尾都空着的 KV 槽",
    "Requests in memory at once": "同时放得下的请求数",
    "requests": "个",
    "Empty slots": "空着的槽",
    "A chat of eight turns": "一段八轮的对话",
    "# blocks, one after another": "# 个块,用户轮流来",
}
# What Chinese engineers leave in English.
SAME = {"prefill", "decode", "batch", "TFLOP/s", "B=#", "prefill #", "H200, #", "%", ""}


def in_chinese(label: str) -> str:
    """The label in Chinese, or as it is."""
    numbers = iter(_NUMBER.findall(label))
    said = CHINESE.get(key(label))
    return label if said is None else re.sub("#", lambda _: next(numbers), typeset(said, "zh"))


def key(label: str) -> str:
    """The label with ``#`` for each number, as the table has it."""
    return label if label in CHINESE else _NUMBER.sub("#", label)
