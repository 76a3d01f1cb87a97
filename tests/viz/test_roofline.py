"""The roofline: its reach, what it says in words, and what it refuses."""

import pytest

from nanoengine.viz.roofline import reach, roofline

MACHINES = {"card": (4e12, 600e12), "laptop": (50e9, 1e12)}


def test_reach_is_the_slope_up_to_the_corner_and_the_roof_beyond():
    assert reach(1, 4e12, 600e12) == 4
    assert reach(150, 4e12, 600e12) == reach(10**6, 4e12, 600e12) == 600


def test_the_alternative_text_names_every_machine_and_every_dot():
    plot = roofline(MACHINES, {"card": {"B=1": 1.0, "prefill": 500.0}, "laptop": {"B=1": 0.5}})
    for piece in ("card: bandwidth 4e+03 GB/s", "600 TFLOP/s", "meet at 150 FLOP/byte", "B=1 at 1 FLOP/byte",
                  "prefill at 500", "laptop", "B=1 at 0.5"):  # fmt: skip
        assert piece in plot.alt
    page = plot._repr_mimebundle_()["text/html"]
    assert "<img" in page and 'alt="Roofline' in page


def test_the_same_plot_is_the_same_svg():
    assert roofline(MACHINES, {"card": {"B=1": 1.0}}).svg() == roofline(MACHINES, {"card": {"B=1": 1.0}}).svg()


@pytest.mark.parametrize(("machines", "dots"), [({}, {}), (MACHINES, {"phone": {"B=1": 1.0}})])
def test_no_machine_and_dots_of_an_unknown_one_are_refused(machines, dots):
    with pytest.raises(ValueError, match="machines are"):
        roofline(machines, dots)
