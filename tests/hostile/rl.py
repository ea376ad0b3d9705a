"""Reinforcement learning: distributions, samples, target networks, replay."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops


class ActorCritic(nn.Module):
    """A Gaussian policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(5, 9, 2), mlp(5, 11, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def policy(self, x: Tensor) -> Normal:
        return Normal(self.actor(x), self.log_std.exp())


@pattern(named=("value",))
def ppo_step() -> Case:
    """Several epochs over shuffled minibatches, with validated distributions and an early stop."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step(
        model: ActorCritic, optimizer: Any, x: Tensor, actions: Tensor, returns: Tensor
    ) -> float:
        with torch.no_grad():
            old = model.policy(x).log_prob(actions).sum(-1)
            advantage = returns - model.critic(x).squeeze(-1)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _epoch in range(3):
            for at in torch.randperm(len(x)).split(4):
                policy = model.policy(x[at])
                new = policy.log_prob(actions[at]).sum(-1)
                ratio = (new - old[at]).exp()
                clipped = ratio.clamp(0.8, 1.2) * advantage[at]
                loss = -torch.min(ratio * advantage[at], clipped).mean()
                loss = loss + F.mse_loss(model.critic(x[at]).squeeze(-1), returns[at])
                loss = loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            with torch.no_grad():
                gap = (old - model.policy(x).log_prob(actions).sum(-1)).mean().item()
            if gap > 0.5:
                break
        return gap

    data = torch.randn(10, 5), torch.randn(10, 2), torch.randn(10)
    return Case(step, (model, optimizer, *data))


@pattern
def dqn_step() -> Case:
    """A replay buffer of tuples is sampled by Python's random; a target network is copied over."""
    online = mlp(5, 9, 3)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    memory: deque[Any] = deque(maxlen=20)
    for i in range(15):
        memory.append((torch.randn(5), i % 3, float(i), torch.randn(5), i % 4 == 0))

    def step(model: nn.Module, target: nn.Module, optimizer: Any) -> float:
        batch = random.sample(memory, 7)
        s, a, r, n, d = (list(column) for column in zip(*batch, strict=True))
        s, n = torch.stack(s), torch.stack(n)
        q = model(s).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        with torch.no_grad():
            best = model(n).argmax(1, keepdim=True)
            follow = target(n).gather(1, best).squeeze(1)
        goal = torch.tensor(r) + 0.99 * follow * (1 - torch.tensor(d).float())
        loss = F.smooth_l1_loss(q, goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        target.load_state_dict(model.state_dict())
        return loss.item()

    total = mlp_flops(7, 5, 9, 3) + 2 * 2 * 7 * (45 + 27)
    return Case(step, (online, target, optimizer), expected=total)


@pattern
def sac_step() -> Case:
    """Two critics, their targets, a squashed policy by rsample, and a learned temperature."""
    actor, one, two = mlp(5, 9, 4), mlp(7, 11, 1), mlp(7, 13, 1)
    targets = nn.ModuleList([copy.deepcopy(one), copy.deepcopy(two)]).requires_grad_(False)
    log_alpha = torch.zeros((), requires_grad=True)
    model = nn.ModuleDict({"actor": actor, "one": one, "two": two, "targets": targets})
    critics = torch.optim.Adam([*one.parameters(), *two.parameters()], lr=1e-3)
    actors = torch.optim.Adam(actor.parameters(), lr=1e-3)
    alphas = torch.optim.Adam([log_alpha], lr=1e-3)

    def act(actor: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(x).chunk(2, -1)
        policy = TransformedDistribution(
            Independent(Normal(mean, log_std.clamp(-5, 2).exp()), 1), TanhTransform(cache_size=1)
        )
        action = policy.rsample()
        return action, policy.log_prob(action)

    def step(model: nn.Module, x: Tensor, a: Tensor, r: Tensor, n: Tensor) -> float:
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = act(model["actor"], n)
            pair = torch.cat([n, action], -1)
            follow = torch.min(*[t(pair).squeeze(-1) for t in model["targets"]])
            goal = r + 0.99 * (follow - alpha * log_prob)
        pair = torch.cat([x, a], -1)
        loss = sum(F.mse_loss(model[k](pair).squeeze(-1), goal) for k in ("one", "two"))
        critics.zero_grad()
        loss.backward()
        critics.step()
        action, log_prob = act(model["actor"], x)
        pair = torch.cat([x, action], -1)
        best = torch.min(model["one"](pair), model["two"](pair)).squeeze(-1)
        loss = (alpha * log_prob - best).mean()
        actors.zero_grad()
        loss.backward()
        actors.step()
        alphas.zero_grad()
        (-log_alpha.exp() * (log_prob.detach() + 2)).mean().backward()
        alphas.step()
        with torch.no_grad():
            for target, name in zip(model["targets"], ("one", "two"), strict=True):
                for slow, fast in zip(target.parameters(), model[name].parameters(), strict=True):
                    slow.lerp_(fast, 0.005)
        return log_alpha.exp().item()

    data = torch.randn(8, 5), torch.rand(8, 2), torch.randn(8), torch.randn(8, 5)
    return Case(step, (model, *data))


@pattern(named=("value", "branch", "routing"))
def reinforce_in_an_environment() -> Case:
    """An episode ends when a sampled action says so; then its loss runs over all its steps."""
    model = mlp(4, 7, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: Any, state: Tensor) -> float:
        logs, rewards = [], []
        for _ in range(12):
            policy = Categorical(logits=model(state))
            action = policy.sample()
            logs.append(policy.log_prob(action))
            if action.item() == 2:
                break
            state = state.roll(int(action) + 1) * 0.9
            rewards.append(state[0].item())
        running, returns = 0.0, []
        for reward in reversed(rewards):
            running = reward + 0.9 * running
            returns.insert(0, running)
        if returns:
            loss = -(torch.stack(logs[: len(returns)]) * torch.tensor(returns)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return running

    return Case(step, (model, optimizer, torch.randn(4)))


@pattern
def advantages_in_a_loop() -> Case:
    """GAE runs backwards in time with masks of Python bools, between two forwards."""
    model = ActorCritic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: ActorCritic, optimizer: Any, x: Tensor, r: Tensor, done: Tensor) -> Tensor:
        with torch.no_grad():
            values = model.critic(x).squeeze(-1)
        advantage, last = torch.zeros_like(r), 0.0
        for t in reversed(range(len(r))):
            follow = 0.0 if done[t] or t == len(r) - 1 else values[t + 1]
            delta = r[t] + 0.99 * follow - values[t]
            last = delta + (0.0 if done[t] else 0.95 * 0.99 * last)
            advantage[t] = last
        policy = Categorical(logits=model.actor(x))
        loss = -(policy.log_prob(policy.sample()) * advantage).mean()
        loss = loss + F.mse_loss(model.critic(x).squeeze(-1), advantage + values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = torch.randn(9, 5), torch.randn(9), torch.tensor([False, True] * 4 + [True])
    total = 2 * 9 * 66 + mlp_flops(9, 5, 9, 2) + mlp_flops(9, 5, 11, 1)
    return Case(step, (model, optimizer, *data), expected=total)


class World(nn.Module):
    """A recurrent state-space model with a prior, a posterior and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 7)
        self.prior, self.posterior = nn.Linear(7, 6), nn.Linear(11, 6)
        self.decoder = nn.Linear(10, 4)


@pattern
def world_model_scan() -> Case:
    """Latents are sampled by rsample in a loop over time; a KL of two Normals is clamped."""
    model = World()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def normal(out: Tensor) -> Normal:
        mean, std = out.chunk(2, -1)
        return Normal(mean, F.softplus(std) + 0.1)

    def step(model: World, optimizer: Any, x: Tensor, actions: Tensor) -> Tensor:
        h, z = torch.zeros(x.shape[1], 7), torch.zeros(x.shape[1], 3)
        loss = torch.zeros(())
        for seen, action in zip(x, actions, strict=True):
            h = model.cell(torch.cat([z, action], -1), h)
            prior = normal(model.prior(h))
            posterior = normal(model.posterior(torch.cat([h, seen], -1)))
            z = posterior.rsample()
            rebuilt = model.decoder(torch.cat([h, z], -1))
            loss = loss + F.mse_loss(rebuilt, seen)
            loss = loss + kl_divergence(posterior, prior).sum(-1).clamp(min=1.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    b = 3
    each = 2 * b * (5 * 21 + 7 * 21 + 42 + 66 + 40)
    first = 2 * b * (5 * 21 + 7 * 21)  # the first input and state are constants
    return Case(
        step, (model, optimizer, torch.randn(4, b, 4), torch.randn(4, b, 2)),
        expected=4 * 3 * each - first,
    )  # fmt: skip


@pattern
def ensemble_of_critics_by_min() -> Case:
    """REDQ: random subsets of an ensemble are drawn by Python and stacked, three times a step."""
    model = nn.ModuleList(mlp(7, 9, 1) for _ in range(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(model: nn.ModuleList, optimizer: Any, x: Tensor, r: Tensor) -> None:
        for _ in range(3):
            chosen = random.sample(range(len(model)), 2)
            with torch.no_grad():
                goal = r + torch.stack([model[i](x) for i in chosen]).amin(0).squeeze(-1)
            loss = sum(F.mse_loss(m(x).squeeze(-1), goal) for m in model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    total = 3 * (2 * 2 * 8 * 72 + 4 * mlp_flops(8, 7, 9, 1))
    return Case(step, (model, optimizer, torch.randn(8, 7), torch.randn(8)), expected=total)
