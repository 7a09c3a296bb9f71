"""The server's page in a real browser, which streams from a stub server on a free port, and once from the real one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from nanovllm.serve import state
from tests.server_process import serving, wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
KEY = "a-secret"
MODEL = "stub-model"
NUM_WORDS, WORD_SECONDS = 100, 0.02
# Beside what playwright sets: the browser sends nothing of its own accord.
ARGUMENTS = ["--disable-gpu", "--disable-quic", "--disable-sync", "--disable-background-networking"]


def event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


class StubServer:
    """Answers each chat with numbered words, one after another, and counts as an engine does."""

    def __init__(self) -> None:
        self.held_at: int | None = None
        """The word at which answers wait."""
        self.counts = dict.fromkeys(("num_running", "num_waiting", "num_preemptions"), 0)
        self.counts |= dict.fromkeys(("num_prompt_tokens", "num_output_tokens", "num_unread"), 0)
        files = Mount("/page", StaticFiles(directory=state.PAGE))
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        page = Route("/", lambda _: HTMLResponse(state._INDEX, headers=state._PAGE_HEADERS))
        self.app = Starlette(routes=[page, files, Route("/stats", self.stats), chat])

    async def stats(self, request: Request) -> Response:
        cache_use = 0.25 * self.counts["num_running"]
        return JSONResponse({"model": MODEL, "time": time.monotonic(), "cache_use": cache_use, **self.counts})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if body.get("max_tokens", 0) > 1000:
            return JSONResponse(
                {"error": {"message": f"max_tokens={body['max_tokens']} is over the server's 1000"}}, 400
            )
        return StreamingResponse(self.words(), media_type="text/event-stream")

    async def words(self) -> AsyncIterator[bytes]:
        self.counts["num_running"] += 1
        self.counts["num_prompt_tokens"] += 10
        self.counts["num_unread"] += 1
        try:
            for i in range(NUM_WORDS):
                whole = event(chunk(f"wörd {i} ")).encode()
                # Networks tear events, and characters too.
                cut = whole.index("ö".encode()) + 1
                yield whole[:cut]
                await asyncio.sleep(WORD_SECONDS)
                while i == self.held_at:
                    await asyncio.sleep(WORD_SECONDS)
                yield whole[cut:]
                self.counts["num_output_tokens"] += 2
            yield event(chunk("", "stop")).encode()
            yield event({"choices": [], "usage": {"completion_tokens": 2 * NUM_WORDS}}).encode()
            self.counts["num_unread"] -= 1
            yield b"data: [DONE]\n\n"
        finally:
            # Also when the client has gone.
            self.counts["num_running"] -= 1


@pytest.fixture(scope="module")
def stub() -> StubServer:
    return StubServer()


@pytest.fixture(scope="module")
def page_url(stub: StubServer) -> Iterator[str]:
    config = uvicorn.Config(stub.app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, page_url: str, stub: StubServer) -> Iterator[Visit]:
    """Opens the page; in the end, no script must have failed, and no request have gone anywhere else."""
    errors: list[str] = []
    urls: list[str] = []
    visited: set[str] = set()
    contexts: list[BrowserContext] = []

    def visit(key: str = KEY, url: str = page_url, **options: Any) -> Page:
        visited.add(url)
        contexts.append(context := browser.new_context(**options))
        context.set_default_timeout(60_000)
        context.on("request", lambda request: urls.append(request.url))
        page = context.new_page()
        # Not when it is loaded again.
        item, value = json.dumps("nanovllm-settings"), json.dumps(json.dumps({"key": key}))
        page.add_init_script(f"sessionStorage.getItem({item}) ?? sessionStorage.setItem({item}, {value})")
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(url)
        return page

    yield visit
    stub.held_at = None
    for context in contexts:
        context.close()
    # Chromium reports the refusals that tests ask for.
    assert [text for text in errors if not re.search(r"responded with a status of 40[01]", text)] == []
    origins = {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, urls) if parts.scheme != "data"}
    assert origins == visited


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def sent_by(page: Page, text: str) -> Any:
    """Send a text, and return the body of the request."""
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, text)
    return request.value.post_data_json


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Model").locator("> .text")


def wait_for_text(page: Page, least: int = 1) -> str:
    """Wait until the last answer has some characters, and return them."""
    wait_until(lambda: answers(page).count() > 0 and len(answers(page).last.inner_text()) >= least)
    return answers(page).last.inner_text()


def stats(page: Page, page_url: str) -> Any:
    return page.request.get(f"{page_url}/stats", headers={"Authorization": f"Bearer {KEY}"}).json()


def canned(page: Page, body: str) -> None:
    """Let the next chats be answered with a stream that is already complete."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_an_answer_streams_in_and_joins_the_next_request(visit: Visit, stub: StubServer) -> None:
    page = visit()
    stub.held_at = 20
    value = "[data-value=%s]"
    expect(page.get_by_role("status")).to_have_text("live")
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator(value % "num_running")).to_have_text("0")
    send(page, "count")
    first = wait_for_text(page)
    assert page.get_by_role("button", name="Send").is_hidden()
    stub.held_at = 60
    second = wait_for_text(page, len(first) + 1)
    assert second.startswith(first.rstrip())
    expect(page.locator(value % "num_running")).to_have_text("1")
    expect(page.locator(value % "cache_use")).to_have_text("25%")
    stub.held_at = None
    expect(page.locator(value % "output_rate")).to_have_text(re.compile("^[1-9]"))
    expect(page.get_by_text("tokens/s", exact=False).last).to_be_visible()
    page.get_by_role("button", name="Send").wait_for()
    whole = answers(page).last.text_content() or ""
    assert whole.startswith(second) and len(first) < len(whole) / 2 and "\ufffd" not in whole
    assert sent_by(page, "again")["messages"] == [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": whole},
        {"role": "user", "content": "again"},
    ]


@pytest.mark.parametrize("button", ["Stop", pytest.param("Clear", marks=pytest.mark.compat)])
def test_an_answer_is_ended_and_kept_or_forgotten(visit: Visit, stub: StubServer, page_url: str, button: str) -> None:
    page = visit()
    stub.held_at = 60
    send(page, "count")
    wait_for_text(page)
    before = stats(page, page_url)
    page.get_by_role("button", name=button).click()
    wait_until(lambda: not stats(page, page_url)["num_running"])
    # It has not been read to its end.
    assert stats(page, page_url)["num_unread"] == before["num_unread"]
    kept: list[dict[str, Any]] = []
    if button == "Stop":
        page.get_by_text("stopped").wait_for()
        answer = {"role": "assistant", "content": answers(page).last.text_content()}
        kept = [{"role": "user", "content": "count"}, answer]
    assert page.get_by_role("article").count() == len(kept)
    assert sent_by(page, "go on")["messages"] == [*kept, {"role": "user", "content": "go on"}]


@pytest.mark.compat
def test_a_refused_request_shows_why_and_gives_the_question_back(visit: Visit) -> None:
    page = visit()
    page.get_by_label("Max tokens").fill("5000")
    send(page, "count")
    expect(page.get_by_role("alert")).to_have_text(re.compile("max_tokens=5000 is over"))
    assert page.get_by_role("article").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "count"
    page.get_by_label("Max tokens").fill("500")
    assert sent_by(page, "count, please")["messages"] == [{"role": "user", "content": "count, please"}]
    assert page.get_by_role("alert").is_hidden()


@pytest.mark.compat
def test_the_fields_are_sent_and_empty_ones_are_not(visit: Visit) -> None:
    page = visit()
    expect(page.get_by_role("status")).to_have_text("live")
    canned(page, event(chunk("yes", "length")) + "data: [DONE]\n\n")
    always = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "separate_reasoning": True}
    assert sent_by(page, "one") == {**always, "messages": [{"role": "user", "content": "one"}]}
    page.get_by_text("cut at the most tokens").wait_for()
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("System message").fill("Be brief.")
    for label, value in (("Temperature", "0"), ("Top p", "0.5"), ("Max tokens", "7"), ("Seed", "3")):
        page.get_by_label(label).fill(value)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]
    set_fields = {"temperature": 0, "top_p": 0.5, "max_tokens": 7, "seed": 3}
    assert sent_by(page, "two") == {**always, **set_fields, "messages": messages}


def test_markup_in_an_answer_is_text(visit: Visit) -> None:
    page = visit()
    markup = '<b>bold</b><img src="x" onerror="document.title = 1"><script>document.title = 2</script>&amp; é'
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "<i>hm</i>"}, "finish_reason": None}]}
    # Lines may end in the way that HTTP's do, and comments keep connections open.
    stream = ": a comment\n\n" + event(thought) + "".join(map(event, map(chunk, f"{markup}\n\n{markup}")))
    canned(page, (stream + "data: [DONE]\n\n").replace("\n", "\r\n"))
    send(page, "<u>markup</u>")
    page.get_by_role("button", name="Send").wait_for()
    assert answers(page).last.text_content() == f"{markup}\n\n{markup}"
    assert page.locator(".reasoning .text").text_content() == "<i>hm</i>"
    assert page.get_by_role("article", name="You").locator(".text").text_content() == "<u>markup</u>"
    assert page.locator("#messages :is(b, i, u, img, script)").count() == 0
    assert page.title() == "nanovllm"


@pytest.mark.compat
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (event({"error": {"message": "a step failed", "type": "stub", "code": 503}}), "a step failed"),
        ("", "The answer broke off."),
    ],
)
def test_an_answer_that_fails_midway_is_kept_with_its_error(visit: Visit, end: str, message: str) -> None:
    page = visit()
    canned(page, event(chunk("so far")) + end)
    send(page, "count")
    expect(page.get_by_role("alert")).to_have_text(message)
    assert answers(page).last.text_content() == "so far"
    page.get_by_text("broken off").wait_for()


@pytest.mark.compat
def test_everything_is_in_reach_on_a_phone(visit: Visit, stub: StubServer) -> None:
    stub.held_at = 60
    page = visit(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    send(page, "a" * 300)
    wait_for_text(page, 200)
    for box in ("html", "#log", "aside"):
        assert page.evaluate(f"(box => box.scrollWidth - box.clientWidth)(document.querySelector('{box}'))") == 0
    page.get_by_text("Settings").click()
    for field in ("System message", "Temperature", "Max tokens", "API key"):
        page.get_by_label(field).click()
    for button in ("Clear", "Stop"):
        place = page.get_by_role("button", name=button).bounding_box()
        assert place is not None and place["y"] + place["height"] <= 640 and place["height"] >= 44


def test_the_real_server_streams_an_answer_to_who_has_the_key(visit: Visit) -> None:
    with serving(key=KEY, NANOVLLM_API_KEY=KEY) as server:
        page = visit(key="wrong", url=server.url)
        expect(page.get_by_role("status")).to_have_text("needs an API key")
        send(page, "a")
        expect(page.get_by_role("alert")).to_have_text("the API key is missing or wrong")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("API key").fill(KEY)
        send(page, "list all prime numbers within 100")
        expect(page.get_by_text("tokens/s", exact=False).last).to_be_visible()
        page.get_by_role("button", name="Send").wait_for()
        whole = answers(page).last.text_content() or ""
        assert whole.startswith("2, 3, 5, 7") and whole.endswith("89, 97")
        expect(page.get_by_role("status")).to_have_text("live")
        expect(page.locator("#model")).to_have_text("qwen3-tiny · CPU")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            expect(page.locator(f"[data-value={name}]")).to_have_text(str(server.get("/stats")[name]))
        assert server.get("/stats")["num_output_tokens"] > 20
        page.reload()
        assert answers(page).last.text_content() == whole
        expect(page.get_by_role("status")).to_have_text("live")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
