"""`groupstate run`, as it is typed."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from groupstate.cli.collecting import run as command

SCORING = Path(__file__).with_name("scoring.py")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_prompts(tmp_path / "p.jsonl", 20)


def write_prompts(path: Path, count: int) -> None:
    rows = ({"prompt": f"question {i}", "group_id": f"p{i}", "answer": i} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def collect(*more: str, session: str = "session", prompts: str = "p.jsonl") -> Result:
    return invoke(
        "--prompts",
        prompts,
        "--session",
        f"{SCORING}:{session}",
        "--out",
        "out.jsonl",
        "--run",
        "run",
        "--n",
        "2",
        *more,
    )


def collect_scored(*more: str, reward: str = "async_reward", engine: str = "scoring:make_echo") -> Result:
    sys.path.insert(0, str(SCORING.parent))
    return invoke(
        *("--prompts", "p.jsonl", "--reward", f"scoring:{reward}", "--engine", engine, "--n", "2"),
        *("--out", "out.jsonl", "--run", "run", *more),
    )


def rows(path: str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# What works ------------------------------------------------------------------------------------------


def test_a_session_function_is_enough():
    result = collect("--groups", "3")

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 groups, 6 rows in out.jsonl")
    assert len(rows()) == 6


def test_a_reward_function_and_an_engine():
    result = collect_scored("--groups", "3", "--rules", "filter_metric=length", "--engine-option", "length=12")

    assert result.exit_code == 0, result.output
    assert {"reward", "length"} == set(rows()[0]["metrics"])


def test_an_engine_takes_options():
    result = collect_scored("--groups", "2", "--engine-option", "length=2")

    assert result.exit_code == 0, result.output
    assert {len(row["response"]) for row in rows()} == {1}


def test_an_engine_may_be_made_asynchronously():
    assert collect_scored("--groups", "2", engine="scoring:make_echo_async").exit_code == 0


def test_everything_can_stand_in_a_file():
    Path("run.toml").write_text(
        f"""
[run]
prompts = "p.jsonl"
reward = "{SCORING}:async_reward"
out = "out.jsonl"
run = "runs/x"
groups = 4
n = 3
in_flight = 2

[rules]
filter_metric = "length"
tolerance = 0.5

[engine]
name = "scoring:make_echo"
length = 30

[sampling]
max_tokens = 12
temperature = 0.5
"""
    )
    sys.path.insert(0, str(SCORING.parent))
    result = invoke("--config", "run.toml", "--groups", "2")

    assert result.exit_code == 0, result.output
    assert len(rows()) == 6


def test_prompts_that_run_out_say_so():
    result = collect("--groups", "50")

    assert result.exit_code == 3
    assert "the prompts ran out: 20 groups, 40 rows in out.jsonl; 50 were wanted" in result.stderr
    assert len(rows()) == 40


def test_without_a_number_all_prompts_are_taken():
    assert collect().exit_code == 0
    assert len(rows()) == 40


def test_failures_are_counted_with_the_last_one():
    result = collect_scored("--groups", "2", reward="broken_reward")

    assert result.exit_code == 3
    assert "40 sessions failed, the last: KeyError: 'answer'" in result.stderr


def test_progress_stands_on_standard_error(monkeypatch):
    monkeypatch.setattr("groupstate.cli.collecting.PROGRESS_EVERY_S", 0.0)
    result = collect("--groups", "3")

    assert "1 of 3 groups accepted" in result.stderr
    assert result.stdout.count("\n") == 1


def test_a_terminal_gets_a_bar(monkeypatch):
    from groupstate.cli import collecting as cli_run
    from groupstate.collect import Progress

    with cli_run._bar() as report:
        report(Progress(1, 3, 2, 5, {"zero_variance": 1}, {"error": 1}, "ValueError: [/]"))


# The model file --------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path):
    torch = pytest.importorskip("torch")
    from groupstate.engines.transformer import Transformer, TransformerConfig

    alphabet = "questionabcdefghijklmnopqrstuvwxyz 0123456789"
    alphabet = "".join(dict.fromkeys(alphabet))
    config = TransformerConfig(vocabulary_size=3 + len(alphabet), width=16, layers=2, heads=2, context=24)
    torch.save(
        {"model": Transformer(config).state_dict(), "config": {"heads": 2}, "alphabet": alphabet}, tmp_path / "m.pt"
    )
    return "m.pt"


def test_a_model_file_generates(model_file):
    result = collect_scored("--model", model_file, "--groups", "2", "--max-tokens", "5", engine="torch")

    assert result.exit_code == 0, result.output
    assert len(rows()) == 4
    assert all(len(row["response_ids"]) == len(row["log_probs"]) <= 5 for row in rows())
    assert {row["prompt_ids"][0] for row in rows()} == {1}


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ({"weights": {}}, "no weights under 'model' or 'state_dict'; it has weights"),
        ({"model": {}}, "other weights than those of groupstate's transformer"),
        ([1], "holds list"),
    ],
)
def test_other_model_files_are_refused(saved, what):
    pytest.importorskip("torch").save(saved, "other.pt")
    result = collect_scored("--model", "other.pt", engine="torch")

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--model", "none.pt"], "none.pt: there is no such file"),
        (["--model", "p.jsonl"], "p.jsonl can't be loaded as weights"),
        ([], "needs a file of weights"),
        (["--engine-option", "slot_max=3"], "has no setting 'slot_max'; did you mean 'slots_max'?"),
    ],
)
def test_engine_options_that_cannot_be(options, what):
    pytest.importorskip("torch")
    result = collect_scored(*options, engine="torch")

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


# What is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--prompts", "none.jsonl"], "none.jsonl: there is no such file"),
        (["--prompts", "p.csv"], "a .jsonl or a .parquet file"),
        (["--config", "none.toml"], "none.toml: the settings file can't be read"),
        (["--rules", "filter_metrik=reward"], "--rules has no setting 'filter_metrik'; did you mean 'filter_metric'?"),
        (["--rules", "mode=sync"], "mode is 'sync'"),
        (["--rules", "lag_max"], "must be key=value"),
        (["--rules", "lag_max=much"], "lag_max"),
        (["--groups", "0"], "groups is 0"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--reward", "x:y"], "give --session or --reward: both are given"),
        (["--model", "x.pt"], "model given, but no engine"),
        (["--out", "no/where.jsonl"], "can't be written"),
    ],
)
def test_wrong_flags_are_named(arguments, what):
    result = collect(*arguments)

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("sesion", "has no 'sesion'; did you mean 'session'"),
        ("not_a_function", "is int, not a function"),
        ("reward", "is not async; write: async def reward(ctx)"),
    ],
)
def test_wrong_functions_are_named(name, what):
    result = collect(session=name)

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nowhere.mod:fn", "there is no module 'nowhere'"),
        ("json.nowhere:fn", "there is no module 'json.nowhere'"),
        ("none.py:fn", "there is no file none.py"),
        ("broken.py:fn", "broken.py can't be run: ZeroDivisionError"),
        ("lacks.py:fn", "lacks.py can't be run: ModuleNotFoundError"),
        ("plain", "must be module:function"),
    ],
)
def test_wrong_places_are_named(name, what):
    Path("broken.py").write_text("1 / 0\n")
    Path("lacks.py").write_text("import nothing_of_that_name\n")
    result = invoke("--prompts", "p.jsonl", "--session", name, "--out", "o.jsonl", "--run", "r")

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ("scoring:make_nothing", "gave NoneType, which has no generate()"),
        ("scoring:make_ecko", "did you mean 'make_echo'"),
    ],
)
def test_wrong_engines_are_named(engine, what):
    result = collect_scored(engine=engine)

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


def test_a_wrong_engine_argument_is_named():
    result = collect_scored("--engine-option", "width=3")

    assert (result.exit_code, "can't be called with {'width': 3}" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("missing", ["--prompts", "--out", "--run", "--session"])
def test_what_is_missing_is_named(missing):
    given = {"--prompts": "p.jsonl", "--out": "o.jsonl", "--run": "r", "--session": f"{SCORING}:session"}
    del given[missing]
    result = invoke(*(part for pair in given.items() for part in pair))

    assert (result.exit_code, missing in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[rule]", "bad.toml has no setting 'rule'; did you mean 'rules'?"),
        ("[run]\nprompt = 1", "bad.toml: [run] has no setting 'prompt'; did you mean 'prompts'?"),
        ("[run]\nn = 'many'", "bad.toml: [run]: n is 'many'; it must be an integer"),
        ("[rules]\nfilter = 'x'", "bad.toml: [rules] has no setting 'filter'"),
        ("[sampling]\nmax_token = 1", "bad.toml: [sampling] has no setting 'max_token'; did you mean 'max_tokens'?"),
        ("run = 3", "must be a table: [run]"),
        ("[run", "bad.toml is not TOML"),
    ],
)
def test_a_wrong_settings_file_is_named(text, what):
    Path("bad.toml").write_text(text)
    result = collect("--config", "bad.toml")

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"prompt": "a"}\nnonsense\n', "line 2 is not JSON"),
        (
            '{"prompt": "a", "group_id": "x"}\n{"prompt": "b", "group_id": "x"}\n',
            "group_id 'x' stands at 1 and again at 2",
        ),
        ('{"question": "a"}\n', "line 1 has no 'prompt'; it has 'question'"),
        ("", "it holds no prompts"),
    ],
)
def test_wrong_prompts_are_named(text, what):
    Path("bad.jsonl").write_text(text)
    result = collect(prompts="bad.jsonl")

    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr
    assert not Path("run").exists()


def test_a_run_that_is_there_needs_resume():
    assert collect("--groups", "2").exit_code == 0
    Path("out.jsonl").unlink()
    assert "pass --resume" in collect("--groups", "2").stderr
    assert collect("--groups", "4", "--resume").exit_code == 0
    assert len(rows()) == 8


def test_a_directory_that_cannot_be_written_is_an_error():
    result = collect("--run", "p.jsonl/run")

    assert result.exit_code == 1
    assert "can't be made a run" in result.stderr


# Signals ---------------------------------------------------------------------------------------------


def start(*more: str) -> subprocess.Popen[str]:
    program = "from groupstate.cli.collecting import run; run(prog_name='groupstate run')"
    arguments = ["--prompts", "p.jsonl", "--session", f"{SCORING}:slow_session", "--n", "2", "--in-flight", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--out", "out.jsonl", "--run", "run", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_work(seconds: float = 30.0) -> None:
    """Until the run's log has grown beyond its beginning."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(path.stat().st_size > 1_500 for path in Path("run/log").glob("*.seg")):
            return
        time.sleep(0.02)
    raise AssertionError("the run didn't begin")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_in_order_and_resume_goes_on(number, code):
    process = start()
    wait_for_work()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == code, errors
    assert "--resume goes on" in errors
    assert not Path("out.jsonl").exists()

    resumed = collect("--resume")
    assert resumed.exit_code == 0, resumed.output
    assert Counter(row["group_id"] for row in rows()) == {f"p{i}": 2 for i in range(20)}


def test_a_killed_run_is_resumed_without_doubles():
    process = start()
    wait_for_work()
    process.kill()
    process.communicate()
    assert Path(f".out.jsonl.{process.pid}.tmp").exists()
    resumed = collect("--resume")

    assert resumed.exit_code == 0, resumed.output
    assert list(Path().glob(".*.tmp")) == []
    assert Counter(row["group_id"] for row in rows()) == {f"p{i}": 2 for i in range(20)}


def test_a_run_in_use_is_refused():
    process = start()
    wait_for_work()
    second = collect("--resume", "--out", "other.jsonl")
    process.terminate()
    process.communicate(timeout=30)

    assert second.exit_code == 1, second.output
    assert str(process.pid) in second.stderr
