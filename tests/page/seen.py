"""What is seen on the page, and what the book has at that place."""

from playwright.sync_api import Page

from groupstate.core import events as ev
from groupstate.core.phases import Phase
from groupstate.inspect.replay import book_at


def text(page: Page, selector: str) -> str:
    return page.locator(selector).first.inner_text()


def settle(page: Page) -> None:
    """Wait for the drawing that was asked for."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def go_to(page: Page, seq: int) -> None:
    page.evaluate("(seq) => document.groupstate.goTo(seq)", seq)
    settle(page)


def tile(page: Page, title: str) -> int:
    figure = page.locator(".tile", has=page.locator(f"h3:text-is('{title}')")).locator(".figure").inner_text()
    return int(figure.replace(",", ""))


def legend(page: Page) -> dict[str, int]:
    keys = page.locator("#legend .key")
    names = [key.strip() for key in keys.locator(".label").all_inner_texts()]
    return dict(zip(names, (int(v.replace(",", "")) for v in keys.locator(".value").all_inner_texts()), strict=True))


def column(page: Page, title: str) -> list[str]:
    """The cells of a column, of the rows that are there, from the top."""
    return page.evaluate(
        """(title) => {
            const heads = [...document.querySelectorAll('#columns > div')];
            const at = heads.findIndex((head) => head.innerText.replace(/[\\u25b2\\u25bc]/, '').trim() === title);
            return [...document.querySelectorAll('#rows .row:not([hidden])')]
                .sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map((row) => row.children[at].innerText.trim());
        }""",
        title,
    )


def phases_at(kept: list[ev.Record], seq: int) -> dict[str, int]:
    """Groups by phase after an event, as the book has them."""
    book = book_at(kept, seq)
    counts = {str(phase): book.count(phase) for phase in list(Phase)[:5]}
    gone = list(book.departed.values())
    return counts | {"evicted": gone.count(Phase.EVICTED), "committed": gone.count(Phase.COMMITTED)}
