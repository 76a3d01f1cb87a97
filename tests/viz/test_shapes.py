"""The shape flow draws what was noted, in order, and says it in words too."""

import re

import pytest

from nanoengine.viz import shapes
from nanoengine.viz.shapes import shape_flow

NOTED = [("embedded", (5, 576)), ("q", (5, 9, 64)), ("k", (5, 3, 64)), ("logits", (5, 49152))]


def test_each_tensor_has_its_name_and_shape_in_order():
    svg = shape_flow(NOTED).svg()
    places = [svg.index(f">{name}<") for name, _ in NOTED]
    assert places == sorted(places)
    for _, shape in NOTED:
        assert f">[{', '.join(map(str, shape))}]<" in svg


def test_a_bar_is_as_long_as_the_numbers_of_a_token():
    bars = re.findall(r'width="([\d.]+)" height="18"', shape_flow([("q", (5, 9, 64)), ("k", (5, 3, 64))]).svg())
    q, k = map(float, bars)
    assert q == pytest.approx(3 * k, rel=0.01)


@pytest.mark.parametrize(("lang", "words"), [("en", "Shape flow"), ("zh", "形状流")])
def test_the_text_for_those_who_cannot_see_it_holds_everything(lang, words, monkeypatch):
    monkeypatch.setattr(shapes, "language", lambda: lang)
    bundle = shape_flow(NOTED)._repr_mimebundle_()
    assert words in bundle["text/plain"] and "k [5, 3, 64]" in bundle["text/plain"]
    assert 'alt="' in bundle["text/html"]


def test_nothing_noted_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match="run the forward pass with note="):
        shape_flow([])


def test_a_bar_far_longer_than_the_others_is_cut_and_leaves_them_readable():
    bars = re.findall(r'width="([\d.]+)" height="18"', shape_flow([("mlp", (5, 1536)), ("logits", (5, 49152))]).svg())
    mlp, logits = map(float, bars)
    assert logits == pytest.approx(2 * mlp, rel=0.01)
    assert 'width="10" height="22"' in shape_flow([("mlp", (5, 1536)), ("logits", (5, 49152))]).svg()
