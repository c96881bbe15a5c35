"""Pairs of episodes, and the gradient of losses on them against a float64 reference in one pass."""

import copy
import math
import random

import pytest
import torch
from support.trainers import learn_all

from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import TrainerConfig
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.preferences import Pair, PreferenceLearner, answer_sequences, make_pairs, preference_loss
from agentrl.trajectory import Source, TokenSequence, Turn


def train(model, pairs, settings, seen=None, **trainer):
    found = [] if seen is None else seen
    trainer = TrainerConfig(**{"max_grad_norm": 1e9, **trainer})
    return learn_all(PreferenceLearner(model, pairs, settings, trainer, seed=0), found.append)


def episode_logp(model, trajectory):
    """Sum over the sampled tokens of all sequences, in float64."""
    total = 0.0
    for sequence in trajectory.sequences:
        ids = torch.from_numpy(sequence.token_ids.astype("int64"))
        scores = model(ids[None]).logits[0].log_softmax(-1)
        index = torch.from_numpy(sequence.loss_mask).nonzero().squeeze(-1)
        total = total + scores[index - 1, ids[index]].sum()
    return total


@pytest.fixture
def gradients(monkeypatch):
    """The gradient of every update, by name, read just before it is applied."""
    found, update = [], PolicyOptimizer.update

    def spy(self):
        found.append({name: p.grad.double().clone() for name, p in self._parameters.items()})
        return update(self)

    monkeypatch.setattr(PolicyOptimizer, "update", spy)
    return found


@pytest.mark.parametrize("budget", [8192, 25])
def test_the_gradient_is_that_of_dpo_over_whole_episodes(model, trajectories, gradients, budget):
    """Of several sequences and forks; from the second update on the policy is not the reference."""
    pairs = make_pairs(trajectories, by="rewards", per_task=1)
    reference = copy.deepcopy(model).double()
    settings = PreferencesConfig(
        loss_options={"beta": 0.3}, pairs_per_update=len(pairs), epochs=2, learning_rate=0.05, schedule="constant"
    )
    seen, weights = [], {}

    def record(progress):
        seen.append(progress)
        weights[progress.update] = copy.deepcopy(model.state_dict())

    config = TrainerConfig(max_grad_norm=1e9, tokens_per_micro_batch=budget)
    learn_all(PreferenceLearner(model, pairs, settings, config, seed=0), record)
    own = copy.deepcopy(reference)
    for progress, found in zip(seen, gradients, strict=True):
        margins = torch.stack(
            [
                episode_logp(own, p.better)
                - episode_logp(own, p.worse)
                - episode_logp(reference, p.better).detach()
                + episode_logp(reference, p.worse).detach()
                for p in pairs
            ]
        )
        loss = torch.log1p(torch.exp(-0.3 * margins)).mean()
        own.zero_grad()
        loss.backward()
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=5e-6, rtol=1e-3, msg=name)
        assert progress.loss == pytest.approx(float(loss.detach()), abs=1e-5)
        assert progress.extra["better_gain"] - progress.extra["worse_gain"] == pytest.approx(
            float(margins.detach().mean()), abs=1e-4
        )
        own.load_state_dict(weights[progress.update])
    assert seen[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert (seen[0].extra["better_gain"], seen[0].extra["worse_gain"]) == (0.0, 0.0)


def test_the_better_episodes_gain(model, trajectories):
    pairs = make_pairs(trajectories, by="rewards", per_task=3)
    seen = []
    settings = PreferencesConfig(epochs=8, pairs_per_update=2, learning_rate=5e-3)
    last = train(model, pairs, settings, seen)
    assert last.update == last.updates == len(seen) == 8 * math.ceil(len(pairs) / 2)
    assert sum(p.extra["accuracy"] for p in seen[-3:]) == 3
    assert last.extra["better_gain"] > 0 > last.extra["worse_gain"]
    assert last.loss < 0.6


def test_pairs_are_the_best_with_the_worst_of_a_task(make_trajectory):
    rng = random.Random(2)

    def episode(member, reward, **changes):
        return make_trajectory(rng, "a", member, reward=reward, **changes)

    members = [episode(i, r) for i, r in enumerate([0.2, 1.0, 0.2, 0.7, 0.2])]
    lost = episode(5, 0.0, outcome=Outcome.ENGINE_ERROR)
    unscored = episode(6, 0.0)
    unscored.reward = None
    found = make_pairs([*members, lost, unscored], by="rewards", per_task=9)
    assert [(p.better.reward, p.worse.reward) for p in found] == [(1.0, 0.2), (0.7, 0.2)]
    assert len({id(t) for p in found for t in (p.better, p.worse)}) == 4
    assert make_pairs(members, by="rewards", per_task=1) == found[:1]
    elsewhere = episode(7, 9.0)
    elsewhere.seed = 1
    assert make_pairs([*members, elsewhere], by="rewards", per_task=1) == found[:1], "another task"


def test_rows_of_different_files_with_the_same_id_are_different_tasks(make_trajectory):
    """Two environments of a run read files whose rows are numbered from 1."""
    rng = random.Random(2)
    played = [make_trajectory(rng, "a", member, reward=float(member)) for member in range(4)]
    for trajectory, group in zip(played, ("7-easy-1", "8-hard-1", "9-easy~1-1", "31-hard-1"), strict=True):
        trajectory.task_id, trajectory.group_id = "1", group
    assert make_pairs(played, by="rewards", per_task=9) == [Pair(better=played[3], worse=played[1])]


def test_pairs_of_several_agents_are_made_per_role(make_trajectory):
    """In a zero-sum game, the episodes' rewards are equal: who won them says which answers are better."""
    rng = random.Random(2)

    def game(member, rewards, *, players=("player_1", "player_2")):
        played = make_trajectory(rng, "a", member, reward=sum(rewards))
        played.sequences = []
        for index, (player, reward) in enumerate(zip(players, rewards, strict=True)):
            sequence = TokenSequence()
            sequence.extend([5, 6], Source.PROMPT)
            sequence.extend_sampled([7, index], logprobs=[-1.0, -1.0], versions=[0, 0])
            sequence.turns.append(Turn(index=index, start=2, end=4, role=player, reward=reward, own_reward=reward))
            played.sequences.append(sequence)
        return played

    won, lost = game(0, (1.0, -1.0)), game(1, (-1.0, 1.0))
    first, second = make_pairs([won, lost], by="rewards", per_task=1)
    assert [(p.better.id, p.worse.id) for p in (first, second)] == [
        ("a-0:player_1", "a-1:player_1"),
        ("a-1:player_2", "a-0:player_2"),
    ]
    for pair in (first, second):
        assert (pair.better.reward, pair.worse.reward) == (1.0, -1.0)
        assert [len(answer_sequences(side)) for side in (pair.better, pair.worse)] == [1, 1]
    attempts = [game(member, (1.0, 0.0), players=("solver#1", "solver#2")) for member in (0, 1)]
    found = make_pairs(attempts, by="rewards", per_task=9)
    assert [(p.better.id, p.worse.id) for p in found] == [
        ("a-0:solver#1", "a-0:solver#2"),
        ("a-1:solver#1", "a-1:solver#2"),
    ], "attempts at different problems are not compared"


@pytest.mark.parametrize(("by", "message"), [("rewards", "whose rewards differ"), ("demonstrations", "of one task")])
def test_where_nobody_is_better_there_is_nothing_to_learn(make_trajectory, by, message):
    rng = random.Random(2)
    equal = [make_trajectory(rng, "a", member, reward=reward) for member, reward in enumerate([0.1 + 0.2, 0.3])]
    with pytest.raises(UsageError, match=f"no pairs of episodes.*got 2 episodes of 1 tasks.*{message}"):
        make_pairs(equal, by=by, per_task=1)


def test_spin_prefers_demonstrations_to_what_the_policy_did(model, make_trajectory):
    rng = random.Random(4)
    own = make_trajectory(rng, "a", 0, reward=1.0)
    shown = make_trajectory(rng, "a", 1, reward=0.0)
    forced = TokenSequence()
    forced.extend([5, 6, 7], Source.PROMPT)
    forced.extend([8, 9], Source.FORCED)
    forced.turns.append(Turn(index=0, start=3, end=5))
    shown.sequences = [forced]
    pairs = make_pairs([own, shown], by="demonstrations", per_task=1)
    assert pairs == [Pair(better=shown, worse=own)]
    settings = PreferencesConfig(loss="spin", pairs="demonstrations", epochs=4, learning_rate=1e-2)
    last = train(model, pairs, settings)
    assert last.extra["better_gain"] > 0 > last.extra["worse_gain"]


def test_settings_that_clash_are_found_before_training():
    with pytest.raises(ValueError, match=r"set preferences\.pairs=demonstrations"):
        PreferencesConfig(loss="spin")
    with pytest.raises(ConfigError, match="ppo does not learn from pairs of episodes: got a loss on episodes"):
        preference_loss(PreferencesConfig(loss="ppo"))
    with pytest.raises(ConfigError, match="dpo does not take this option: got 'betta'"):
        preference_loss(PreferencesConfig(loss_options={"betta": 1.0}))
    with pytest.raises(ConfigError, match="option beta is out of range"):
        preference_loss(PreferencesConfig(loss_options={"beta": -1.0}))
