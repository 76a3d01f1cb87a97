"""`nanoengine trace watch` in a real browser: follows a running server, stops where the reader stops it."""

import threading

import pytest

from nanoengine.server.watch import PageServer, Watched
from tests.browser.lab import browser_page
from tests.server.conftest import ask, make_engine, running


@pytest.fixture
def live():
    """A slow server, its watcher, and the page's address."""
    engine = make_engine(num_blocks=24)
    with running(engine, trace_steps=40) as server, server.client() as client:
        watched = Watched(server.url, size=40)
        watched.poll()
        watched.start()
        with PageServer(watched) as pages:
            threading.Thread(target=pages.serve_forever, daemon=True).start()
            try:
                yield engine, client, pages.url
            finally:
                watched.close()
                pages.shutdown()


def test_it_follows_and_stops_and_goes_back(live):
    engine, client, url = live
    number = "() => Number(document.querySelector('#number').dataset.step)"
    errors = []
    with browser_page(800) as page:
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#note:has-text('No step yet')")
        engine.runner.delay = 0.1
        load = threading.Thread(target=ask, args=(client,), kwargs=dict(prompt=[[1] * 9, [2] * 5], max_tokens=35))
        load.start()
        page.wait_for_selector("#picture svg[role=img]")
        first = page.evaluate(number)
        page.wait_for_function(f"{number.removeprefix('() => ')} > {first + 3}")  # it follows by itself
        page.click("#back")
        stopped = page.evaluate(number)
        assert not page.is_checked("#live")
        page.wait_for_function(f"Number(document.querySelector('#step').max) > {stopped + 3}")
        assert page.evaluate(number) == stopped  # it stays, though there are newer steps
        before = page.inner_html("#picture")
        page.click("#back")
        page.wait_for_function("html => document.querySelector('#picture').innerHTML !== html", arg=before)
        assert page.evaluate(number) == stopped - 1
        page.check("#live")
        engine.runner.delay = 0.0
        load.join()
        page.wait_for_function(f"{number.removeprefix('() => ')} === 34")
        assert page.is_disabled("#forward")
    assert not errors
