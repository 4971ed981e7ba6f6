"""The documentation is true: its examples run, its settings load, its commands exist, its links lead somewhere.

A block is left out only by a comment in front of it that says why: `<!-- not run: needs a GPU -->`. Those that need
vLLM are run by `tests/vllm/test_docs.py`, those that need verl by `tests/verl/test_docs.py`.

| block     | what is checked                                                                            |
|-----------|--------------------------------------------------------------------------------------------|
| `python`  | runs; a page's blocks run in order, in one namespace, in an empty directory                 |
| `toml`    | loads; scenarios and rules by the code that reads them                                      |
| `console` | each `groupstate ...` names a command and options that exist, each `make ...` a target      |
"""

import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import click
import pytest

from groupstate.cli import main as command_line
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.errors import MissingExtra
from groupstate.simulate import scenario_file

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINKED_PAGES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]

OPTIONAL_PACKAGES = {
    "torch",
    "httpx",
    "pyarrow",
    "duckdb",
    "matplotlib",
    "numpy",
    "yaml",
    "reasoning_gym",
    "prometheus_client",
    "opentelemetry",
}
"""Without these, a page that uses them is skipped. `make test` has them all."""

FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(\w*)")
NOT_RUN = re.compile(r"<!-- not run: (\S.*?) *-->")


@attrs.frozen
class Block:
    """One fenced block of a page."""

    path: Path
    line: int
    """Of the opening fence, from 1."""
    kind: str
    text: str
    not_run: str = ""
    """Why it isn't run."""

    @property
    def is_run(self) -> bool:
        return not self.not_run

    @property
    def where(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path, text: str | None = None) -> Iterator[Block]:
    lines = iter(enumerate((path.read_text(encoding="utf-8") if text is None else text).splitlines(), start=1))
    in_front = ""
    for number, line in lines:
        if not (fence := FENCE.match(line)):
            in_front = line.strip() or in_front
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.strip().startswith(fence[1]):
                break
            body.append(inner)
        reason = NOT_RUN.fullmatch(in_front)
        yield Block(path, number, fence[2], textwrap.dedent("\n".join(body) + "\n"), reason[1] if reason else "")
        in_front = ""


def run_python(page: list[Block], namespace: dict[str, Any]) -> None:
    for block in page:
        # Blank lines in front, so that a traceback has the line numbers of the page.
        exec(compile("\n" * block.line + block.text, str(block.path), "exec", dont_inherit=True), namespace)


def check_toml(block: Block) -> None:
    data = tomllib.loads(block.text)
    if "steps" in data:
        scenario_file.parse(data, block.where)
    elif isinstance(data.get("rules"), dict):
        rules_from_dict(data["rules"], block.where)
    elif data.keys() & set(Rules.__struct_fields__):
        rules_from_dict(data, block.where)


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a console block, as words; output is what has no `$ ` in front, if anything has."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = _first_command(list(lexer)) if re.match(r"(\w+=\S* )*(groupstate|python|make) ?", line) else []
        if words[:3] == ["python", "-m", "groupstate"]:
            words = words[2:]
        if words[:1] in (["groupstate"], ["make"]):
            yield words


def _first_command(words: list[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    ends = [at for at, word in enumerate(words) if word[0:1] in {"|", ">", "<", "&", ";"}]
    return words[: ends[0]] if ends else words


def check_command(words: list[str], command: click.Command) -> str | None:
    """What is wrong with a command line: a word that is no subcommand, or an option that isn't there."""
    name, rest = words[0], iter(words[1:])
    for word in rest:
        if word == "--":
            return None
        if word.startswith("-") and word != "-":
            if (option := _option(command, word)) is None:
                return f"`{name}` has no option {word.partition('=')[0]}"
            _skip_value(option, word, rest)
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is None:
                return f"`{name}` has no command {word!r}"
            name, command = f"{name} {word}", found
        elif not any(isinstance(param, click.Argument) for param in command.params):
            return f"`{name}` takes no argument, but {word!r} is given"
    return None


def _option(command: click.Command, word: str) -> click.Option | None:
    flag = word.partition("=")[0] if word.startswith("--") else word[:2]
    for param in command.get_params(click.Context(command)):
        if isinstance(param, click.Option) and flag in (*param.opts, *param.secondary_opts):
            return param
    return None


def _skip_value(option: click.Option, word: str, rest: Iterator[str]) -> None:
    attached = "=" in word or (not word.startswith("--") and len(word) > 2)
    if not (option.is_flag or option.count or attached):
        for _ in range(option.nargs):
            next(rest, None)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def check_make(words: list[str], targets: set[str]) -> str | None:
    unknown = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
    return f"make has no target {unknown[0]!r}" if unknown else None


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading in it."""
    return [link for link in _links(_without_code(text)) if not _leads_somewhere(path, link)]


def _without_code(text: str) -> str:
    text = re.sub(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", text)


def _links(text: str) -> list[str]:
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    references = re.findall(r"^\[[^\]]+\]:\s*<?(\S+?)>?$", text, re.MULTILINE)
    html = re.findall(r"(?:href|src|srcset)=\"([^\"]+)\"", text)
    return [link for link in (*inline, *references, *html) if not re.match(r"[a-z]+:", link)]


def _leads_somewhere(path: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = path.parent / file if file else path
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*?) *#*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `__main__` of its own, for examples that are scripts and for classes whose annotations are looked up."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def pages_with(kind: str) -> list[Any]:
    found = {path: [block for block in blocks(path) if block.kind == kind and block.is_run] for path in PAGES}
    return [pytest.param(page, id=path.name) for path, page in found.items() if page]


@pytest.mark.parametrize("page", pages_with("python"))
def test_examples_run(
    page: list[Block], main_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        run_python(page, vars(main_module))
    except (ModuleNotFoundError, MissingExtra) as error:
        lacking = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if isinstance(lacking, ModuleNotFoundError) and lacking.name in OPTIONAL_PACKAGES:
            pytest.skip(f"{lacking.name} isn't installed")
        raise


@pytest.mark.parametrize("page", pages_with("toml"))
def test_settings_load(page: list[Block]) -> None:
    for block in page:
        check_toml(block)


@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_exist(page: list[Block]) -> None:
    wrong = []
    for block in page:
        for words in commands(block):
            complaint = check_make(words, make_targets()) if words[0] == "make" else check_command(words, command_line)
            if complaint:
                wrong.append(f"{block.where}: {complaint}")

    assert not wrong


@pytest.mark.parametrize("path", LINKED_PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


# The checks themselves


def page_of(*lines: str) -> list[Block]:
    return list(blocks(Path("page.md"), "\n".join(lines)))


def test_a_block_is_left_out_only_with_a_reason() -> None:
    text = ["```python", "1", "```"]

    assert [block.is_run for block in page_of("<!-- not run: needs a GPU -->", "", *text, *text)] == [False, True]
    assert [block.is_run for block in page_of("<!-- not run: -->", *text)] == [True]


def test_blocks_of_a_page_share_names_and_a_failure_has_the_line_of_the_page() -> None:
    page = page_of("# Title", "```python", "a = 1", "```", "and", "```python", "", "a / 0", "```")

    with pytest.raises(ZeroDivisionError) as caught:
        run_python(page, {})
    assert caught.traceback[-1].lineno + 1 == 8


def test_a_fence_of_four_holds_one_of_three() -> None:
    (block,) = page_of("````markdown", "```python", "x", "```", "````")

    assert (block.kind, block.text) == ("markdown", "```python\nx\n```\n")


@pytest.mark.parametrize("text", ["steps = [{ submitt = 'a' }]", "rules = { mod = 'async' }", "lag_max = 'two'", "= 1"])
def test_settings_that_would_not_load_are_found(text: str) -> None:
    with pytest.raises(Exception, match=r"submitt|mod|lag_max|[Ii]nvalid"):
        check_toml(page_of("```toml", text, "```")[0])


def test_a_table_that_is_neither_scenario_nor_rules_only_has_to_be_toml() -> None:
    check_toml(page_of("```toml", "[project]", "name = 'mine'", "```")[0])


@click.group()
def toy() -> None:
    pass


@toy.command()
@click.argument("run")
@click.option("--group", "-g")
@click.option("--json", is_flag=True)
def show(run: str, group: str, json: bool) -> None:
    pass


@toy.command()
def version() -> None:
    pass


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("groupstate show runs/demo --group g1 --json", None),
        ("groupstate show -g g1 runs/demo | head -3", None),
        ("SEED=1 groupstate show runs/demo --group=g1 > out.txt", None),
        ("python -m groupstate --help", None),
        ("groupstate show --help", None),
        ("groupstate shoe runs/demo", "`groupstate` has no command 'shoe'"),
        ("groupstate show runs/demo --grop g1", "`groupstate show` has no option --grop"),
        ("groupstate --json show runs/demo", "`groupstate` has no option --json"),
        ("groupstate version now", "`groupstate version` takes no argument, but 'now' is given"),
    ],
)
def test_a_command_line_is_compared_with_the_commands(line: str, complaint: str | None) -> None:
    (block,) = page_of("```console", f"$ {line}", "groupstate: output, not a command", "```")

    (words,) = commands(block)
    assert check_command(words, toy) == complaint


def test_a_make_target_that_does_not_exist_is_found() -> None:
    assert check_make(["make", "demo", "TORCH=torch==2.9.1"], make_targets()) is None
    assert check_make(["make", "demos"], make_targets()) == "make has no target 'demos'"


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# The start\n[a](page.md) [b](#the-start) [c](gone.md) [d](#the-end) [e](https://example.org) `[f](code)`"
    page.write_text(text)

    assert broken_links(page, text) == ["gone.md", "#the-end"]
