"""Where servers are: the URLs that a user gives, as they are asked below."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from groupstate.core.arguments import shown, string
from groupstate.errors import EngineError


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """Without what the API's paths begin with.

    Raises:
        EngineError: none, one that is no URL, or one twice.
    """
    if not isinstance(urls, str | Sequence) or isinstance(urls, bytes):
        raise EngineError(f"urls is {shown(urls)}; it must be a URL, as http://host:8000, or a list of such")
    given = [urls] if isinstance(urls, str) else urls
    bases = [string("a URL", url, error=EngineError).rstrip("/").removesuffix("/v1") for url in given]
    for url, base in zip(given, bases, strict=True):
        if not _is_url(base):
            raise EngineError(f"{url!r} is no URL of a server; it must be as http://host:8000")
        if bases.count(base) > 1:
            raise EngineError(f"{base} is given twice; give each server once")
    if not bases:
        raise EngineError("no server is given; urls must have at least one")
    return bases


def _is_url(base: str) -> bool:
    try:
        parts = urlsplit(base)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment) and base.isascii() and not any(map(str.isspace, base))
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
