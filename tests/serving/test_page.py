"""Streams of lines over real HTTP, and the page in a real browser, on the reference engine."""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from ray_eagle.config import Config
from ray_eagle.probing.reports import ProbeReport
from ray_eagle.serving import page as page_file
from ray_eagle.serving.app import deployed
from ray_eagle.serving.client import HandleClient, HttpClient
from ray_eagle.serving.messages import GenerateReply
from tests.browser import Page, browsing, find_browser
from tests.guessing import guessing_pair

TOKEN = "a secret"
AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}
STREAMED = {**AUTHORISED, "Accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def app(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandleClient]:
    """A target with a long context, and a drafter whose guesses are sometimes right."""
    target, drafter = guessing_pair(tmp_path_factory.mktemp("page"))
    serving = {"dtype": "float32", "cpus": 0.5, "token": TOKEN}
    config = Config.model_validate({"target": {"path": str(target)}, "serve": serving})
    with deployed(config, drafter_folder=drafter, app_name="page") as client:
        yield client


def lines_of(
    app: HandleClient, path: str, body: dict[str, Any], headers: dict[str, str] = STREAMED
) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{app.url}/{path}", json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines()]


@pytest.mark.parametrize("plain", [False, True])
def test_an_answer_comes_pass_by_pass(app: HandleClient, plain: bool) -> None:
    body = {"text": "hello", "max_new_tokens": 30, "steps": 3, "plain": plain}
    start, first, *passes, last = lines_of(app, "generate", body)
    assert (start["kind"], start["live"], first["kind"], last["kind"]) == ("start", True, "pass", "reply")
    reply = GenerateReply.model_validate(last["reply"])
    assert reply.tokens == app.generate(**body).tokens
    assert (start["prompt_length"], first["bonus"]["id"]) == (reply.prompt_length, reply.tokens[0])
    if plain:
        assert [line["bonus"]["id"] for line in passes] == reply.tokens[1:]
    else:
        assert [[p["id"] for p in line["drafted"]] for line in passes] == [made.drafted for made in reply.passes]
        assert [line["accepted"] for line in passes] == [made.accepted for made in reply.passes]
        accepted = sum(made.accepted for made in reply.passes)
        assert accepted > 0
        assert passes[-1]["acceptance_length"] == pytest.approx(1 + accepted / len(reply.passes))
    made = [first["bonus"]["id"]]
    for line in passes:
        made += [piece["id"] for piece in [*line["drafted"][: line["accepted"]], line["bonus"]]]
        assert line["tokens"] == min(len(made), len(reply.tokens))
    assert len(made) - sum(line["beyond"] for line in passes) == len(reply.tokens)
    assert passes[-1]["tokens_per_second"] == pytest.approx((len(reply.tokens) - 1) / reply.decode_seconds)


def test_lines_come_while_the_answer_is_made(app: HandleClient) -> None:
    body = {"input_ids": [1, 2, 3], "max_new_tokens": 300, "steps": 1}
    arrived = []
    with httpx.stream("POST", f"{app.url}/generate", json=body, headers=STREAMED, timeout=60) as response:
        for _ in response.iter_lines():
            arrived.append(time.monotonic())
    assert max(later - earlier for earlier, later in pairwise(arrived)) < 0.5 * (arrived[-1] - arrived[0])


def test_without_asking_for_lines_it_is_one_object(app: HandleClient) -> None:
    response = httpx.post(f"{app.url}/generate", json={"text": "a", "max_new_tokens": 4}, headers=AUTHORISED)
    assert GenerateReply.model_validate(response.json()).tokens


def test_an_error_before_the_first_line_has_its_status(app: HandleClient) -> None:
    response = httpx.post(f"{app.url}/generate", json={"input_ids": []}, headers=STREAMED)
    assert (response.status_code, "at least one token" in response.json()["error"]) == (400, True)
    body = {"prompts": [{"id": "a", "messages": []}]}
    response = httpx.post(f"{app.url}/probe", json=body, headers=AUTHORISED)
    assert (response.status_code, "chat template" in response.json()["error"]) == (400, True)


def test_a_client_that_leaves_frees_the_engine(app: HandleClient) -> None:
    body = {"input_ids": [1, 2, 3], "max_new_tokens": 8000, "steps": 1}
    with httpx.stream("POST", f"{app.url}/generate", json=body, headers=STREAMED, timeout=60) as response:
        next(response.iter_lines())
    began = time.monotonic()
    assert app.generate(input_ids=[1], max_new_tokens=2).tokens
    assert time.monotonic() - began < 10, "the whole answer takes far longer"


PROBE = {
    "prompts": [{"id": f"p{i}", "input_ids": [10 + i, 20]} for i in range(4)],
    "steps": 2,
    "max_new_tokens": 20,
    "plain_prompts": 2,
    "resamples": 100,
}


def test_a_probe_tells_its_progress_and_ends_with_the_report(app: HandleClient) -> None:
    *progress, last = lines_of(app, "probe", PROBE, AUTHORISED)
    assert {line["kind"] for line in progress} == {"progress"}
    assert [line["done"] for line in progress] == sorted(line["done"] for line in progress)
    assert progress[-1]["done"] == progress[-1]["total"]
    assert last["kind"] == "report"
    report = ProbeReport.model_validate(last["report"])
    one = httpx.post(f"{app.url}/probe", json=PROBE, headers={**AUTHORISED, "Accept": "application/json"}, timeout=60)
    assert ProbeReport.model_validate(one.json()).acceptance == report.acceptance


def test_a_probe_that_breaks_ends_with_the_error(app: HandleClient) -> None:
    *_, last = lines_of(app, "probe", {**PROBE, "steps": 5, "max_new_tokens": 3}, AUTHORISED)
    assert last["kind"] == "error"
    assert "max_new_tokens" in last["error"]


def test_the_page_is_open_and_holds_no_address(app: HandleClient) -> None:
    for url in (app.url, f"{app.url}/"):
        response = httpx.get(url, follow_redirects=True)
        assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert response.text == page_file.html()
        assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http" not in page_file.html().replace("http-equiv", "")
    assert "<script>/* page.js */" not in page_file.html() and "<style>/* page.css */" not in page_file.html()


browser_only = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on this machine: `make browser` installs Debian's"
)
LUMINANCE = """
(selector) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const element = document.querySelector(selector);
  let under = element;
  while (parse(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(under).backgroundColor].map(parse).map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""


@pytest.fixture
def page(app: HandleClient) -> Iterator[Page]:
    browser = find_browser()
    assert browser
    with browsing(browser) as tab:
        tab.open(app.url)
        yield tab


def finished(page: Page) -> None:
    page.until("document.querySelector('#status').textContent.startsWith('Done')")


def value(page: Page, name: str) -> str:
    return page.run(f"document.querySelector('#{name}').value")


@browser_only
def test_a_person_watches_an_answer_being_speculated(app: HandleClient, page: Page) -> None:
    page.until("!document.querySelector('#error').hidden")
    assert "asks for its access token" in page.run("document.querySelector('#error').textContent")
    page.type("#token", TOKEN)
    page.type("#prompt", "hello")
    page.type("#limit", "40")
    page.click("#run")
    finished(page)

    with HttpClient(app.url, TOKEN) as client:
        reply = client.generate(messages=[{"role": "user", "content": "hello"}], max_new_tokens=40, steps=3)
    shown = page.run(
        "[...document.querySelectorAll('#output .tok')].map(t => [t.dataset.kind, +t.dataset.id, t.classList.contains('beyond')])"
    )
    wanted = [["first", reply.tokens[0]]]
    for made in reply.passes:
        wanted += [["accepted", token] for token in made.drafted[: made.accepted]]
        wanted += [["rejected", token] for token in made.drafted[made.accepted :]]
        wanted += [["bonus", made.bonus]]
    assert [[kind, token] for kind, token, _ in shown] == wanted
    assert [token for kind, token, beyond in shown if kind != "rejected" and not beyond] == reply.tokens
    accepted = sum(made.accepted for made in reply.passes)
    assert 0 < accepted < 3 * len(reply.passes), "all three kinds are to be seen"
    assert value(page, "tau") == f"{1 + accepted / len(reply.passes):.2f}"
    assert (value(page, "passes"), value(page, "tokens")) == (str(len(reply.passes)), str(len(reply.tokens)))
    assert float(value(page, "rate")) > 0
    assert value(page, "same") == "yes", "float32: the text is that of plain decoding"
    assert 0.05 < float(value(page, "speedup").removesuffix("×")) < 4
    rows = page.run("[...document.querySelectorAll('#rows tr')].map(r => r.children[3].textContent)")
    assert rows[::-1] == [f"{made.accepted + 1} of {len(made.drafted) + 1}" for made in reply.passes]
    shares = page.run("[...document.querySelectorAll('#positions b')].map(b => b.textContent)")
    assert shares == [
        f"{int(100 * sum(made.accepted > k for made in reply.passes) / len(reply.passes) + 0.5)}%" for k in range(3)
    ]
    assert all(url.startswith((app.url, "data:")) for url in page.requests())
    assert [c for c in page.complaints() if "401" not in c] == [], "no script error, nothing refused by the policy"


@browser_only
def test_colour_is_never_alone_and_always_readable(page: Page) -> None:
    page.type("#token", TOKEN)
    page.type("#limit", "24")
    page.click("#run")
    finished(page)
    marks = {
        kind: page.run(f"getComputedStyle(document.querySelector('.legend .{kind}')).textDecoration")
        for kind in ("accepted", "bonus", "rejected")
    }
    assert len({mark.replace("rgb", "").split("(")[0] for mark in marks.values()}) == 3, marks
    assert page.run("document.querySelectorAll('#rows .mark').length") > 0
    backgrounds = []
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        backgrounds.append(page.run("getComputedStyle(document.body).backgroundColor"))
        for selector in (".legend .accepted", ".legend .bonus", ".legend .rejected", "h1", "#status", "#run", "label"):
            ratio = page.run(f"({LUMINANCE})({json.dumps(selector)})")
            assert ratio >= 4.5, (scheme, selector, ratio)
    assert backgrounds[0] != backgrounds[1]
    unlabelled = page.run(
        "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).map(e => e.id)"
    )
    assert unlabelled == []
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@browser_only
def test_rejected_drafts_can_be_hidden_and_an_answer_stopped(app: HandleClient, page: Page) -> None:
    page.type("#token", TOKEN)
    page.type("#limit", "4000")
    page.click("#run")
    page.until("document.querySelectorAll('#output .rejected').length > 3")
    page.click("#show-rejected")
    assert page.run("getComputedStyle(document.querySelector('#output .rejected')).display") == "none"
    page.click("#stop")
    page.until("document.querySelector('#status').textContent === 'Stopped.'")
    assert page.run("document.querySelector('#run').disabled") is False
    began = time.monotonic()
    assert app.generate(input_ids=[1], max_new_tokens=2).tokens
    assert time.monotonic() - began < 10


@browser_only
def test_a_server_that_refuses_is_quoted(page: Page) -> None:
    page.type("#token", TOKEN)
    page.type("#limit", "4096")
    page.type("#prompt", "x" * 6000)
    page.click("#run")
    page.until(
        "!document.querySelector('#error').hidden && document.querySelector('#error').textContent.includes('8192')"
    )
    assert page.run("document.querySelector('#run').disabled") is False
