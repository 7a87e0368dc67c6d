"""The page in a browser: what it sends, shows and leaves alone. Skipped where there is no Chromium."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from l2d_jax.serving.models import Catalogue
from tests.support.served import served, serving, talking_base, talking_model, talking_path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
CHAT = "**/v1/chat/completions"
COLOURS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  return [...document.querySelectorAll(".right .token, .ramp i")].map((shown) => {
    const style = getComputedStyle(shown);
    return [rgb(style.color), rgb(style.backgroundColor)];
  });
}"""


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with serving(talking_model()) as url:
        for tokens, budget in ((256, 1), (256, 15), (512, 15)):  # the programs are compiled before anyone looks
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": tokens, "budget": budget}
            httpx.post(f"{url}/v1/chat/completions", json=body | {"trace": tokens == 256}, timeout=300)
        yield url


@pytest.fixture(scope="module")
def playwright() -> Any:
    return pytest.importorskip("playwright.sync_api", reason="playwright is in the extra dev")


@pytest.fixture(scope="module")
def browser(playwright: Any) -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        yield play.chromium.launch(executable_path=CHROMIUM)


@pytest.fixture
def visit(browser: Any, server_url: str) -> Iterator[Any]:
    """Opens the page; no script of it may fail."""
    faults: list[Any] = []
    contexts = []

    def opened(width: int = 1280, scheme: str = "light") -> Any:
        size = {"width": width, "height": 800}
        context = browser.new_context(color_scheme=scheme, viewport=size, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(error))
        page.goto(server_url)
        page.wait_for_selector(".ticks span")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def send(page: Any) -> None:
    page.get_by_label("Question").press_sequentially("What is 12 * 4?")
    page.get_by_label("Question").press("Control+Enter")


def finish(page: Any) -> None:
    send(page)
    for side in ("left", "right"):
        page.wait_for_selector(f".{side} .token")


def contrast(one: list[int], other: list[int]) -> float:
    """WCAG's ratio of two sRGB colours, from 0 to 255."""

    def luminance(colour: list[int]) -> float:
        parts = [value / 255 for value in colour[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_an_answer_is_readable_in_each_scheme_and_width(visit, width, scheme):
    """Nothing is wider than the window, and text on every colour of the scale has a contrast of at least 4.5."""
    page = visit(width, scheme)
    finish(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".ramp").is_visible()
    colours = page.evaluate(COLOURS)
    assert min(contrast(ink, ground) for ink, ground in colours if ground[3]) >= 4.5
    assert len({tuple(ground) for _, ground in colours}) >= 25  # of the scale, and none is a default
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    boxes = [page.locator(f".{side}").bounding_box() for side in ("left", "right")]
    assert (boxes[0]["y"] == boxes[1]["y"]) == (width == 1280)


def test_both_answers_come_with_what_they_took(visit, server_url):
    """Each side sends its slider's budget and shows its answer; no request leaves the server."""
    page, requests = visit(), []
    page.on("request", lambda request: requests.append(request))
    page.reload()
    page.wait_for_selector(".ticks span")
    page.get_by_label("Budget").nth(1).press("ArrowLeft")
    page.get_by_label("Seed").fill("3")
    finish(page)
    assert all(request.url.startswith((f"{server_url}/", "data:")) for request in requests)
    left, right = [request.post_data_json for request in requests if request.method == "POST"]
    assert (left.pop("budget"), right.pop("budget")) == (1, 7)
    assert left == right
    assert left["messages"] == [{"role": "user", "content": "What is 12 * 4?"}]
    assert (left["seed"], left["temperature"], left["max_tokens"]) == (3, 0, 256)
    for side, budget in (("left", 1), ("right", 7)):
        shown, evaluations, passes, tokens, seconds = page.locator(f".{side} dd").all_inner_texts()
        assert int(shown) == budget
        assert int(evaluations) >= int(tokens) > 0
        assert int(passes) > 0
        assert float(seconds) >= 0
        assert page.locator(f".{side} .text").get_attribute("aria-busy") == "false"


def test_a_token_tells_what_it_was(visit):
    """The note on a token comes with the pointer, and with the keyboard, which walks from token to token."""
    page = visit()
    finish(page)
    tokens, tip = page.locator(".right .token"), page.get_by_role("tooltip")
    tokens.nth(2).hover()
    assert "settled at t =" in tip.inner_text()
    assert "entropy" in tip.inner_text()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    page.get_by_label("Budget").nth(1).press("Tab")
    page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("token => token === document.activeElement")
    assert tokens.nth(1).get_attribute("aria-describedby") == "tip"
    assert tip.is_visible()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_stop_aborts_both_requests(visit, playwright):
    """What has come stays, without colours, and the next question can be asked."""
    page, failed = visit(), []
    page.on("requestfailed", lambda request: failed.append(request.failure))
    limit = page.get_by_label("Max tokens")
    limit.fill(limit.get_attribute("max"))
    send(page)
    for side in ("left", "right"):
        playwright.expect(page.locator(f".{side} .text")).not_to_be_empty(timeout=60_000)
    with page.expect_event("requestfailed", lambda _: len(failed) == 2):
        page.get_by_role("button", name="Stop").click()
    playwright.expect(page.locator(".state")).to_have_text(["stopped"] * 2)
    assert failed == ["net::ERR_ABORTED"] * 2
    assert page.locator(".token").count() == 0
    limit.fill("8")
    finish(page)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"status": 400, "body": json.dumps({"error": {"message": "too <b>long</b>"}})}, "too <b>long</b>"),
        ({"status": 200, "body": 'data: {"error": {"message": "out of memory"}}\n\n'}, "out of memory"),
        ({"status": 200, "body": 'data: {"choices": [{"delta": {"content": "4"}}]}\n\n'}, "connection ended before"),
        ({"status": 502, "body": "<html>"}, "status 502"),
        (None, "cannot be reached"),
    ],
)
def test_errors_stand_in_the_place_of_the_answer(visit, playwright, reply, message):
    """Whatever goes wrong is said on both sides, as text, and the next question can be asked."""
    page = visit()
    page.route(CHAT, lambda route: route.fulfill(**reply) if reply else route.abort())
    send(page)
    for side in ("left", "right"):
        playwright.expect(page.locator(f".{side}").get_by_role("alert")).to_contain_text(message)
    page.unroute(CHAT)
    finish(page)


def test_the_key_is_asked_for_and_sent(visit, server_url):
    """A server that answers 401 makes the field appear, and its key goes with every request from then on."""
    page, sent = visit(), []
    refusal = {"status": 401, "body": json.dumps({"error": {"message": "no key"}})}

    def guard(route: Any) -> None:
        sent.append(route.request.headers.get("authorization"))
        route.continue_() if sent[-1] == "Bearer secret" else route.fulfill(**refusal)

    page.route("**/v1/**", guard)
    page.reload()
    page.get_by_label("API key").fill("secret")
    finish(page)
    assert sent[0] is None
    assert set(sent[1:]) == {"Bearer secret"}
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_a_model_without_a_path_has_one_side(visit, playwright):
    """There is nothing to compare, and no scale of t."""
    page = visit()
    model = {"id": "plain", "budgets": [1], "max_tokens": 64, "has_path": False}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [model]}))
    page.reload()
    playwright.expect(page.locator(".side:visible")).to_have_count(1)
    assert page.locator(".ramp").is_hidden()
    assert page.get_by_label("Max tokens").input_value() == "64"


def test_each_side_chooses_its_path(browser):
    """The base has one budget; a path keeps the budget of the one before it."""
    base = talking_base()
    models = Catalogue(served(base, name="base"))
    for seed, name in enumerate(("math", "code"), 11):
        models.add(served(talking_path(base, seed), name=name))
    with serving(models) as url:
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(300_000)  # programs are compiled
        page, requests = context.new_page(), []
        page.on("request", lambda request: requests.append(request))
        page.goto(url)
        page.wait_for_selector(".ticks span")
        first, second = page.get_by_label("Path").nth(0), page.get_by_label("Path").nth(1)
        assert (first.input_value(), second.input_value()) == ("math", "math")
        assert page.locator("h2 .value").all_inner_texts() == ["1", "15"]
        second.select_option("base")
        assert page.locator("h2 .value").nth(1).inner_text() == "1"
        assert page.get_by_label("Budget").nth(1).is_disabled()
        first.select_option("code")
        second.select_option("code")
        page.get_by_label("Budget").nth(1).press("End")
        second.select_option("math")
        assert page.locator("h2 .value").nth(1).inner_text() == "31"
        page.get_by_label("Max tokens").fill("8")
        finish(page)
        left, right = [request.post_data_json for request in requests if request.method == "POST"]
        assert [(side["model"], side["budget"]) for side in (left, right)] == [("code", 1), ("math", 31)]
        context.close()
