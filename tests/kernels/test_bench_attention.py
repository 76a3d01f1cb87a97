"""bench attention measures the kernel that it names."""

from dataclasses import replace

import torch

from nanoengine.model.config import NAMED_CONFIGS


def test_a_figure_is_bytes_over_seconds(device, monkeypatch):
    from nanoengine.bench import attention
    from nanoengine.kernels.paged_decode import Tuning, paged_decode

    config = replace(NAMED_CONFIGS["tiny-qwen3"], num_hidden_layers=2)
    scene = attention.scene_of([40, 70], 3, None, 16)
    shape = (2, 2, scene.num_blocks, 16, config.num_key_value_heads, config.head_dim)
    caches, seen = torch.randn(shape, device=device), []

    def noted(*arguments):
        seen.append((arguments[-1], arguments[5].shape[1]))
        paged_decode(*arguments)

    def two_microseconds(work):
        work()
        return 2e-6

    monkeypatch.setattr(attention, "paged_decode", noted)
    monkeypatch.setattr(attention, "seconds_of", two_microseconds)
    figures = attention.layer_figures(scene, config, caches, Tuning(64, 4, 2), 5)
    assert set(seen) == {(Tuning(64, 4, 2), 2 + 5)} and len(seen) == len(caches)
    moved = (43 + 73) * 2 * config.num_key_value_heads * config.head_dim * 4
    assert figures == {"us": 1.0, "tb_s": round(moved / 1e-6 / 1e12, 2)} and figures["tb_s"] > 0


def test_bench_gemm_measures_what_it_names(device, monkeypatch):
    from nanoengine.bench import gemm
    from nanoengine.kernels.split_k_gemm import GemmConfig, choose_config, split_k_gemm

    seen, config = [], replace(NAMED_CONFIGS["tiny-qwen3"], num_hidden_layers=2)

    def noted(x, weight, bias, config):
        seen.append((len(x), tuple(weight.shape), config))
        return split_k_gemm(x, weight, bias, config)

    def two_microseconds(work):
        work()
        return 2e-6

    monkeypatch.setitem(NAMED_CONFIGS, "tiny-qwen3", config)
    monkeypatch.setattr(gemm, "split_k_gemm", noted)
    monkeypatch.setattr(gemm, "seconds_of", two_microseconds)
    monkeypatch.setattr(gemm, "machine", lambda: {"machine": "m", "date": "d"})
    said = []
    result = gemm.measure("tiny-qwen3", (2, 20), torch.float16, said.append, device)
    assert [(row["product"], row["rows"]) for row in result["rows"]] == [
        (name, rows) for name in ("qkv", "o", "gate_up", "down") for rows in (2, 20)
    ]
    down = result["rows"][-1]
    assert set(down["us"]) == {"cublas", "32/128/4/1", "32/128/4/2", "32/128/4/4", "32/128/4/8"}
    assert set(down["us"].values()) == {1.0}
    assert down["chosen"] == gemm.label(choose_config(20, config.hidden_size, True)) == "32/128/4/4"
    assert (20, (config.hidden_size, config.intermediate_size), GemmConfig(32, 128, 4, 8)) in seen
    text = gemm.show(result)
    assert text.count("\n") == 1 + len(said) and "32/128/4/4 1.0<" in text and "cublas 1.0*" in text
