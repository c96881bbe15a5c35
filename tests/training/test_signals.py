"""Greedy baselines, teachers and experts in a step, against float64 references."""

import copy
import random

import pytest
import torch
from support.trainers import compute_logprobs

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.engine import TopTokens
from agentrl.errors import TrainingError, UsageError
from agentrl.training.batch import StepExtras, step_batch
from agentrl.training.forward.logprobs import TeacherLogprobs
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.teacher import with_teacher_reward
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Turn

OFF = {"mode": "off"}


def trainer_for(model, config, *, teacher=None, **settings):
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1e9, **settings}
    return Trainer(
        copy.deepcopy(model),
        config,
        TrainerConfig(**settings),
        seed=0,
        max_tokens=100,
        signal_models={"teacher": teacher},
    )


def gradient_of(trainer, trajectories, **extras):
    """The report of a step, and the gradient of its update."""
    seen, update = {}, trainer._optimizer.update

    def spy():
        seen.update({n: p.grad.double().clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return update()

    trainer._optimizer.update = spy
    report = trainer.step(trajectories, temperature=1.0, extras=StepExtras(**extras))
    return report, seen


def expected_gradient(model, trajectories, loss_of):
    """The gradient of the mean over tokens of `loss_of(log-probabilities of a sequence, trajectory)`, in float64."""
    own = copy.deepcopy(model).double()
    parts = []
    for trajectory in trajectories:
        for sequence in trajectory.sequences:
            mask = sequence.loss_mask | ((sequence.sources == Source.FORCED) & (sequence.token_ids > 0))
            parts.append(loss_of(logprobs_of(own, sequence, mask), trajectory))
    torch.cat(parts).mean().backward()
    return {name: parameter.grad for name, parameter in own.named_parameters()}


def logprobs_of(model, sequence, mask):
    ids = torch.from_numpy(sequence.token_ids.astype("int64"))
    scores = model(ids[None]).logits[0].log_softmax(-1)
    index = torch.from_numpy(mask).nonzero().squeeze(-1)
    return scores[index - 1, ids[index]]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4, msg=name)


def teacher_of(model):
    other = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    return other


@pytest.fixture
def greedy_of(make_trajectory):
    def build(returns):
        rng = random.Random(1)
        return {group: make_trajectory(rng, group, 9, reward=reward) for group, reward in returns.items()}

    return build


def as_expert(trajectory):
    """The same episode, written by somebody else."""
    other = copy.deepcopy(trajectory)
    other.id, other.sequences = f"{trajectory.id}-expert", []
    for sequence in trajectory.sequences:
        forced = TokenSequence()
        for token, source in zip(sequence.token_ids.tolist(), sequence.sources.tolist(), strict=True):
            forced.extend([token], Source.FORCED if source == Source.SAMPLED else Source(source))
        forced.turns.extend(Turn(index=turn.index, start=turn.start, end=turn.end) for turn in sequence.turns)
        other.sequences.append(forced)
    other.turns[-1].reward = other.reward
    return other


@pytest.fixture
def plain(make_trajectory):
    """Two groups of two, without forks."""
    rng = random.Random(7)
    return [make_trajectory(rng, group, member, reward=member + 0.25) for group in ("a", "b") for member in range(2)]


def test_remax_is_the_return_beyond_the_greedy_one(model, plain, greedy_of):
    config = AlgorithmConfig(advantage="remax", loss="reinforce", correction=OFF)
    greedy = {"a": 0.5, "b": -1.0}
    report, found = gradient_of(trainer_for(model, config), plain, greedy=greedy_of(greedy))
    expected = expected_gradient(model, plain, lambda logp, t: -(t.reward - greedy[t.group_id]) * logp)
    assert_same(found, expected)
    assert report.metrics["reward/mean"] == pytest.approx(0.75), "the greedy rollouts are not among the rewards"


def test_the_greedy_return_is_shaped_like_the_others(model, plain, greedy_of):
    config = AlgorithmConfig(advantage="remax", loss="reinforce", correction=OFF, shaping={"clip": {"high": 0.5}})
    _, found = gradient_of(trainer_for(model, config), plain, greedy=greedy_of({"a": 3.0, "b": 0.5}))
    expected = expected_gradient(model, plain, lambda logp, t: -(min(t.reward, 0.5) - 0.5) * logp)
    assert_same(found, expected)


def test_a_missing_greedy_rollout_is_an_error_not_a_return_of_0(model, plain, greedy_of):
    trainer = trainer_for(model, AlgorithmConfig(advantage="remax"))
    with pytest.raises(TrainingError, match=r"group b has no greedy rollout with a reward.*1 of 2 groups"):
        trainer.step(plain, temperature=1.0, extras=StepExtras(greedy=greedy_of({"a": 1.0})))
    with pytest.raises(TrainingError, match="no greedy_return, expected a greedy rollout of each task"):
        trainer.step(plain, temperature=1.0)


def test_distillation_pulls_the_policy_to_its_teacher(model, plain):
    teacher = teacher_of(model)
    config = AlgorithmConfig(advantage="reinforce", loss="distill", correction=OFF, teacher={"path": "any"})
    trainer = trainer_for(model, config, teacher=teacher)
    exact = copy.deepcopy(teacher).double()
    by_tokens = {id(s): logprobs_of(exact, s, s.loss_mask) for t in plain for s in t.sequences}

    def loss(logp, trajectory):
        return (logp - by_tokens[id(trajectory.sequences[0])]).square() / 2

    report, found = gradient_of(trainer, plain)
    assert_same(found, expected_gradient(model, plain, loss))
    before = report.metrics["train/kl_teacher"]
    for _ in range(6):
        report = trainer.step(plain, temperature=1.0)
    assert abs(report.metrics["train/kl_teacher"]) < abs(before) / 2


def test_the_teachers_opinion_as_a_reward(model, plain):
    """With gamma 0 and one turn of a token each, REINFORCE on -KL is the gradient of the reverse KL."""
    teacher = teacher_of(model)
    shaping = {"distill": {"coef": 0.5}}
    config = AlgorithmConfig(
        advantage="reinforce", loss="reinforce", correction=OFF, teacher={"path": "any"}, shaping=shaping
    )
    trainer = trainer_for(model, config, teacher=teacher)
    report = trainer.step(plain, temperature=1.0)
    exact = copy.deepcopy(teacher).double()
    penalty = 0.0
    for sequence in (s for t in plain for s in t.sequences):
        mu = torch.from_numpy(sequence.logprobs[sequence.loss_mask]).double()
        penalty -= 0.5 * float((mu - logprobs_of(exact, sequence, sequence.loss_mask)).sum())
    expected = report.metrics["reward/mean"] + penalty / len(plain)
    assert report.metrics["reward/shaped_mean"] == pytest.approx(expected, abs=1e-4)


def test_nobody_knows_how_far_an_expert_is_from_a_teacher(model, plain):
    shaping = RewardShaping({"distill": {}}, max_tokens=100)
    expert = as_expert(plain[0])
    batch = step_batch([plain[1], expert], shaping, experts={expert.id})
    teacher = TeacherLogprobs(logp=torch.full((batch.tokens,), -5.0))
    shaped = with_teacher_reward(batch, shaping, teacher).episodes
    own = plain[1].sampled_tokens
    assert shaped.token_reward[own:].tolist() == [0.0] * plain[0].sampled_tokens
    expected = -5.0 - batch.behaviour_logp[:own].double()
    torch.testing.assert_close(shaped.token_reward[:own], expected)


def test_a_served_teacher_gives_the_values_of_a_local_one(model, plain):
    teacher = teacher_of(model)
    settings = {"advantage": "reinforce", "loss": "distill", "correction": OFF}
    local = AlgorithmConfig(**settings, teacher={"path": "any"})
    served = AlgorithmConfig(**settings, teacher={"path": "any", "servers": ["http://h:1"]})
    _, expected = gradient_of(trainer_for(model, local, teacher=teacher), plain)
    told = {t.id: [whole_logprobs(teacher, sequence) for sequence in t.sequences] for t in plain}
    _, found = gradient_of(trainer_for(model, served), plain, teacher_logp=told)
    assert_same(found, expected)
    del told[plain[1].id]
    with pytest.raises(
        TrainingError, match=f"not queried for every episode: got 1 sequences .*trajectory {plain[1].id}"
    ):
        gradient_of(trainer_for(model, served), plain, teacher_logp=told)


K = 4
TOP_K = {"advantage": "reinforce", "loss": "distill_top_k", "correction": OFF}


@pytest.mark.parametrize("layout", [{}, {"tokens_per_micro_batch": 30, "lanes": 2}])
def test_the_policy_learns_what_its_teacher_would_have_said(model, plain, layout, monkeypatch):
    """The forward KL on the teacher's four best tokens, and all others as one, in chunks of the head."""
    monkeypatch.setattr("agentrl.training.forward.logprobs.chunk_tokens", lambda *_: 5)
    monkeypatch.setattr("agentrl.training.forward.logprobs.chunk_tokens", lambda *_: 5)
    teacher = teacher_of(model)
    exact, own = copy.deepcopy(teacher).double(), copy.deepcopy(model).double()
    losses = []
    for sequence in (s for t in plain for s in t.sequences):
        ids = torch.from_numpy(sequence.token_ids.astype("int64"))
        index = torch.from_numpy(sequence.loss_mask).nonzero()[:, 0] - 1
        p, q = (judge(ids[None]).logits[0][index].log_softmax(-1) for judge in (exact, own))
        best = p.topk(K).indices
        p, q = ((column.gather(-1, best), 1 - column.exp().gather(-1, best).sum(-1)) for column in (p, q))
        losses.append((p[0].exp() * (p[0] - q[0])).sum(-1) + p[1] * (p[1] / q[1]).log())
    expected = torch.cat(losses).mean()
    expected.backward()
    local = AlgorithmConfig(**TOP_K, teacher={"path": "any", "top_k": K})
    trainer = trainer_for(model, local, teacher=teacher, **layout)
    report, found = gradient_of(trainer, plain)
    assert report.metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert_same(found, {name: parameter.grad for name, parameter in own.named_parameters()})
    served = AlgorithmConfig(**TOP_K, teacher={"path": "any", "top_k": K, "servers": ["http://h:1"]})
    told = {t.id: [whole_logprobs(teacher, sequence) for sequence in t.sequences] for t in plain}
    top = {t.id: [whole_top(teacher, sequence) for sequence in t.sequences] for t in plain}
    _, by_servers = gradient_of(trainer_for(model, served, **layout), plain, teacher_logp=told, teacher_top=top)
    assert_same(by_servers, found)


def whole_top(model, sequence):
    """As a client of servers tells it."""
    ids = torch.from_numpy(sequence.token_ids.astype("int64"))
    best = copy.deepcopy(model).double()(ids[None]).logits[0].log_softmax(-1).topk(K)
    nothing = torch.full((1, K), float("nan"))
    logp = torch.cat([nothing, best.values[:-1].float()]).detach()
    return TopTokens(ids=torch.cat([torch.zeros(1, K).long(), best.indices[:-1]]).numpy(), logp=logp.numpy())


def test_a_teacher_with_too_small_a_vocabulary_is_refused(model, plain):
    config = AlgorithmConfig(**TOP_K, teacher={"path": "any", "top_k": 41})
    with pytest.raises(UsageError, match="41 most probable tokens cannot be computed: got a vocabulary of 40"):
        trainer_for(model, config, teacher=teacher_of(model)).step(plain, temperature=1.0)


def whole_logprobs(model, sequence):
    """float32 [T], NaN for the first token, as servers say it."""
    everything = torch.ones(len(sequence), dtype=torch.bool)
    everything[0] = False
    values = logprobs_of(copy.deepcopy(model).double(), sequence, everything.numpy())
    return torch.cat([torch.tensor([float("nan")]), values.float()]).numpy()


def test_a_trainer_without_the_teacher_that_its_algorithm_names_is_refused(model):
    with pytest.raises(UsageError, match=r"got no teacher, expected Trainer\(signal_models"):
        trainer_for(model, AlgorithmConfig(loss="distill", teacher={"path": "any"}))


def test_an_experts_episodes_are_members_that_luffy_shapes(model, plain):
    """Everything is on the policy's own tokens at the first update: PPO's gradient is that of -A log pi there."""
    experts = [as_expert(plain[1]), as_expert(plain[2])]
    for expert, reward in zip(experts, (2.0, 3.0), strict=True):
        expert.reward = expert.turns[-1].reward = reward
    config = AlgorithmConfig(
        advantage="dr_grpo", loss="luffy", loss_options={"shaping": 0.1}, correction=OFF, expert={}, group_size=3
    )
    report, found = gradient_of(trainer_for(model, config), plain, experts=experts)
    groups = {}
    for trajectory in (*plain, *experts):
        groups.setdefault(trajectory.group_id, []).append(trajectory.reward)
    ids = {expert.id for expert in experts}

    def loss(logp, trajectory):
        rewards = groups[trajectory.group_id]
        advantage = trajectory.reward - sum(rewards) / len(rewards)
        probability = logp.exp()
        return -advantage * (probability / (probability + 0.1) if trajectory.id in ids else logp)

    expected = expected_gradient(model, [*plain, *experts], loss)
    assert_same(found, expected)
    metrics = report.metrics
    assert metrics["reward/mean"] == pytest.approx(0.75), "an expert's success is not the policy's"
    assert metrics["trajectories/trained"] == 4


def test_where_no_expert_has_shown_anything_luffy_is_ppo(model, plain):
    config = {"advantage": "dr_grpo", "correction": OFF}
    _, expected = gradient_of(trainer_for(model, AlgorithmConfig(**config)), plain)
    _, found = gradient_of(trainer_for(model, AlgorithmConfig(**config, loss="luffy", expert={})), plain)
    assert_same(found, expected)


def test_an_experts_tokens_do_not_count_as_a_mismatch_of_trainer_and_engine(model, plain):
    exact = compute_logprobs(trainer_for(model, AlgorithmConfig()), [plain[0].sequences[0]])
    own = copy.deepcopy(plain[0])
    sequence = own.sequences[0]
    values = iter(exact[0].tolist())
    sequence._logprobs = type(sequence._logprobs)(
        "f", [next(values) if m else float("nan") for m in sequence.loss_mask]
    )
    config = AlgorithmConfig(advantage="reinforce", loss="luffy", expert={}, correction={"mode": "icepop"})
    report = trainer_for(model, config).step([own], temperature=1.0, extras=StepExtras(experts=[as_expert(own)]))
    assert report.metrics["mismatch/prob_abs_mean"] < 1e-6
    assert report.metrics["mismatch/clip_share"] == report.metrics["train/dropped_share"] == 0


def test_only_what_an_expert_wrote_trains_of_its_episodes(plain):
    expert = as_expert(plain[0])
    batch = step_batch([plain[1], expert], RewardShaping({}, max_tokens=100), experts={expert.id})
    assert batch.expert.tolist() == [False] * plain[1].sampled_tokens + [True] * plain[0].sampled_tokens
    assert batch.sampled_index([0, 1]).tolist() == list(range(plain[1].sampled_tokens))
    assert step_batch([plain[1]], RewardShaping({}, max_tokens=100)).expert is None
