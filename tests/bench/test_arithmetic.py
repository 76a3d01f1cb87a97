"""Numbers of the benchmarks from made-up measurements."""

import pytest

from nanoengine.bench.host import show as show_host
from nanoengine.bench.offline import NAMES, Settings, agreement, ratios, show
from nanoengine.bench.stats import percentile, summarise
from nanoengine.bench.workload import NAMED, TEXTS, Workload, named, synthetic, text_workload


def test_percentile_is_a_value_that_so_many_do_not_exceed():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (1, 20, 21, 50, 90, 100)] == [1, 1, 2, 3, 5, 5]
    assert percentile(range(1, 101), 90) == 90


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1], 0), ([1], 101)])
def test_percentile_refuses(values, percent):
    with pytest.raises(ValueError, match="need values"):
        percentile(values, percent)


def test_the_summary_of_blocks():
    blocks = [[3.0, 3.0, 9.0], [1.0, 2.0, 8.0]]
    assert summarise(blocks) == {"median": 3.0, "p90": 9.0, "best_block_median": 2.0}
    with pytest.raises(ValueError, match="need values"):
        summarise([])


def test_a_workload_depends_on_its_seed_alone():
    make = lambda seed: synthetic("x", 50, (3, 9), (2, 4), vocab_size=11, seed=seed)  # noqa: E731
    assert make(1) == make(1) != make(2)
    load = make(1)
    assert {len(p) for p in load.prompts} == set(range(3, 10))
    assert set(load.output_lens) == {2, 3, 4}
    assert {token for p in load.prompts for token in p} == set(range(11))
    assert load.num_input_tokens == sum(len(p) for p in load.prompts)
    assert load.num_output_tokens == sum(load.output_lens)


def test_a_shared_prefix_is_shared_and_no_more():
    load = synthetic("x", 8, (20, 30), (1, 1), vocab_size=1000, shared_prefix=16)
    assert len({tuple(p[:16]) for p in load.prompts}) == 1
    assert len({p[16] for p in load.prompts}) > 1
    assert min(map(len, load.prompts)) >= 20


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads_keep_to_their_sizes(name):
    count, (low, high), (least, most), _ = NAMED[name]
    load = named(name, vocab_size=100)
    assert len(load.prompts) == count
    assert all(low <= len(p) <= high for p in load.prompts)
    assert all(least <= n <= most for n in load.output_lens)


def test_texts_are_different_even_where_they_repeat():
    load = text_workload(lambda text: list(text.encode()), 2 * len(TEXTS) + 1, 5)
    assert len({bytes(p) for p in load.prompts}) == 2 * len(TEXTS) + 1
    assert bytes(load.prompts[0]).decode() == TEXTS[0]
    assert set(load.output_lens) == {5}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: named("no-such", vocab_size=9), "there are tiny"),
        (lambda: synthetic("x", 0, (1, 2), (1, 1), vocab_size=9), "num_requests"),
        (lambda: synthetic("x", 1, (2, 1), (1, 1), vocab_size=9), "input_len"),
        (lambda: synthetic("x", 1, (1, 2), (0, 1), vocab_size=9), "output_len"),
        (lambda: synthetic("x", 1, (4, 5), (1, 1), vocab_size=9, shared_prefix=4), "shared_prefix"),
        (lambda: text_workload(list, 0, 1), "num_requests"),
        (lambda: Workload("x", [[1]], []), "1 prompts, but 0"),
        (lambda: Settings(runs=0), "runs must be at least 1, got 0"),
        (lambda: Settings(batch_sizes=(4, 0)), "batch_sizes"),
        (lambda: Settings(batch_sizes=()), "batch_sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_agreement_names_the_first_difference():
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == {"requests": 2, "equal": 2, "differ": []}
    found = agreement([[1, 2, 3], [4, 5], [6]], [[1, 9, 3], [4, 5], [6, 7]])
    assert found == {"requests": 3, "equal": 1, "differ": [{"request": 0, "at": 1}, {"request": 2, "at": 1}]}


def _row(engine, size, speed, **more):
    return {"engine": engine, "batch_size": size, "tokens_per_s": speed, "seconds": [1.0, 2.5], **more}


def test_ratios_are_ours_over_theirs():
    rows = [_row("ours", 1, 12.0), _row("hf", 1, 8.0), _row("ours", 16, 64.0), _row("hf", 16, 32.0)]
    assert ratios(rows) == {"batch 1 / hf batch 1": 1.5, "batch 16 / hf batch 16": 2.0, "batch 16 / hf batch 1": 8.0}
    assert ratios(rows[::2]) == {}


def test_the_offline_table_shows_every_figure():
    differ = {"requests": 4, "equal": 3, "differ": [{"request": 2, "at": 7}]}
    rows = [_row("ours", 4, 12.25), _row("hf", 4, 8.5, agreement=differ)]
    machine = {"cpu": "Some CPU", "cores": 2, "load_average": 0.25, "load_average_after": 1.5,
               "versions": {"torch": "2.13", "transformers": "5.0"}}  # fmt: skip
    text = show({
        "model": "m", "machine": machine, "settings": {"new_tokens": 8, "threads": 2, "runs": 2}, "results": rows,
        "ratios": ratios(rows), "first_token_s": {"ours": [3.0, 1.0, 2.0]}, "peak_mib": {"ours": 700.5},
    })  # fmt: skip
    for piece in ("12.2", "8.5", "1.00 2.50", "1.44x", "3 of 4 requests", "request 2 differs from token 7 on",
                  "2.00 s (3.00 1.00 2.00)", "700.5 MiB", "0.25 before and 1.5 after", NAMES["hf"]):  # fmt: skip
        assert piece in text, piece


def test_the_host_table_shows_every_row():
    parts = {"schedule": 0.1, "build": 0.2, "advance": 0.3, "land": 0.4}
    row = {"name": "base", "num_seqs": 16, "context": 100, "median": 1.25, "p90": 2.5, "best_block_median": 1.0,
           "cpu": 1.125, "parts": parts, "over_base": 0.5, "cpu_over_base": 0.75}  # fmt: skip
    machine = {"cpu": "Some CPU", "cores": 2, "python": "3.11", "load_average": 0.5, "load_average_after": 0.75}
    rows = {"features": [row], "growth": [row], "notes": ["N!"]}
    text = show_host({"machine": machine, "blocks": 5, "steps": 60} | rows)
    assert text.count("   1.250   2.500   1.000   1.125") == 2
    assert text.count("    0.100    0.200    0.300    0.400") == 2
    for piece in ("+0.500", "+0.750", "N!", "0.5 before and 0.75 after"):
        assert piece in text
