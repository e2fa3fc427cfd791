"""A few words in which a history of the core is told: an event a line, below it, indented, the commands that answer.

    box workers=2 recovery=box        the core to start with (before the first event)
    at 2.5                            from here on it is 2.5 s
    arrive 1,2 len=10 prio=1          a group of requests
    admitted w0 1 e0                  `w0` a worker, `e0` an epoch, `i1` an incarnation (else the worker's present one)
    settled w0 signal 1:12/8          request 1 has 12 tokens, KV for 8 of them; `own`, `lost` as the event has them
    step w0 1:3                       request 1 has 3 whole pages now
    sealed w0 1 e0 pages=3            and they are whole in the arena
    box budget=8 domains=0-1,2-3      KV checkpoints on budgets of so many pages; any field of CheckpointConfig

A slot is written as its number, with replicas as 3+7; `restore 2/3` loads the first 2 of 3 slots.

An event without indented lines must be answered by nothing. `python story.py FILE…` writes the answers of the present
core into the files; read the difference before you believe it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumenbox.core import commands as c
from lumenbox.core import events as e
from lumenbox.core.machine import Core
from lumenbox.core.state import CheckpointConfig, CoreConfig

STORIES = Path(__file__).parent / "stories"
CONFIG = {"workers": 2, "page_size": 16, "max_queue": 8, "max_model_len": 4096, "recovery": "box", "respawn": 1}


@dataclass
class Story:
    title: str
    lines: list[str]

    def retold(self) -> list[str]:
        """The same events with the answers of the present core; its invariants are checked after each."""
        teller = Teller()
        out: list[str] = []
        for line in self.lines:
            if line.startswith(" "):
                continue
            out.append(line)
            if line and not line.startswith("#"):
                out += [f"    {answer}" for answer in teller.tell(line)]
        return out


def read(path: Path) -> list[Story]:
    stories: list[Story] = []
    for line in path.read_text().splitlines():
        if line.startswith("== "):
            stories.append(Story(line[3:], []))
        else:
            stories[-1].lines.append(line)
    return stories


def config_of(words: dict[str, Any]) -> CoreConfig:
    """From what stands behind `box`."""
    core = {key: value for key, value in words.items() if key in CONFIG}
    parts = {key: value for key, value in words.items() if key not in CONFIG}
    if "budget" in parts:
        parts["budget_pages"] = parts.pop("budget")
    if "domains" in parts:
        groups = [part.split("-") for part in parts.pop("domains").split(",")]
        parts["failure_domains"] = tuple(tuple(range(int(g[0]), int(g[-1]) + 1)) for g in groups)
    return CoreConfig(**CONFIG | core, checkpoints=CheckpointConfig(**parts))


class Teller:
    """Tells a core what a story's lines say."""

    def __init__(self) -> None:
        self.core = Core(CoreConfig(**CONFIG))
        self.now = 0.0

    def tell(self, line: str) -> list[str]:
        verb, *words = line.split()
        if verb == "box":
            self.core = Core(config_of(dict(map(_named, words))))
            return []
        if verb == "at":
            self.now = float(words[0])
            return []
        commands = self.core.handle(self._event(verb, words))
        self.core.check()
        return [written(command) for command in commands]

    def _event(self, verb: str, words: list[str]) -> e.AnyEvent:  # noqa: PLR0911, PLR0912 (one case a verb)
        named = {key: value for key, value in map(_named, words) if key}
        plain = [word for word in words if "=" not in word]
        numbers = [int(word) for word in plain if word.isdigit()]
        worker = _marked("w", plain)
        incarnation = _marked("i", plain)
        if worker >= 0 and incarnation < 0:
            incarnation = self.core.state.workers[worker].incarnation
        life = (self.now, worker, incarnation)
        match verb:
            case "arrive":
                reqs = [int(word) for word in words[0].split(",")]
                news = tuple(e.NewRequest(req, named.get("len", 10), named.get("max", 50)) for req in reqs)
                return e.RequestArrived(self.now, news, named.get("prio", 0))
            case "gone":
                return e.ClientGone(self.now, numbers[0])
            case "finished":
                return e.RequestFinished(self.now, numbers[0], 5)
            case "admitted":
                return e.Admitted(self.now, worker, numbers[0], _marked("e", plain), 0)
            case "moved":
                return e.MovedOut(self.now, worker, numbers[0], _marked("e", plain), named.get("tokens", 10))
            case "step":
                shape = (named.get("decodes", 1), named.get("prefill", 0), named.get("context", 0))
                crossings = tuple((int(r), int(p)) for r, p in re.findall(r"(\d+):(\d+)", " ".join(plain)))
                return e.StepCommitted(*life, 1, *shape, named.get("s", 0.01), named.get("free", 100), crossings)
            case "sealed":
                return e.PagesSealed(self.now, worker, ((numbers[0], _marked("e", plain), named["pages"]),))
            case "quiet":
                return e.SlotsQuiet(self.now, worker, numbers[0], _marked("e", plain))
            case "restored":
                cost = (named.get("bytes", 100), named.get("s", 0.01))
                return e.RestoreDone(self.now, worker, numbers[0], _marked("e", plain), named["pages"], *cost)
            case "ready":
                return e.WorkerReady(*life, named.get("pages", 100), "kept" in plain)
            case "exiting":
                return e.WorkerExiting(*life, "pidfd")
            case "overdue":
                return e.StepOverdue(*life, 1, 0.5)
            case "settled":
                interrupted = tuple(
                    e.Interrupted(*map(int, m)) for m in re.findall(r"(\d+):(\d+)/(\d+)", " ".join(plain))
                )
                return e.Settled(*life, plain[1], "own" in plain, "lost" in plain, interrupted)
            case "spawn-failed":
                return e.SpawnFailed(*life, "no memory")
            case "timer":
                return e.TimerFired(self.now, plain[0])
            case "drain" | "resume" | "restart" | "upgrade" | "shutdown":
                return e.OperatorAsked(self.now, verb, worker)
        raise ValueError(f"no such event: {verb}")


def _named(word: str) -> tuple[str, int | float | str]:
    key, _, value = word.partition("=")
    if not value:
        return "", ""
    return key, int(value) if value.isdigit() else float(value) if re.fullmatch(r"[\d.]+(e\d+)?", value) else value


def _marked(letter: str, words: list[str]) -> int:
    return next((int(word[1:]) for word in words if re.fullmatch(letter + r"\d+", word)), -1)


def written(command: c.AnyCommand) -> str:  # noqa: PLR0911, PLR0912 (one line a command)
    match command:
        case c.Refuse(reqs=reqs, code=code):
            return f"refuse {','.join(map(str, reqs))} {code}"
        case c.Assign(worker=worker, req=req, epoch=epoch, way=way, slots=slots, sealed=sealed):
            return f"assign {req} w{worker} e{epoch} {way}" + (f" {sealed}/{len(slots)}" if slots else "")
        case c.ReserveSlots(worker=worker, req=req, epoch=epoch, first=first, slots=slots):
            return f"reserve {req} w{worker} e{epoch} page {first}: {_slots(slots)}"
        case c.DropSlots(worker=worker, req=req, epoch=epoch):
            return f"drop-slots {req} w{worker} e{epoch}"
        case c.PreRestore(worker=worker, req=req, epoch=epoch, slots=slots):
            return f"pre-restore {req} w{worker} e{epoch}: {_slots(slots)}"
        case c.SetSealRate(worker=worker, bytes_s=bytes_s):
            return f"w{worker} seals " + ("freely" if bytes_s < 0 else f"{bytes_s:g} B/s" if bytes_s else "nothing")
        case c.Cancel(worker=worker, req=req, epoch=epoch):
            return f"cancel {req} w{worker} e{epoch}"
        case c.MoveOut(worker=worker, req=req, epoch=epoch):
            return f"move-out {req} w{worker} e{epoch}"
        case c.EndStream(req=req, code=code):
            return f"end {req} {code}"
        case c.Fence(worker=worker, incarnation=incarnation, cause=cause):
            return f"fence w{worker} i{incarnation} {cause}"
        case c.Spawn(worker=worker, incarnation=incarnation, keep_pool=keep_pool):
            return f"spawn w{worker} i{incarnation} {'on its pool' if keep_pool else 'afresh'}"
        case c.SetTimer(name=name, at=at):
            return f"timer {name} at {at:g}"
        case c.Changed(worker=worker, state=state, why=why):
            return f"w{worker} is {state}" + (f": {why}" if why else "")
        case c.Planned(worker=worker, incarnation=incarnation, cause=cause, strategy=strategy, ways=ways):
            told = "".join(f" {req}:{way}" + (f"@w{heir}" if heir >= 0 else "") for req, way, heir in ways)
            return f"plan w{worker} i{incarnation} {cause} {strategy}:{told or ' nobody'}"
        case c.Stays(req=req):
            return f"stays {req}"
        case c.Exit(code=code):
            return f"exit {code}"


def _slots(slots: tuple[tuple[int, ...], ...]) -> str:
    pages = ["+".join(map(str, page)) for page in slots]
    return " ".join(pages if len(pages) < 10 else [*pages[:3], "…", pages[-1]])


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        stories = read(path)
        text = "\n".join("\n".join([f"== {story.title}", *story.retold()]) for story in stories)
        path.write_text(text.rstrip("\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
