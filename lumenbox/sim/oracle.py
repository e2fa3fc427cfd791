"""What must be true: the answer that each client would have had without failures, and who may end otherwise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lumenbox.core.commands import EndStream
from lumenbox.core.ledger import Gain, Ledger
from lumenbox.core.requests import Sampled
from lumenbox.core.state import CoreState, WorkerPhase
from lumenbox.sim.kv import VOCABULARY, draw, value
from lumenbox.sim.scenario import Call

DEATHS_PER_POISON = 2


@dataclass(slots=True)
class Answer:
    """A whole answer, or as much of it as a client has."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    generated: int = 0


def failure_free(call: Call, prompt: list[int], choice: int, max_model_len: int) -> Answer:
    """The answer of a box on which nothing goes wrong: one sequence, all its KV, token by token."""
    params, ledger, answer = call.params, Ledger(VOCABULARY), Answer()
    params = type(params)(**{f: getattr(params, f) for f in params.__struct_fields__} | {"choice": choice})
    ledger.open(0, params, prompt, call.stop, call.include_stop)
    tokens, values = list(prompt), list[int]()
    while answer.finish_reason is None:
        for token in tokens[len(values) :]:
            values.append(value(token, values))
        generated = len(tokens) - len(prompt)
        tokens.append(draw(params, generated, values))
        reason = None
        if tokens[-1] in params.end_ids:
            reason = "stop"
        elif generated + 1 >= params.max_tokens or len(tokens) >= max_model_len:
            reason = "length"
        gain = ledger.extend(0, 0, [Sampled(tokens[-1])], reason)
        assert gain is not None
        answer.text += gain.text
        answer.tokens += [drawn.token for drawn in gain.tokens]
        answer.finish_reason, answer.generated = gain.finish_reason, generated + 1
    return answer


class Client:
    """One choice of a call, as its client sees it. `end`: finished, failed, refused, left; "" while it is open."""

    def __init__(self, rid: int, call: Call, expected: Answer) -> None:
        self.rid, self.call = rid, call
        self.expected, self.got = expected, Answer()
        self.end = ""
        self.deaths_seen = 0
        """Own-making deaths of the worker that owned it."""

    def gained(self, gain: Gain, generated: int) -> None:
        """News: in order, once each, and never anything that the failure-free run would not have."""
        assert not self.end, f"request {self.rid} gets news after its end ({self.end})"
        assert not self.call.poison, f"request {self.rid} is poison and got an answer"
        got, expected = self.got, self.expected
        at, tokens = len(got.tokens), [drawn.token for drawn in gain.tokens]
        assert tokens == expected.tokens[at : at + len(tokens)], f"request {self.rid}: other tokens from {at} on"
        got.tokens += tokens
        assert expected.text.startswith(gain.text, len(got.text)), f"request {self.rid}: other text"
        got.text += gain.text
        if gain.finish_reason is not None:
            got.finish_reason, got.generated = gain.finish_reason, generated
            assert got == expected, f"request {self.rid} ends as {got}, not {expected}"
            self.ended("finished")

    def ended(self, how: str) -> None:
        """Exactly once."""
        assert not self.end, f"request {self.rid} ends twice: {self.end}, {how}"
        self.end = how


class Oracle:
    """Watches ends and deaths."""

    def __init__(self) -> None:
        self.clients: dict[int, Client] = {}
        self._killed_by: Counter[int] = Counter()

    def died_by(self, rid: int) -> None:
        """A poison request ended a worker: it may not do so more than twice."""
        self._killed_by[rid] += 1
        assert self._killed_by[rid] <= DEATHS_PER_POISON, f"request {rid} cost {self._killed_by[rid]} deaths"

    def settled(self, owned: list[int], are_suspect: bool) -> None:
        """A worker that owned these died; they are suspect if it died of its own making and could have begun them."""
        for rid in owned:
            self.clients[rid].deaths_seen += are_suspect

    def failed(self, command: EndStream, state: CoreState) -> None:
        """An error is right for a twice-suspect, without recovery, or when no worker is left."""
        if command.code == "worker_died":
            assert self.clients[command.req].deaths_seen >= DEATHS_PER_POISON, f"request {command.req} is innocent"
        else:
            assert state.config.recovery == "none" or not hope(state), f"request {command.req} could have gone on"
        self.clients[command.req].ended("failed")


def hope(state: CoreState) -> bool:
    """Whether some slot serves or will serve again by itself."""
    lost = {WorkerPhase.QUARANTINED, WorkerPhase.STOPPED, WorkerPhase.DRAINING, WorkerPhase.DRAINED}
    lost |= set() if state.config.respawn else {WorkerPhase.DEAD}
    return any(worker.phase not in lost for worker in state.workers.values())
