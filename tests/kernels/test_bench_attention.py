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
