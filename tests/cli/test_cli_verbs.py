"""What the verbs print, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_boxes import DEADLINE_S, Box, clean_environment, cli, descendants, gone, start, wait_until


def on(box: Box, *words: str, **how: object) -> subprocess.CompletedProcess[str]:
    return cli(*words, "--run-dir", str(box.run_dir), **how)


def shown(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- a box that runs -------------------------------------------------------------------------------------------------


def test_the_ready_line(cli_box: Box) -> None:
    said = cli_box.out.read_text()
    assert said == f"lumenbox ready http://127.0.0.1:{cli_box.port} workers=2/2 model=tiny-random\n"


def test_status(cli_box: Box) -> None:
    document = json.loads(shown(on(cli_box, "status", "--json")))
    assert document["schema"] == 1 and document["state"] == "ready" and document["exact"] is True
    assert document["pid"] == cli_box.pid and document["endpoint"].endswith(str(cli_box.port))
    names = "id state pid incarnation device running waiting pages_used pages_cached pages_total restarts step_ms"
    assert set(names.split()) <= set(document["workers"][0])
    assert {"aborts", "generated_tokens", "worker_deaths"} <= set(document["counters"])
    table = shown(on(cli_box, "status"))
    assert len(re.findall(r"^ +[01]  ready", table, re.MULTILINE)) == 2 and "\x1b" not in table


def test_status_check_tells_a_degraded_box(cli_box: Box) -> None:
    assert on(cli_box, "status", "--check").returncode == 0
    assert on(cli_box, "drain", "1").returncode == 0
    assert on(cli_box, "status", "--check").returncode == 4
    assert on(cli_box, "resume", "1").returncode == 0
    assert on(cli_box, "status", "--check").returncode == 0


def test_events_reports_and_logs(cli_box: Box) -> None:
    assert on(cli_box, "report", "4711").returncode == 1
    assert on(cli_box, "chaos", "kill", "0").returncode == 0
    cli_box.whole()
    lines = [json.loads(line) for line in shown(on(cli_box, "events", "--json")).splitlines()]
    assert [event["seq"] for event in lines] == sorted({event["seq"] for event in lines})
    kinds = [event["kind"] for event in lines]
    assert kinds.index("worker_ready") < kinds.index("chaos") and {"worker_dead", "recovery"} <= set(kinds)
    later = shown(on(cli_box, "events", "--json", "--since", str(lines[-2]["seq"])))
    assert [json.loads(line)["seq"] for line in later.splitlines()] == [lines[-1]["seq"]]
    assert len(shown(on(cli_box, "events")).splitlines()) == len(lines)
    report = json.loads(shown(on(cli_box, "report", "--json")))
    assert report["worker"] == 0 and report["cause"] == "signal" and report["requests"] == []
    assert shown(on(cli_box, "report", "last")).startswith(f"recovery {report['id']}: worker 0 (signal)")
    assert "worker 0 ready" in shown(on(cli_box, "logs"))
    assert on(cli_box, "logs", "--worker", "0").returncode == 0
    assert on(cli_box, "logs", "--worker", "9").returncode == 3


def test_events_can_be_followed(cli_box: Box, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-m", "lumenbox", "events", "-f", "--json", "--since", str(cli_box.seq())]
    follower = start([*command, "--run-dir", str(cli_box.run_dir)], out, err)
    try:
        assert on(cli_box, "restart", "1").returncode == 0
        wait_until(lambda: b"worker_ready" in out.read_bytes(), "the followed event")
    finally:
        follower.send_signal(signal.SIGINT)
        assert follower.wait(DEADLINE_S) == 130
    assert "Traceback" not in err.read_text()


def test_chat(cli_box: Box) -> None:
    key = {"LUMENBOX_API_KEY": "sesame"}
    words = ("chat", "hello", "--max-tokens", "12", "--temperature", "0")
    once = shown(on(cli_box, *words, env=key))
    assert len(once) > 12 and once == shown(on(cli_box, *words, "--api-key", "sesame"))
    refused = on(cli_box, *words)
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    wrong = on(cli_box, "chat", "hello", "--model", "nobody", env=key)
    assert wrong.returncode == 1 and "nobody" in wrong.stderr


def test_a_conversation_goes_on(cli_box: Box) -> None:
    """The key is needed for its second line as well."""
    done = on(cli_box, "chat", "--max-tokens", "8", input="hello\nand more\n", env={"LUMENBOX_API_KEY": "sesame"})
    assert len(shown(done).splitlines()) == 2


# -- no box ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("down",),
        ("events",),
        ("report",),
        ("chat", "x"),
        ("drain", "0"),
        ("chaos", "kill", "0"),
        ("logs",),
    ],
    ids=lambda words: words[0],
)
def test_without_a_box_every_verb_exits_3(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = cli(*words, "--run-dir", str(tmp_path / "none"))
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("up", "--no-such-flag"),
        ("up", "--workers", "0"),
        ("up", "--workers", "many"),
        ("up", "--port", "70000"),
        ("up", "--recovery", "prayer"),
        ("up", "--kv-cache-memory", "much"),
        ("up", "a", "b"),
        ("frobnicate",),
        ("drain",),
        ("status", "--now"),
        ("upgrade", "--env", "novalue"),
        ("bench", "chaos", "--faults", "meteor"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = cli(*words, env={"LUMENBOX_RUN_DIR": str(tmp_path)})
    assert done.returncode == 2 and "Usage:" in done.stderr and "Traceback" not in done.stderr


def test_help_is_quick_and_free_of_torch() -> None:
    code = (
        "import resource, sys\nfrom lumenbox.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as stop: assert not stop.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert "Commands:" in runs[0].stdout
    assert {run.stderr.split()[1] for run in runs} == {"False"}
    assert min(float(run.stderr.split()[0]) for run in runs) < 0.3


# -- detached --------------------------------------------------------------------------------------------------------


def test_detached_it_returns_when_ready_and_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    up = ("up", "tiny-random", "-d", "--port", "0", "--workers", "1", "--run-dir", str(run_dir))
    said = shown(cli(*up))
    assert re.fullmatch(r"lumenbox ready http://127\.0\.0\.1:\d+ workers=1/1 model=tiny-random\n", said)
    pid = json.loads(shown(cli("status", "--json", "--run-dir", str(run_dir))))["pid"]
    try:
        again = cli(*up)
        assert again.returncode == 1 and "lumenbox down" in again.stderr.splitlines()[-1]
        assert os.getsid(pid) != os.getsid(0), "it does not end with the terminal"
    finally:
        pids = {pid, *descendants(pid)}
        assert cli("down", "--run-dir", str(run_dir)).returncode == 0
    assert gone(pids)


def test_what_is_not_ready_in_time_exits_5(tmp_path: Path) -> None:
    for flags in ((), ("-d",)):
        up = ("up", "tiny-random", *flags, "--wait", "0.01", "--port", "0", "--run-dir", str(tmp_path / "run"))
        done = cli(*up)
        assert done.returncode == 5, (flags, done.returncode, done.stderr)
        assert "not ready within" in done.stderr.splitlines()[-1] and not done.stdout


# -- where a setting comes from --------------------------------------------------------------------------------------


def configuration(cwd: Path, *flags: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """What `up` would run with, found without running it: each flag as the command line resolves it."""
    code = (
        "import json, sys, lumenbox.cli.settings as s, lumenbox.cli.serve as serve, dataclasses\n"
        "serve.serve = lambda config, wait_s, show: print(json.dumps(dataclasses.asdict(config), default=str)) or 0\n"
        "from lumenbox.cli import main\nmain(['up', '--no-tui', *sys.argv[1:]])\n"
    )
    more = {"XDG_CONFIG_HOME": str(cwd / "config"), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean_environment(more),
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values: dict[str, str] = json.loads(done.stdout)
    return values


@pytest.mark.parametrize(
    ("flag", "name", "values"),
    [
        ("workers", "workers", (3, 4, 5)),
        ("port", "port", (8101, 8102, 8103)),
        ("run-dir", "run_dir", ("/tmp/file", "/tmp/environment", "/tmp/flag")),
        ("served-model-name", "served_name", ("file", "environment", "flag")),
        ("kv-cache-memory", "kv_bytes", ("1GiB", "2GiB", "3GiB")),
        ("max-queue", "max_queue", (7, 8, 9)),
        ("drain-timeout", "drain_timeout_s", (1.5, 2.5, 3.5)),
        ("recovery", "recovery", ("none", "restart", "box")),
        ("exact", "exact", ("off", "on", "auto")),
        ("seed", "seed", (1, 2, 3)),
    ],
)
def test_the_command_line_wins_then_the_environment_then_the_file(
    tmp_path: Path, flag: str, name: str, values: tuple[object, object, object]
) -> None:
    in_file, in_environment, in_flag = values
    (tmp_path / "lumenbox.toml").write_text(f"{flag} = {json.dumps(in_file)}\n")
    variable = {"LUMENBOX_" + flag.upper().replace("-", "_"): str(in_environment)}
    read = [
        configuration(tmp_path)[name],
        configuration(tmp_path, env=variable)[name],
        configuration(tmp_path, f"--{flag}", str(in_flag), env=variable)[name],
    ]
    assert read == [as_kept(value) for value in values]


def as_kept(value: object) -> object:
    return int(str(value)[:-3]) << 30 if str(value).endswith("GiB") else value


def test_flags_without_a_value_and_lists(tmp_path: Path) -> None:
    (tmp_path / "lumenbox.toml").write_text('no-respawn = true\napi-key = ["one", "two"]\nwait = 5\n')
    from_file = configuration(tmp_path)
    assert from_file["respawn"] is False and from_file["api_keys"] == ["one", "two"]
    (tmp_path / "lumenbox.toml").unlink()
    assert configuration(tmp_path, env={"LUMENBOX_NO_RESPAWN": "1"})["respawn"] is False
    assert configuration(tmp_path)["respawn"] is True
    assert configuration(tmp_path, env={"LUMENBOX_API_KEY": "one two"})["api_keys"] == ["one", "two"]


def test_the_user_file_counts_where_there_is_none_here(tmp_path: Path) -> None:
    home = tmp_path / "config" / "lumenbox"
    home.mkdir(parents=True)
    (home / "lumenbox.toml").write_text("workers = 6\n")
    assert configuration(tmp_path)["workers"] == 6
    (tmp_path / "lumenbox.toml").write_text("workers = 7\n")
    assert configuration(tmp_path)["workers"] == 7


@pytest.mark.parametrize("text", ["wrokers = 3\n", "detach = true\n", "workers = \n", "workers = 0\n"])
def test_a_wrong_file_exits_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "lumenbox.toml").write_text(text)
    done = cli("up", "tiny-random", "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_faults_beside_a_key_need_permission(tmp_path: Path) -> None:
    fault = {"LUMENBOX_FAULT": "die_at:page_taken"}
    up = ("up", "tiny-random", "--port", "0", "--run-dir", str(tmp_path))
    refused = cli(*up, "--api-key", "k", env=fault)
    assert refused.returncode == 1 and "--chaos-env" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("fault", ["die_of:boredom", "die_at:nowhere", "die_at:page_taken:x", "slow_step:0", "die_at"])
def test_a_misprinted_fault_is_refused(tmp_path: Path, fault: str) -> None:
    done = cli("up", "tiny-random", "--port", "0", "--run-dir", str(tmp_path), env={"LUMENBOX_FAULT": fault})
    assert done.returncode == 2 and fault in done.stderr


# -- the experiment must be able to fail -----------------------------------------------------------------------------


def document(**found: object) -> dict[str, object]:
    zeros = {"failed": 0, "lost_tokens": 0, "duplicated_tokens": 0, "different_tokens": 0}
    return {"faults": {"done": 3, "verified": 3}, "streams": 9, "interrupted": 4, **zeros, **found}


@pytest.mark.parametrize(
    ("found", "exact", "code"),
    [
        ({}, "on", 0),
        ({"interrupted": 0}, "on", 1),
        ({"faults": {"done": 3, "verified": 2}}, "on", 1),
        ({"different_tokens": 1}, "on", 1),
        ({"different_tokens": 1}, "off", 0),
        ({"lost_tokens": 1}, "off", 1),
        ({"failed": 1}, "on", 1),
    ],
)
def test_bench_chaos_exits_1_when_nothing_or_the_contrary_is_proved(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, object], exact: str, code: int
) -> None:
    from click.testing import CliRunner

    from lumenbox.bench import chaos
    from lumenbox.cli import main

    monkeypatch.setattr(chaos, "run", lambda plan, peer: document(**found))
    result = CliRunner().invoke(main, ["bench", "chaos", "--exact", exact, "--json"])
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout)["streams"] == 9
    assert len(result.stderr.splitlines()) == code
