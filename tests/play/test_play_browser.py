"""The page in a real browser: drag, type, pick, reopen; and nothing leaves the machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from accessibility import AXE, found_by_axe
from merging import change_config, copied
from play_pages import serve

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import lab_plan
from layerswap.play.pair import Pair

pytestmark = pytest.mark.slow
ANSWERED = ".answer footer :is(.right, .wrong)"


@pytest.fixture
def page(browser, served):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(90_000)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(served.url) else said.append(r.url))
    page.goto(served.url)
    page.wait_for_selector(ANSWERED)
    yield page
    context.close()
    assert said == []  # no error, and nothing asked of another host


def open_page(browser, url):
    page = browser.new_page()
    page.set_default_timeout(90_000)
    page.goto(url)
    return page


def live(page):
    return page.url.partition("#")[2]


def test_dragging_a_boundary_asks_the_composition_that_is_shown(page):
    grip = page.locator(".handle.bottom")
    box, stack = grip.bounding_box(), page.locator(".layers").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, stack["y"] + stack["height"] * 5 / 8, steps=5)
    page.mouse.up()
    page.wait_for_url("**/#swap.3.1.0.0.blend")
    assert "bottom 3, top 1" in page.locator("#live").inner_text()
    assert grip.get_attribute("aria-valuenow") == "3"
    page.fill("#prompt", "Eva pomi foku 5. Eva seru foku 7. deka foku Eva?")
    page.keyboard.press("Control+Enter")
    card = page.locator('.answer.live[data-key="swap.3.1.0.0.blend"]')
    page.wait_for_selector('.answer.live[data-key="swap.3.1.0.0.blend"] footer >> text=tokens')
    plan = Pair(lab_plan(shipped(), "furo")).plan_of(live(page))
    tokenizer = load_tokenizer(shipped().base)
    ids = tokenizer(page.input_value("#prompt"), return_tensors="pt").input_ids
    written = plan.load().generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)
    text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert card.locator(".text").inner_text().strip() == text.strip()


def test_the_keyboard_is_enough(page):
    page.locator(".handle.top").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_url("**/#swap.1.2.0.0.blend")
    page.keyboard.press("Home")
    page.wait_for_url("**/#swap.1.0.0.0.blend")
    page.locator("#presets button", has_text="partition A").press("Enter")
    page.wait_for_url("**/#partition.A")
    assert "name: A" in page.locator("#recipe").inner_text()


def test_a_link_opens_its_composition_and_two_pages_answer_at_once(browser, served):
    context = browser.new_context()
    context.set_default_timeout(90_000)
    pages = [context.new_page(), context.new_page()]
    for page, key in zip(pages, ("swap.3.0.0.0.task", "soup"), strict=True):
        page.goto(f"{served.url}#{key}")
    for page, key in zip(pages, ("swap.3.0.0.0.task", "soup"), strict=True):
        page.wait_for_selector(f'.answer.live[data-key="{key}"] footer :is(.right, .wrong)')
        assert live(page) == key
    pages[0].evaluate("location.hash = 'swap.99.0.0.0.blend'")
    pages[0].wait_for_selector("#fault >> text=zones overlap")
    assert live(pages[0]) == "swap.3.0.0.0.task"
    pages[0].goto("about:blank")
    pages[0].goto(f"{served.url}#50%")
    pages[0].wait_for_selector("#live >> text=bottom 1, top 1")
    pages[0].close()
    pages[1].click("#send")
    pages[1].wait_for_selector(ANSWERED)
    context.close()


def test_markup_in_prompts_and_answers_is_text(page):
    page.fill("#prompt", "<img src=x onerror=alert(1)> </script><b>fesi")
    page.click("#send")
    page.wait_for_selector(".answer footer >> text=tokens")
    assert page.locator("#answers b, #answers img").count() == 0


def test_a_restarted_server_is_found_again(browser, tmp_path, monkeypatch):
    served = serve(tmp_path, monkeypatch)
    port = int(served.url.rstrip("/").rpartition(":")[2])
    page = open_page(browser, served.url)
    page.wait_for_selector(ANSWERED)
    served.stop()
    page.wait_for_selector("#status >> text=the server is gone")
    again = serve(tmp_path, monkeypatch, port)
    try:
        page.wait_for_selector("#status.ready")
        page.click("#send")
        page.wait_for_selector(ANSWERED)
    finally:
        page.close()
        again.stop()


def test_an_expert_that_cannot_be_loaded_is_one_line_on_the_page(browser, tmp_path, monkeypatch):

    import layerswap as ls

    lab = shipped()
    for name, source in (("a", lab.task_experts[0]), ("b", lab.language_experts["furo"][0])):
        folder = copied(source, tmp_path / name)
        change_config(folder, model_type="unheard-of", architectures=["UnheardOf"])
    monkeypatch.chdir(tmp_path)
    served = ls.play(ls.swap(task="a", language="b"), device="cpu")
    try:
        page = open_page(browser, served.url)
        page.wait_for_selector("#status.failed")
        line = page.locator("#fault").inner_text()
        assert "cannot be loaded" in line or "unheard-of" in line
        assert "\n" not in line
        page.close()
    finally:
        served.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_the_screen_and_axe_finds_nothing(browser, served, scheme, width):
    # Past the page's own policy, which would not let axe in.
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True
    )
    page = open_page(context, served.url)
    page.wait_for_selector(ANSWERED)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if AXE is not None:
        assert found_by_axe(page) == []
    context.close()


def test_a_notebook_shows_the_page_in_a_frame(browser, served):
    """A notebook displays `_repr_html_` in a page of its own server on this machine."""

    class Notebook(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html><html>" + served._repr_html_().encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Notebook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = open_page(browser, f"http://localhost:{server.server_port}/")
        frame = page.frame_locator("iframe")
        frame.locator(ANSWERED).first.wait_for()
        frame.locator("#live", has_text="bottom 1, top 1").wait_for()  # its own request
        page.close()
        server.shutdown()


def test_the_chat_template_is_offered_and_marks_and_pins_are_kept(browser, tmp_path, monkeypatch):
    import layerswap as ls

    lab, folders = shipped(), {}
    for name, source in (
        ("task", lab.task_experts[0]),
        ("language", lab.language_experts["furo"][0]),
    ):
        folders[name] = copied(source, tmp_path / name)
        template = (
            "{{ bos_token }}{% for one in messages %}Eva pomi foku 5. {{ one.content }}{% endfor %}"
        )
        (folders[name] / "chat_template.jinja").write_text(template)
    monkeypatch.chdir(tmp_path)
    served = ls.play(ls.swap(**folders), prompts=["Eva seru foku 3. deka foku Eva?"], device="cpu")
    try:
        page = open_page(browser, served.url)
        page.wait_for_selector(".answer footer >> text=tokens")
        assert page.is_checked("#chat")
        page.locator(".answer.live button", has_text="Pin").press("Enter")
        assert page.locator(":focus").inner_text() == "Unpin"
        page.click("#presets button >> text=soup")
        page.wait_for_selector('.answer.live[data-key="soup"] footer >> text=tokens')
        keys = [one.get_attribute("data-key") for one in page.locator(".answer").all()]
        assert keys == ["task", "language", "soup", "swap.1.1.0.0.blend"]
        page.close()
    finally:
        served.stop()
