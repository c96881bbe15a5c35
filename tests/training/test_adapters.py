"""Several adapters in one step: gradients of a plain computation, and no leaks between adapters."""

import pytest
import torch

from agentrl.algorithms.advantages import dr_grpo
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.trainer import LoraConfig
from agentrl.errors import Outcome, TrainingError
from agentrl.models.lora import with_adapter
from agentrl.training.adapters import AdapterTrainers, join_reports
from agentrl.training.batch import select, step_batch
from agentrl.training.report import StepReport
from agentrl.training.rewards import RewardShaping
from agentrl.training.roles import role_members
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

LORA = LoraConfig(rank=2)
ALGORITHM = AlgorithmConfig(advantage="dr_grpo", correction={"mode": "off"})
CONFIG = TrainerConfig(learning_rate=1e-2, steps=4)
ROLES = ("planner", "worker")


def episodes(roles=ROLES, versions=(0, 0)):
    """Two groups of two; every role has a sequence of two answers, and returns of its own."""
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(2, 40, (count,), generator=generator).tolist()

    found = []
    for group in "ab":
        for member in range(2):
            played = Trajectory(
                id=f"{group}/{member}", task_id=group, environment="e", seed=0, group_id=group, outcome=Outcome.FINISHED
            )
            for role, version in zip(roles, versions, strict=True):
                sequence = TokenSequence()
                played.sequences.append(sequence)
                for _ in range(2):
                    sequence.extend(ids(3), Source.OBSERVATION if len(sequence) else Source.PROMPT)
                    start, answer = len(sequence), ids(3)
                    sequence.extend_sampled(answer, logprobs=[-3.0] * 3, versions=[version] * 3)
                    reward = float(torch.rand(1, generator=generator))
                    sequence.turns.append(
                        Turn(
                            index=len(played.turns),
                            start=start,
                            end=start + 3,
                            role=role,
                            adapter=role,
                            reward=reward,
                            own_reward=reward,
                        )
                    )
            played.reward = sum(turn.reward for turn in played.turns)
            found.append(played)
    return found


@pytest.fixture
def adapted(model):
    """A model with each adapter, whose B is not 0."""
    base = model.requires_grad_(False)
    models = {name: with_adapter(base, LORA, path="base", seed=n) for n, name in enumerate(ROLES)}
    generator = torch.Generator().manual_seed(7)
    for own in models.values():
        for name, parameter in own.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.3, generator=generator)
    return models


def trainers_of(adapted, **changes):
    own = {
        name: Trainer(
            model,
            changes.get(name, ALGORITHM),
            CONFIG,
            seed=0,
            max_tokens=100,
            roles={name},
        )
        for name, model in adapted.items()
    }
    return AdapterTrainers(own, runs={name: {} for name in own})


def gradients(trainers, trajectories):
    """The gradient of each adapter in a step, by the names of its tensors."""
    found = {}
    for name, trainer in trainers.trainers.items():
        apply = trainer.watch.apply

        def record(gradient, optimizer, name=name, apply=apply):
            found[name] = {k: p.grad.clone() for k, p in gradient.model.named_parameters() if p.grad is not None}
            return apply(gradient, optimizer)

        trainer.watch.apply = record
    trainers.step(trajectories, temperature=1.0)
    return found


def plain_gradient(model, adapter, members):
    """Of -sum(A log pi) / tokens, with W + scale B A written out, sequence by sequence."""
    weights = {name: p.detach() for name, p in model.named_parameters() if "lora" not in name}
    factors = {n: p.detach().clone().requires_grad_() for n, p in adapter.named_parameters() if ".lora_" in n}
    merged = dict(weights)
    for name, down in factors.items():
        if ".lora_A." in name:
            up = factors[name.replace("lora_A", "lora_B")]
            key = name.replace("lora_A.default.weight", "weight")
            merged[key] = weights[key] + LORA.scale * up @ down
    batch = step_batch(members, RewardShaping({}, max_tokens=100))
    advantage, loss, first = dr_grpo(batch.episodes), 0.0, 0
    for member in members:
        for sequence in member.sequences:
            ids = torch.tensor([sequence.token_ids.tolist()])
            logits = torch.func.functional_call(model, merged, (ids,), {"use_cache": False}).logits[0, :-1]
            wanted = torch.from_numpy(sequence.loss_mask[1:])
            logp = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][wanted]
            loss = loss - (advantage[first : first + len(logp)] * logp).sum()
            first += len(logp)
    (loss / first).backward()
    return {name: factor.grad for name, factor in factors.items()}


def test_the_gradient_of_each_adapter_is_that_of_its_own_roles_tokens(model, adapted):
    played = episodes()
    members = select(role_members(played), compare_groups=True)
    expected = {
        name: plain_gradient(model, adapter, [m for m in members if m.id.endswith(name)])
        for name, adapter in adapted.items()
    }
    found = gradients(trainers_of(adapted), played)
    for name in ROLES:
        assert found[name].keys() == expected[name].keys()
        for key, gradient in found[name].items():
            torch.testing.assert_close(gradient, expected[name][key], rtol=1e-4, atol=1e-6)
            assert gradient.abs().max() > 0


def test_an_adapter_whose_roles_were_silent_stays_as_it_is(adapted):
    before = state(adapted["worker"])
    trainers = trainers_of(adapted)
    report = trainers.step(episodes(roles=("planner",), versions=(0,)), temperature=1.0)
    assert trainers.versions == {"planner": 1, "worker": 0}
    assert all(torch.equal(value, before[key]) for key, value in state(adapted["worker"]).items())
    assert not any(name.startswith("adapter/worker") for name in report.metrics)
    assert report.metrics["adapter/planner/tokens"] == report.metrics["train/tokens"] == 24


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_what_one_adapter_learns_does_not_depend_on_the_others(model, adapted):
    together, apart = trainers_of(adapted), {}
    for n, name in enumerate(ROLES):
        apart[name] = with_adapter(model, LORA, path="base", seed=n)
        apart[name].load_state_dict(adapted[name].state_dict())
    for _ in range(2):
        together.step(episodes(), temperature=1.0)
    for name, own in apart.items():
        alone = trainers_of({name: own})
        for _ in range(2):
            alone.step(episodes(), temperature=1.0)
        for key, tensor in state(own).items():
            assert torch.equal(tensor, adapted[name].state_dict()[key])


def test_each_adapter_has_its_own_algorithm(adapted):
    plain = trainers_of(adapted, worker=ALGORITHM.model_copy(update={"entropy_coef": 0.5}))
    report = plain.step(episodes(), temperature=1.0)
    assert report.metrics["adapter/worker/loss"] < report.metrics["adapter/planner/loss"] - 0.5


def test_a_step_that_trains_no_adapter_ends_the_run(adapted):
    with pytest.raises(TrainingError, match="no trajectory of this step can be trained on"):
        trainers_of(adapted).step(episodes(roles=("judge",), versions=(0,)), temperature=1.0)


def test_staleness_is_counted_by_adapter(adapted):
    trainers = trainers_of(adapted)
    trainers.step(episodes(roles=("worker",), versions=(0,)), temperature=1.0)
    played = episodes(versions=(0, 0))  # of the worker's second step, and of the planner's first
    assert [one.staleness(9, trainers.versions) for one in played] == [1] * 4
    metrics = trainers.step(played, temperature=1.0).metrics
    assert (metrics["adapter/planner/staleness/max"], metrics["adapter/worker/staleness/max"]) == (0, 1)


def test_metrics_of_all_are_sums_maxima_and_means_by_tokens():
    one = {
        "train/tokens": 30.0,
        "train/loss": 1.0,
        "train/grad_norm": 2.0,
        "groups/trained": 2.0,
        "role/a/members": 4.0,
    }
    two = {"train/tokens": 10.0, "train/loss": 5.0, "train/grad_norm": 1.0, "groups/trained": 1.0}
    found = join_reports(
        {"a": StepReport(metrics=one, warnings=("odd",)), "b": StepReport(metrics=two)}, {"a": [0, 1], "b": []}
    )
    together = {"train/tokens": 40.0, "train/loss": 2.0, "train/grad_norm": 2.0, "groups/trained": 3.0}
    assert {name: found.metrics[name] for name in together} == together
    assert found.metrics["adapter/b/loss"] == 5.0
    assert found.metrics["adapter/a/staleness/mean"] == 0.5
    assert "adapter/a/role/a/members" not in found.metrics
    assert found.warnings == ("adapter a: odd",)
