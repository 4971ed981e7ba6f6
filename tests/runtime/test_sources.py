"""Where prompts come from: order, position, and what can't be used."""

import json

import pytest

from groupstate import Prompt
from groupstate.core.prompt import GROUP_SIZE_MAX
from groupstate.errors import BadInput, MissingExtra, SourceFailed
from groupstate.runtime.sources import FunctionSource, IteratorSource, ListSource, as_source, file_source
from tests.runtime.scenes import half_right, opened, virtual


def drawn(source, count: int | None = None) -> list:
    """Contents of the next prompts, all of them by default."""
    contents = []
    while (count is None or len(contents) < count) and (prompt := source.draw()) is not None:
        contents.append(prompt.content)
    return contents


# At hand ---------------------------------------------------------------------------------------------


def test_a_list_is_drawn_in_order_and_ends():
    source = ListSource(["a", "b", "c"])

    assert (drawn(source), source.draw(), source.position) == (["a", "b", "c"], None, 3)


def test_a_list_without_prompts_ends_at_once():
    assert ListSource([], epochs=None).draw() is None


def test_epochs_repeat_the_list():
    assert drawn(ListSource("ab", epochs=3)) == ["a", "b", "a", "b", "a", "b"]


def test_endless_epochs_do_not_end():
    assert drawn(ListSource("ab", epochs=None), 7) == ["a", "b", "a", "b", "a", "b", "a"]


def test_each_epoch_is_shuffled_anew_and_the_seed_says_how():
    source = ListSource(range(20), epochs=2, shuffle_seed=1)
    order = drawn(source)

    assert sorted(order[:20]) == sorted(order[20:]) == list(range(20))
    assert order[:20] != order[20:]
    assert order == drawn(ListSource(range(20), epochs=2, shuffle_seed=1))
    assert order != drawn(ListSource(range(20), epochs=2, shuffle_seed=2))


@pytest.mark.parametrize("position", [0, 1, 19, 20, 21, 39, 40])
def test_a_shuffled_list_goes_on_at_a_position_as_if_it_had_never_stopped(position):
    whole = drawn(ListSource(range(20), epochs=2, shuffle_seed=1))
    source = ListSource(range(20), epochs=2, shuffle_seed=1)

    source.seek(position)

    assert drawn(source) == whole[position:]


def test_an_id_is_used_in_the_first_epoch_only():
    source = ListSource([Prompt("p", group_id="a")], epochs=2)

    assert [source.draw().group_id, source.draw().group_id] == ["a", None]


def test_an_iterator_is_drawn_to_its_end():
    source = IteratorSource(iter("abc"))

    assert (drawn(source), source.position) == (["a", "b", "c"], 3)


def test_an_iterator_seeks_forward_by_drawing_and_never_back():
    source = IteratorSource(iter(range(9)), name="mine")
    source.seek(4)
    assert drawn(source, 2) == [4, 5]

    with pytest.raises(BadInput, match="mine is at prompt 6 and can't go back to 2"):
        source.seek(2)


def test_an_iterator_that_ends_before_the_position_has_no_more():
    source = IteratorSource(iter("ab"))
    source.seek(5)

    assert (source.draw(), source.position) == (None, 2)


def test_a_function_makes_prompts_from_their_position_until_it_gives_none():
    source = FunctionSource(lambda position: f"p{position}" if position < 4 else None)
    source.seek(2)

    assert (drawn(source), source.position) == (["p2", "p3"], 4)


def test_whatever_is_at_hand_becomes_a_source(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    ready_made = ListSource(["a"])

    assert as_source(ready_made) is ready_made
    assert drawn(as_source(["a"])) == drawn(as_source(iter(["a"]))) == ["a"]
    assert drawn(as_source(path)) == drawn(as_source(str(path))) == ["a"]
    assert as_source(path).name == "p.jsonl"


# Files -----------------------------------------------------------------------------------------------

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_verl(prompt: Prompt) -> None:
    assert prompt.content == [{"role": "user", "content": "2 + 2"}]
    assert (prompt.dataset, prompt.n, prompt.group_id) == ("openai/gsm8k", None, None)
    assert prompt.extra["ground_truth"] == "4"
    assert prompt.extra["ability"] == "math"
    assert prompt.extra["extra_info"] == {"index": 7}


def test_jsonl_in_verls_columns(tmp_path):
    check_verl(file_source(jsonl(tmp_path / "p.jsonl", VERL_ROW)).draw())


def test_parquet_in_verls_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([VERL_ROW, VERL_ROW]), tmp_path / "p.parquet")
    source = file_source(tmp_path / "p.parquet")

    check_verl(source.draw())
    assert source.name == "p.parquet"


def test_jsonl_in_groupstates_columns(tmp_path):
    row = {"prompt": "2 + 2", "dataset": "sums", "n": 4, "group_id": "s1", "answer": 4}
    prompt = file_source(jsonl(tmp_path / "p.JSONL", row)).draw()

    assert prompt == Prompt("2 + 2", "sums", 4, "s1", {"answer": 4})


def test_empty_lines_are_passed_over_and_counted(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": ')

    with pytest.raises(BadInput, match="line 4 is not JSON"):
        file_source(path)


def test_a_file_is_shuffled_and_repeated_like_a_list(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", *({"prompt": number} for number in range(9)))

    assert drawn(file_source(path, epochs=2, shuffle_seed=3)) == drawn(ListSource(range(9), epochs=2, shuffle_seed=3))


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ([1], "line 2 is list; it must be an object"),
        ({"promt": "p", "n": 1}, "line 2 has no 'prompt'; it has 'n', 'promt'"),
        ({}, "line 2 has no 'prompt'; it has nothing"),
        ({"prompt": None, "n": 1}, "line 2 has no 'prompt': it is null"),
        ({"prompt": "p", "n": 0}, f"line 2 has n = 0; it must be an integer from 1 to {GROUP_SIZE_MAX}"),
        ({"prompt": "p", "n": GROUP_SIZE_MAX + 1}, "line 2 has n = 4097"),
        ({"prompt": "p", "n": 2.5}, "line 2 has n = 2.5"),
        ({"prompt": "p", "n": True}, "line 2 has n = True"),
        ({"prompt": "p", "n": "4"}, "line 2 has n = '4'"),
        ({"prompt": "p", "group_id": ""}, "line 2 has group_id = ''; it must be a string that is not empty"),
        ({"prompt": "p", "group_id": 7}, "line 2 has group_id = 7"),
        ({"prompt": "p", "group_id": "first"}, "group_id 'first' stands at 1 and again at 2"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, row, shown):
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "p", "group_id": "first"}, row)

    with pytest.raises(BadInput, match=shown) as caught:
        file_source(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data", [b'{"prompt": "\xff"}', b"prompt: a", b'{"prompt": NaN}', b'\xef\xbb\xbf{"prompt": 1}']
)
def test_a_line_that_is_no_json_is_named(tmp_path, data):
    (tmp_path / "p.jsonl").write_bytes(data)

    with pytest.raises(BadInput, match="line 1 is not JSON"):
        file_source(tmp_path / "p.jsonl")


def test_a_parquet_row_that_cannot_be_used_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"prompt": "p"}, {"prompt": None}]), tmp_path / "p.parquet")

    with pytest.raises(BadInput, match="row 2 has no 'prompt'"):
        file_source(tmp_path / "p.parquet")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_bytes(b"not parquet")

    with pytest.raises(BadInput, match=r"p\.parquet: not a readable Parquet file"):
        file_source(tmp_path / "p.parquet")


def test_parquet_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "p.parquet").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    with pytest.raises(MissingExtra) as missing:
        file_source(tmp_path / "p.parquet")

    assert str(missing.value) == (
        "reading p.parquet needs pyarrow; install the extra 'parquet' of groupstate, for instance from a clone: "
        "pip install '.[parquet]'"
    )
    assert (missing.value.package, missing.value.extra) == ("pyarrow", "parquet")


@pytest.mark.parametrize("name", ["prompts.csv", "prompts"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    with pytest.raises(BadInput, match=rf"a \.jsonl or a \.parquet file, and '{tmp_path / name}' is none by its name$"):
        as_source(tmp_path / name)


@pytest.mark.parametrize("name", ["runs", "prompts.jsonl"])
def test_a_folder_is_refused_as_what_it_is(tmp_path, name):
    (tmp_path / name).mkdir()

    for given in (tmp_path / name, str(tmp_path / name)):
        with pytest.raises(BadInput, match=f"a .parquet file, and '{tmp_path / name}' is a folder$"):
            as_source(given)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("one prompt", "'one prompt'"),
        ("1.5 + 1.5 = ?\nSay it.", r"'1.5 + 1.5 = ?\nSay it.'"),
        ("", "''"),
        ("x\0y", r"'x\x00y'"),
        ("x" * 5000, f"'{'x' * 50}"),
    ],
    ids=["words", "lines", "empty", "nul", "long"],
)
def test_a_text_that_may_be_a_prompt_itself_is_named_and_told_to_go_into_a_list(text, told):
    with pytest.raises(
        BadInput, match="is none by its name; if it is a prompt itself, give a list with it in it"
    ) as error:
        as_source(text)

    assert told in str(error.value)
    assert len(str(error.value)) < 400


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match="there is no such file"):
        as_source(str(tmp_path / "none.jsonl"))


def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n\n")

    with pytest.raises(BadInput, match="holds no prompts"):
        file_source(tmp_path / "p.jsonl")


def test_prompts_that_are_all_at_hand_are_taken_apart_by_their_dataset() -> None:
    prompts = [Prompt("a", "math"), Prompt("b", "code"), Prompt("c", "math")]
    mixed = ListSource(prompts, epochs=2).by_dataset()
    drawn = [mixed.draw_from("math") for _ in range(5)]

    assert mixed.datasets == ("code",)
    assert [prompt and prompt.content for prompt in drawn] == ["a", "c", "a", "c", None]


# Rows ------------------------------------------------------------------------------------------------

ROW = {"prompt": "2 + 2", "dataset": "sums", "n": 4, "group_id": "s1", "answer": 4}
FROM_ROW = Prompt("2 + 2", "sums", 4, "s1", {"answer": 4})


@pytest.mark.parametrize(
    "source",
    [ListSource([ROW]), IteratorSource(iter([ROW])), FunctionSource(lambda position: ROW), as_source([ROW])],
    ids=["list", "iterator", "function", "given"],
)
def test_a_dict_with_a_prompt_is_a_row_wherever_it_comes_from(source, tmp_path):
    assert source.draw() == FROM_ROW == file_source(jsonl(tmp_path / "p.jsonl", ROW)).draw()


def test_a_dict_without_a_prompt_is_content():
    assert ListSource([{"question": "2 + 2"}]).draw() == Prompt({"question": "2 + 2"})


def test_rows_are_taken_apart_by_their_dataset():
    assert ListSource([ROW, {"prompt": "x"}]).by_dataset().datasets == ("sums", "")


class Own:
    """A user's source that gives rows."""

    name = "own"

    def __init__(self):
        self.position = 0

    def draw(self):
        self.position += 1
        return {"prompt": f"p{self.position}", "answer": self.position}

    def seek(self, position):
        self.position = position


@pytest.mark.parametrize("source", [Own, lambda: {"sums": Own()}], ids=["alone", "mixed"])
@virtual
async def test_a_source_of_a_users_own_may_give_rows_too(loop, source):
    async with opened(loop, source=source(), session=half_right) as run:
        prompt = (await run.sample(1)).groups[0].prompt

    assert (prompt.content, prompt.extra) == ("p1", {"answer": 1})


@virtual
async def test_a_row_is_submitted_and_validated_on_as_one(loop):
    async with opened(loop, session=half_right) as run:
        handle = run.submit({**ROW, "n": 2}, n=3)
        batch = await run.validate([ROW])

        assert (handle.id, handle.size, handle.prompt.extra) == ("s1", 3, {"answer": 4})
        assert batch.groups[0].prompt.extra == {"answer": 4, "group_id": "s1"}
        with pytest.raises(BadInput, match="the row has n = 0; it must be an integer from 1 to"):
            run.submit({"prompt": "p", "n": 0})
        with pytest.raises(BadInput, match="the row has no 'prompt': it is null"):
            await run.validate([{"prompt": None}])


@virtual
async def test_a_row_that_cannot_be_used_is_told_with_its_place(loop):
    async with opened(loop, source=[ROW, {"prompt": "p", "n": "four"}], session=half_right) as run:
        with pytest.raises(SourceFailed, match="source 'list' failed at prompt 1: BadInput: the row has n = 'four'"):
            await run.sample(2)


@pytest.mark.parametrize("prompts", [{"a", "b"}, frozenset({"a"}), {"math": {"a", "b"}}])
def test_a_set_has_no_order_to_go_on_in(prompts):
    with pytest.raises(BadInput, match=r"is a (set|frozenset), and .*; give a list, such as sorted\(prompts\)"):
        as_source(prompts)


def test_a_list_source_of_a_set_is_refused_too():
    with pytest.raises(BadInput, match="is a set"):
        ListSource({"a"})


def test_the_keys_of_a_dict_have_an_order():
    assert as_source({"b": 1, "a": 2}.keys()).draw().content == "b"


# What is no source -----------------------------------------------------------------------------------


@virtual
async def test_a_source_that_lacks_what_a_source_has_is_refused(loop):
    class Bare:
        name = "bare"

        def draw(self) -> Prompt | None:
            return Prompt("p")

    with pytest.raises(BadInput, match=r"has no position, no seek; it needs name, position, draw\(\) and seek\(\)"):
        async with opened(loop, source=Bare()):
            pass


@virtual
@pytest.mark.parametrize("source", [5, None.__class__, {"a": 5}, {None: ["p"]}], ids=repr)
async def test_what_gives_no_prompts_is_refused_before_anything_begins(loop, source):
    with pytest.raises(BadInput):
        async with opened(loop, source=source):
            pass
