"""A teacher with another tokenizer in a step of the trainer: its values, its gradient, and what the policy learns."""

import asyncio
import copy
import random

import numpy as np
import pytest
import torch
from support.models import tiny_model
from support.tokenizers import assemble_tokenizer, build_tokenizer, random_bpe
from tokenizers import Tokenizer, decoders, models

from agentrl.builders import group_extras
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.engine import Generation, StopReason
from agentrl.errors import Outcome, TrainingError
from agentrl.message import user
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.translation import NO_GROUP, UNALIGNED, Translator
from agentrl.serving.teacher import TeacherScore
from agentrl.training.batch import StepExtras
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Trajectory

DISTILL = {"advantage": "reinforce", "loss": "distill", "correction": {"mode": "off"}}
ANSWERS = ("go to cabinet 1", "na\u00efve \U0001f469 mug", "", "> put a clean mug in the cabinet.")


def renderer_of(tokenizer):
    made = Renderer(tokenizer)
    made.keeps_contexts = True
    return made


@pytest.fixture(scope="module")
def policy():
    return renderer_of(build_tokenizer("qwen3"))


@pytest.fixture(scope="module")
def reader():
    return renderer_of(assemble_tokenizer("llama3", random_bpe(3, merges=80)))


@pytest.fixture(scope="module")
def models_of():
    """The policy's model and the teacher's, with vocabularies of other sizes."""
    return tiny_model(vocab_size=440, seed=1), tiny_model(vocab_size=400, hidden_size=16, heads=2, seed=2)


def play(policy, answers, group="g"):
    """An episode of one turn for each answer: a text, or token ids with their log-probabilities."""
    trajectory = Trajectory(
        id=group, task_id=group, environment="e", seed=0, group_id=group, outcome=Outcome.FINISHED, reward=0.0
    )
    conversation, rng = LedgerConversation(policy, trajectory, [user("Where to?")]), random.Random(group)
    for answer in answers:
        conversation.prepare()
        if isinstance(answer, str):
            ids = [*policy.encoder.encode(answer), policy.boundary.end_id]
            answer = ids, [rng.uniform(-6, -1) for _ in ids]
        ids, logprobs = answer
        conversation.accept(
            Generation(token_ids=ids, logprobs=logprobs, versions=[0] * len(ids), stop_reason=StopReason.STOP)
        )
        conversation.add([user("Go on.")])
    return trajectory


def trainer_for(model, teacher, algorithm, **settings):
    return Trainer(
        copy.deepcopy(model),
        algorithm,
        TrainerConfig(**{"learning_rate": 1e-2, "max_grad_norm": 1e9, **settings}),
        seed=0,
        max_tokens=400,
        signal_models={} if teacher is None else {"teacher": teacher},
    )


def step(trainer, trajectories, **extras):
    """The report of a step, its batch with the teacher's values, and the gradient."""
    signal, seen, gradient, update = trainer.signals["teacher"], [], {}, trainer._optimizer.update
    annotate = signal.annotate
    signal.annotate = lambda batch: seen.append(annotate(batch)) or seen[-1]

    def spy():
        gradient.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
        return update()

    trainer._optimizer.update = spy
    report = trainer.step(trajectories, temperature=1.0, extras=StepExtras(**extras))
    return report, seen[0], gradient


def translations_of(trajectories, policy, reader):
    return group_extras._translate(Translator(policy, reader), trajectories, frozenset())


def whole_logprobs(model, ids):
    tokens = torch.from_numpy(ids.astype("int64"))
    logp = model(tokens[None]).logits[0].log_softmax(-1).detach()
    return np.array([np.nan, *logp[torch.arange(len(ids) - 1), tokens[1:]].tolist()], np.float32)


def test_the_teachers_values_sum_to_its_log_probabilities_of_the_texts(policy, reader, models_of):
    model, teacher = models_of
    trajectories = [play(policy, ANSWERS, "a"), play(policy, ANSWERS[::-1], "b")]
    translations = translations_of(trajectories, policy, reader)
    trainer = trainer_for(model, teacher, AlgorithmConfig(**DISTILL, teacher={"path": "any"}))
    report, batch, gradient = step(trainer, trajectories, translations=translations)
    expected = 0.0
    for (one,) in translations.values():
        (ids,), (groups,) = one.ids, one.other_groups
        expected += float(whole_logprobs(teacher, ids)[groups >= 0].sum(dtype=np.float64))
    assert batch.teacher.logp.double().sum().item() == pytest.approx(expected, rel=1e-5)
    tokens = sum(one.counts[0] for (one,) in translations.values())
    assert batch.tokens == tokens
    assert report.metrics["train/teacher_unaligned_tokens"] == 0
    assert 0.1 < report.metrics["train/teacher_equal_tokens"] < 1
    own = sum(
        float(np.nansum(whole_logprobs(model, s.token_ids)[s.loss_mask])) for t in trajectories for s in t.sequences
    )
    assert report.metrics["train/kl_teacher"] == pytest.approx((own - expected) / tokens, rel=1e-4)

    served = trainer_for(model, None, AlgorithmConfig(**DISTILL, teacher={"path": "any", "servers": ["http://h:1"]}))
    told = {
        name: [
            np.concatenate(
                [whole_logprobs(teacher, ids)[own >= 0] for ids, own in zip(one.ids, one.other_groups, strict=True)]
            )
        ]
        for name, (one,) in translations.items()
    }
    _, other, by_servers = step(served, trajectories, translations=translations, teacher_logp=told)
    torch.testing.assert_close(other.teacher.logp, batch.teacher.logp, atol=1e-4, rtol=1e-5)
    for name, found in gradient.items():
        torch.testing.assert_close(by_servers[name], found, atol=1e-5, rtol=1e-3, msg=name)
    with pytest.raises(TrainingError, match="2 sequences without its log-probabilities"):
        step(served, trajectories, translations=dict.fromkeys("x"))


def test_translation_does_not_change_a_teacher_with_the_policys_tokenizer(policy, models_of):
    model, _ = models_of
    teacher = tiny_model(vocab_size=440, seed=7)
    trajectories = [play(policy, ANSWERS, "a"), play(policy, ANSWERS[::-1], "b")]
    translations = translations_of(trajectories, policy, policy)
    algorithm = AlgorithmConfig(**DISTILL, teacher={"path": "any"})
    _, plain, expected = step(trainer_for(model, teacher, algorithm), trajectories)
    _, batch, found = step(trainer_for(model, teacher, algorithm), trajectories, translations=translations)
    assert batch.teacher.logp.tolist() == plain.teacher.logp.tolist()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_token_without_a_counterpart_is_neither_preferred_nor_avoided(policy, reader, models_of):
    """A cut character has the mean difference of the other tokens, which the loss and the rewards read."""
    model, teacher = models_of
    cut = policy.encoder.encode("go \U0001f469")[:-1]
    trajectories = [play(policy, ["put a mug", (cut, [-2.0] * len(cut))], "a")]
    translations = translations_of(trajectories, policy, reader)
    (unaligned,) = [one.groups[one.groups != NO_GROUP] == UNALIGNED for one in translations["a"]]
    assert 0 < unaligned.sum() == translations["a"][0].counts[2]
    algorithm = AlgorithmConfig(**DISTILL, teacher={"path": "any"})
    report, batch, _ = step(trainer_for(model, teacher, algorithm), trajectories, translations=translations)
    gap = (batch.behaviour_logp - batch.teacher.logp).double().numpy()
    assert gap[unaligned].tolist() == pytest.approx([gap[~unaligned].mean()] * int(unaligned.sum()), rel=1e-5)
    assert report.metrics["train/teacher_unaligned_tokens"] == pytest.approx(unaligned.mean())

    shaped = {**DISTILL, "loss": "reinforce", "shaping": {"distill": {"coef": 1.0}}}
    trainer = trainer_for(model, teacher, AlgorithmConfig(**shaped, teacher={"path": "any"}))
    _, rewarded, _ = step(trainer, trajectories, translations=translations)
    assert rewarded.episodes.token_reward.numpy() == pytest.approx(-gap.clip(-20, 20), abs=1e-5)


def test_servers_are_asked_for_the_teachers_tokens_only(policy, reader):
    class Server:
        """Says for each token how many are before it."""

        async def score(self, sequences):
            self.asked = sequences
            return [TeacherScore(logp=-np.arange(len(ids), dtype=np.float32)) for ids in sequences]

    trajectories, server = [play(policy, ANSWERS, "a"), play(policy, ["go"], "b")], Server()
    translations = translations_of(trajectories, policy, reader)
    told = asyncio.run(group_extras._score_translations(server, translations))
    for name, at in (("a", 0), ("b", 1)):
        (one,) = translations[name]
        assert server.asked[at] == one.ids[0].tolist()
        assert told[name][0].tolist() == (-np.flatnonzero(one.other_groups[0] >= 0)).tolist()


def test_too_many_tokens_without_a_counterpart_are_an_error(policy, reader):
    cut = policy.encoder.encode("\U0001f469")[:1]
    answers = [(cut, [-1.0])] * 5
    with pytest.raises(TrainingError, match=r"got 5 of 7 tokens without a counterpart, 5 of them in episode a"):
        translations_of([play(policy, answers, "a"), play(policy, ["go"], "b")], policy, reader)


def letters(seed):
    """A backend of the letters that spell all control tokens of two families, and some pairs, different by `seed`."""
    rng = random.Random(seed)
    merges = [tuple(rng.sample("abcd", 2)) for _ in range(6)]
    names = [*sorted({*"abcd<start_of_turn><end_of_turn><bos><eos><pad>"}), *dict.fromkeys(map("".join, merges))]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    backend.decoder = decoders.Fuse()
    return backend


def sample(model, policy, group, count, longest):
    """Episodes of one answer that the model samples until its end of turn."""
    prompt, end = policy.prompt([user("Where to?")]).ids, policy.boundary.end_id
    ids, logprobs = torch.tensor([prompt] * count), torch.zeros(count, 0)
    for _ in range(longest):
        with torch.no_grad():
            logp = model(ids).logits[:, -1].log_softmax(-1)
        drawn = logp.exp().multinomial(1)
        ids, logprobs = torch.cat([ids, drawn], 1), torch.cat([logprobs, logp.gather(1, drawn)], 1)
    rows = zip(ids[:, len(prompt) :].tolist(), logprobs.tolist(), strict=True)
    ended = [(row, own, [*row, end].index(end) + 1) for row, own in rows]
    return [play(policy, [(row[:stop], own[:stop])], f"{group}-{at}") for at, (row, own, stop) in enumerate(ended)]


@pytest.mark.slow
def test_a_policy_approaches_a_teacher_with_another_tokenizer():
    """The reverse KL of whole answers that the policy samples falls."""
    tokenizers = assemble_tokenizer("gemma", letters(1)), assemble_tokenizer("mistral_v3", letters(2))
    policy, reader = map(renderer_of, tokenizers)
    model, teacher = (
        tiny_model(vocab_size=len(own), seed=seed, initializer_range=0.1) for seed, own in enumerate(tokenizers)
    )
    algorithm, gaps, equal = AlgorithmConfig(**DISTILL, teacher={"path": "any"}), [], []
    trainer = trainer_for(model, teacher, algorithm, learning_rate=1e-3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number in range(30):
            trajectories = sample(trainer.model, policy, f"g{number}", count=64, longest=4)
            translations = translations_of(trajectories, policy, reader)
            report, batch, _ = step(trainer, trajectories, translations=translations)
            gaps.append(report.metrics["train/kl_teacher"] * batch.tokens / len(trajectories))
            equal.append(report.metrics["train/teacher_equal_tokens"])
    assert all(0.5 < share < 1 for share in equal), "the tokenizers differ"
    assert np.mean(gaps[-5:]) < np.mean(gaps[:2]) / 2
