"""Settings from files and flags, and functions by name: what is wrong is named with its place."""

import sys

import pytest

from groupstate import Rules, SamplingParams
from groupstate.errors import BadInput, BadSettings
from groupstate.runtime.settings import (
    RunTable,
    load_function,
    load_session,
    merged_rules,
    parsed_assignments,
    read_settings,
    run_table,
    sampling_params,
)

WHOLE = """
[run]
prompts = "p.jsonl"
groups = 8
[rules]
lag_max = 2
[engine]
name = "torch"
seed = 1
[sampling]
temperature = 0.0
"""


def settings(tmp_path, text: str | bytes):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_settings(path)


def test_the_four_tables_are_read(tmp_path):
    found = settings(tmp_path, WHOLE)

    assert run_table(found.run, where="here") == RunTable(prompts="p.jsonl", groups=8)
    assert merged_rules(found, []) == Rules(lag_max=2)
    assert found.engine == {"name": "torch", "seed": 1}
    assert sampling_params(found.sampling, where="here") == SamplingParams(temperature=0.0)


def test_an_empty_file_is_all_defaults(tmp_path):
    assert merged_rules(settings(tmp_path, ""), []) == Rules()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[rulez]\nlag_max = 1", r"run\.toml has no setting 'rulez'; did you mean 'rules'\?"),
        ("[rules]\nlagmax = 1", r"\[rules\] has no setting 'lagmax'; did you mean 'lag_max'\?"),
        ("[rules]\nlag_max = 'two'", r"\[rules\]: lag_max is 'two'; it must be an integer"),
        ("rules = 3", r"rules is 3; it must be a table: \[rules\]"),
        ("[run]\ngroops = 1", r"\[run\] has no setting 'groops'; did you mean 'groups'\?"),
        ("[run]\ngroups = 'many'", r"run\.toml: \[run\]: groups is 'many'; it must be an integer or None"),
        ("[run]\nn = '3'", r"run\.toml: \[run\]: n is '3'; it must be an integer$"),
        ("[run]\nn = 3.0", r"\[run\]: n is 3\.0; it must be an integer$"),
        ("[run]\nn = true", r"\[run\]: n is True; it must be an integer$"),
        ("[run]\nprompts = 3", r"\[run\]: prompts is 3; it must be a string or None"),
        ("[run]\ngrace_s = '1'", r"\[run\]: grace_s is '1'; it must be a number$"),
        ("[sampling]\ntemperature = 'hot'", r"run\.toml: \[sampling\]: temperature is 'hot'; it must be a number$"),
        ("[sampling]\nstop_token_ids = ['a']", r"stop_token_ids is \['a'\]; it must be a list of integers"),
        ("[sampling]\nseed = 'x'", "seed is 'x'; it must be an integer or None"),
        ("[sampling]\nextra = 'x'", "extra is 'x'; it must be a table"),
        ("[run]\ngroups = 0", r"\[run\]: groups is 0; it must be at least 1"),
        ("[run]\nn = 0", r"n is 0; it must be at least 1"),
        ("[run]\nin_flight = 0", "in_flight is 0"),
        ("[run]\ndisk_bytes_max = 0", "disk_bytes_max is 0; it must be at least 1"),
        ("[run]\ndisk_free_min_bytes = 0", "disk_free_min_bytes is 0"),
        ("[run]\ngrace_s = -1.0", "grace_s is -1.0"),
        ("[run]\ngrace_s = inf", "grace_s is inf; it must be finite and at least 0"),
        ("[sampling]\ntop_k = 3", r"\[sampling\] has no setting 'top_k'"),
        ("[sampling]\ntemperature = -1.0", "temperature is -1.0"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_table(tmp_path, text, shown):
    with pytest.raises(BadSettings, match=shown):
        settings(tmp_path, text)


@pytest.mark.parametrize("text", ["[run", b"\xff = 1"])
def test_what_is_no_toml_is_refused(tmp_path, text):
    with pytest.raises(BadInput, match=r"run\.toml is not TOML"):
        settings(tmp_path, text)


def test_a_settings_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none\.toml: the settings file can't be read: No such file"):
        read_settings(tmp_path / "none.toml")


# Flags -----------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_key_by_key(tmp_path):
    found = settings(tmp_path, "[rules]\nlag_max = 2\nfilter_metric = 'acc'")

    assert merged_rules(found, ["lag_max=3"]) == Rules(lag_max=3, filter_metric="acc")


def test_a_value_is_toml_where_it_can_be_and_else_a_string():
    flags = ["a=1", "b = 0.5", "c=true", "d=word", "e=[1, 2]", "f=", "g=x=y"]

    assert parsed_assignments(flags, "--rules") == {
        "a": 1, "b": 0.5, "c": True, "d": "word", "e": [1, 2], "f": "", "g": "x=y",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["lag_max", "=3", " =3"])
def test_a_flag_that_is_no_assignment_is_named(flag):
    with pytest.raises(BadSettings, match=r"--rules '.*' must be key=value"):
        parsed_assignments([flag], "--rules")


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("lagmax=1", "--rules has no setting 'lagmax'; did you mean 'lag_max'"),
        ("lag_max=-1", "lag_max is -1"),
        ("admission=slots", r'admission is .slots.; it must be a table, \{ kind = "slots", n = ... \}'),
    ],
)
def test_a_flag_that_cannot_be_is_named(tmp_path, flag, shown):
    with pytest.raises(BadSettings, match=shown):
        merged_rules(settings(tmp_path, ""), [flag])


# Functions -------------------------------------------------------------------------------------------

MODULE = """
import helper_beside_it
async def session(ctx): ...
def plain(ctx): ...
class Callable:
    async def __call__(self, ctx): ...
ready = Callable()
number = 3
def _private(): ...
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with functions, beside a module that it imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(MODULE)
    (tmp_path / "sub" / "helper_beside_it.py").write_text("x = 1")
    (tmp_path / "here_module_of_tests.py").write_text("async def session(ctx): ...\nclass K:\n    def deep(self): ...")
    (tmp_path / "broken_module_of_tests.py").write_text("1 / 0")
    (tmp_path / "lacks_module_of_tests.py").write_text("import surely_not_installed")
    (tmp_path / "empty_module_of_tests.py").write_text("")
    yield "sub/mine.py"
    for name in list(sys.modules):
        if name.endswith("_of_tests") or name == "helper_beside_it":
            del sys.modules[name]


def test_a_function_comes_from_a_file_with_what_lies_beside_it(file):
    for _ in range(2):
        assert load_function(f"{file}:plain", "--reward").__name__ == "plain"


def test_a_function_comes_from_a_module_in_the_current_directory(file):
    for _ in range(2):
        assert load_session("here_module_of_tests:session", "--session").__name__ == "session"
    assert load_function("here_module_of_tests:K.deep", "--reward").__name__ == "deep"


def test_a_function_comes_from_an_installed_module(file):
    assert load_function("json:dumps", "--reward")({}) == "{}"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("json", "must be module:function"),
        (":dumps", "must be module:function"),
        ("json:", "must be module:function"),
        ("none.py:session", "there is no file none.py"),
        ("no_such_module_anywhere:f", "there is no module 'no_such_module_anywhere'"),
        ("no_such_package.inside:f", r"there is no module 'no_such_package' \(from 'no_such_package.inside'\)"),
        ("broken_module_of_tests:f", "importing broken_module_of_tests failed: ZeroDivisionError"),
        ("lacks_module_of_tests:f", "importing lacks_module_of_tests failed: ModuleNotFoundError"),
        ("broken_module_of_tests.py:f", "broken_module_of_tests.py can't be run: ZeroDivisionError"),
        ("sub/mine.py:sesion", "has no 'sesion'; did you mean 'session'"),
        ("sub/mine.py:zzz", "it has 'Callable', 'plain', 'ready', 'session'"),
        ("empty_module_of_tests.py:zzz", "it has no functions"),
        ("sub/mine.py:number", "is int, not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(file, name, shown):
    with pytest.raises(BadInput, match=shown) as caught:
        load_function(name, "--session")
    assert str(caught.value).startswith("--session")


def test_a_session_must_be_async(file):
    assert load_session(f"{file}:ready", "--session")
    with pytest.raises(BadInput, match=r"is not async; write: async def plain\(ctx\)"):
        load_session(f"{file}:plain", "--session")
    with pytest.raises(BadInput, match=r"^--session: sub/mine.py:Callable is a class; give an object of it"):
        load_session(f"{file}:Callable", "--session")
