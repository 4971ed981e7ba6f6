"""Texts of a run stay texts on its page, and nothing on it could load anything."""

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page

from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from tests.page.made_runs import write
from tests.page.seen import settle, text

HOSTILE = (
    "<script>document.pwned = 1</script>",
    "</script><script>document.pwned = 2</script>",
    "<!-- <script>",
    "<img src=x onerror='document.pwned = 3'>",
    "\u2028\u2029 ${document.pwned = 4} `'\" &amp; \\",
    "javascript:document.pwned = 5",
)


def test_texts_of_a_run_are_texts(tmp_path: Path, show_run: Callable[..., Page]) -> None:
    events: list[ev.AnyEvent] = [ev.RunStarted(HOSTILE[0], {"own": HOSTILE[3]}, RULES_VERSION, 0)]
    for number, hostile in enumerate(HOSTILE):
        name = f"{number} {hostile}"
        events += [
            ev.GroupSubmitted(name, 1, hostile, 0, 1, "submit", hostile),
            ev.SessionStarted(name, 0, 1, hostile),
            ev.SessionFailed(name, 0, 1, "error", hostile, 1.0),
            ev.SessionStarted(name, 0, 2, hostile),
            ev.SessionFinished(name, 0, 2, (ev.TrajectoryRecord(0, {hostile: 1.0}),)),
            ev.GroupFinished(name),
        ]
    kept = [ev.Record(seq, seq * 1_000_000, event) for seq, event in enumerate(events, 1)]
    page = show_run(write(tmp_path / "run", kept, prompts=lambda number: HOSTILE[number]), HOSTILE[0])
    for number, hostile in enumerate(HOSTILE):
        page.evaluate("(group) => document.groupstate.choose(group)", number)
        settle(page)

        assert page.evaluate("document.querySelector('.prompt').textContent") == hostile
        assert hostile in page.evaluate("document.querySelector('.events').textContent")
        assert hostile in page.evaluate("document.getElementById('group-title').textContent")
        page.fill("#search", hostile.split()[-1])
        settle(page)
    page.hover(".gantt canvas", position={"x": 60, "y": 34})

    assert page.evaluate("document.pwned") is None
    assert page.evaluate("document.querySelectorAll('script, img').length") == 2
    assert text(page, "#name") == HOSTILE[0]


def test_the_page_can_load_nothing_even_if_it_tried(
    made: tuple[Path, list[ev.Record]], show_run: Callable[..., Page], may_complain: None
) -> None:
    page = show_run(made[0])
    asked: list[str] = []
    page.on("requestfinished", lambda request: asked.append(request.url))
    blocked = page.evaluate(
        """async () => {
            const blocked = [];
            document.addEventListener('securitypolicyviolation', (event) => blocked.push(event.effectiveDirective));
            await fetch('http://127.0.0.1:9/x').catch(() => {});
            document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/y.png' }));
            const script = (made) => document.body.append(Object.assign(document.createElement('script'), made));
            script({ textContent: 'document.pwned = 1' });
            script({ src: 'http://127.0.0.1:9/z.js' });
            document.body.insertAdjacentHTML('beforeend', '<b onclick="1" style="color:red">x</b>');
            await new Promise((done) => setTimeout(done, 300));
            return blocked;
        }"""
    )

    assert {"connect-src", "img-src", "script-src-elem", "style-src-attr"} <= set(blocked)
    assert page.evaluate("document.pwned") is None
    assert asked == []
