"""Times of requests that share an engine, against a simulation of its steps one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from rooftrace.studies.solving.candidates import closed_loop

VARIATION = 0.2 / 12**0.5 / 0.9  # deviation over mean of lengths drawn from 80 to 100 %


@dataclass
class Request:
    sent: float
    prompt: float  # of which the mean is 1
    left: int
    client: int
    tokens: int = 0
    first: float = 0.0


@dataclass
class Engine:
    """Steps of an engine, each of them scheduled while the one before runs."""

    step: float
    prefill: float
    clients: int
    tokens: int
    rounds: int
    together: float
    held: int
    host: float = 0.0  # of a step with prompts, however many
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)

    def request(self, now: float, client: int) -> Request:
        prompt, tokens = (self.draw.uniform(0.8, 1.0) / 0.9 for _ in range(2))
        count = round(self.tokens * tokens)
        return Request(now, prompt, count, client, count)

    def run(self) -> None:
        now, waited = 0.0, 0
        to_send = [self.rounds - 1] * self.clients
        queue = [self.request(0.0, client) for client in range(self.clients)]
        sent: list[Request] = []
        running: list[Request] = []
        while queue or running or sent:
            room, ready = self.together, []
            if queue and running and waited < self.held:
                waited += 1
            elif queue:
                waited = 0
                while queue and room > 0:
                    part = min(room, queue[0].prompt)
                    room, queue[0].prompt = room - part, queue[0].prompt - part
                    if queue[0].prompt == 0:
                        ready.append(queue.pop(0))
            taken = self.together - room
            now += self.step + max(self.host * (taken > 0), self.prefill * taken)
            queue, sent = queue + sent, []
            for request in running:
                request.left -= 1
                if request.left == 0:
                    self.each.append((now - request.first) / (request.tokens - 1))
                    if to_send[request.client]:
                        to_send[request.client] -= 1
                        sent.append(self.request(now, request.client))
            running = [request for request in running if request.left]
            for request in ready:
                self.first.append(now - request.sent)
                request.first, request.left = now, request.left - 1
            running += ready


CASES = [(0.01, 0.04, 4, 8), (0.01, 0.28, 32, 1), (0.02, 0.8, 16, 1), (0.01, 0.04, 64, 8)]


@pytest.mark.parametrize("held", [0, 20])
@pytest.mark.parametrize(("step", "prefill", "clients", "together"), CASES)
def test_clients_that_start_at_once(
    step: float, prefill: float, clients: int, together: int, held: int
) -> None:
    together = 16 if held else together  # they are held back to be taken together
    engine = Engine(step, prefill, clients, 400, 10, together, held)
    engine.run()
    token, wait = closed_loop(
        step, prefill, clients, 400, rounds=10, spread=VARIATION, together=together, held=held
    )
    assert token == pytest.approx(sum(engine.each) / len(engine.each), rel=0.05)
    first = sum(engine.first) / len(engine.first)
    assert wait + prefill == pytest.approx(first, rel=0.08)


@pytest.mark.parametrize("held", [0, 20])
@pytest.mark.parametrize("clients", [4, 16, 64])
def test_prompts_of_a_step_share_the_launches(clients: int, held: int) -> None:
    engine = Engine(0.01, 0.03, clients, 400, 10, 16, held, host=0.12)
    engine.run()
    token, wait = closed_loop(
        0.01, 0.12, clients, 400, rounds=10, spread=VARIATION, together=16, held=held,
        filled=lambda prompts: np.maximum(0.12, 0.03 * prompts),
    )  # fmt: skip
    assert token == pytest.approx(sum(engine.each) / len(engine.each), rel=0.05)
    assert wait + 0.12 == pytest.approx(sum(engine.first) / len(engine.first), rel=0.08)


@pytest.mark.parametrize(("step", "prefill", "clients", "together"), CASES)
def test_the_steady_state(step: float, prefill: float, clients: int, together: int) -> None:
    engine = Engine(step, prefill, clients, 200, 60, together, 0)
    engine.run()
    token, wait = closed_loop(step, prefill, clients, 200)
    later = len(engine.first) // 2
    assert token == pytest.approx(sum(engine.each[later:]) / later, rel=0.05)
    assert wait + prefill == pytest.approx(sum(engine.first[later:]) / later, rel=0.08)


def test_one_client_waits_for_nobody() -> None:
    token, wait = closed_loop(0.01, 0.5, 1, 100)
    assert (token, wait) == (0.01, 0.02)  # the step that runs already, and its own
