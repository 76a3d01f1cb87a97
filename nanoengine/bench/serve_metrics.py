"""What a server's /metrics says of its prefix cache, for servers whose usage does not."""

from __future__ import annotations

import re

import httpx

# (tokens found, tokens looked up), by server; the names of vLLM's are those of its documentation of metrics
NAMES = (
    ("nanoengine_prefix_hit_tokens_total", "nanoengine_prefix_queried_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
)


def read_cache(
    url: str, headers: dict[str, str], transport: httpx.BaseTransport | None = None
) -> dict | None:
    """{"hits", "queries"}: prompt tokens since the server began; None if it does not say. url: ends in /v1."""
    address = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        with httpx.Client(headers=headers, timeout=10, transport=transport) as client:
            response = client.get(address)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    if response.status_code != 200:
        return None
    for hits, queries in NAMES:
        found = [_total(response.text, name) for name in (hits, queries)]
        if None not in found:
            return {"hits": found[0], "queries": found[1]}
    return None


def between(before: dict | None, after: dict | None) -> dict | None:
    """What was counted from ``before`` to ``after``; None if either is, or the server began anew."""
    if before is None or after is None or after["queries"] < before["queries"]:
        return None
    return {name: after[name] - before[name] for name in after}


def _total(text: str, name: str) -> float | None:
    """The sum of a counter over its labels."""
    values = re.findall(rf"^{re.escape(name)}(?:{{[^\n]*}})? (\S+)", text, re.MULTILINE)
    try:
        return sum(map(float, values)) if values else None
    except ValueError:
        return None
