"""One loss and one gradient, however they are computed: by ranks, layout, micro-batches, recomputation and prefixes.

Every cell is compared with one rank that reads padded rows in a single micro-batch.
"""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from ranks_here import in_ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.trainer import FSDPOptions
from agentrl.errors import Outcome
from agentrl.models.load import load_model
from agentrl.training.batch import StepExtras
from agentrl.training.distributed.fsdp import load_sharded, whole
from agentrl.training.forward.layout import MIN_SHARED_TOKENS, Layout
from agentrl.training.forward.sequences import scored_sequence
from agentrl.training.optimizer import Update
from agentrl.training.trainer import Trainer
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn

pytestmark = pytest.mark.slow

EXACT = 1e-5
"""Of float32: the loss relative to its size, each gradient relative to the largest number of its parameter."""
SHORT_LOSS, SHORT_GRADIENT = 0.03, 0.08
"""Of bfloat16: the loss over the mean size of an advantage, the difference of all gradients over their norm."""
LAYOUTS = {"padded": (False, False), "packed": (True, False), "prefixes": (True, True)}
"""Whether rows are packed, and whether common prefixes are computed once."""


class Cell(NamedTuple):
    """How one step is computed."""

    layout: str = "padded"
    micro_batches: int = 1
    recomputed: bool | str = False


MODES = (False, "full", "selective")
"""Which activations are computed again."""
RANKS = [(1, 1), (4, 1), (4, 2)]
"""Ranks, and how many of them share the tokens of a row."""
SHORT_RANKS = [(1, 1), (4, 2)]
"""The same, in bfloat16."""


def cells_of(ranks):
    """Every layout with each number of micro-batches; what is computed again takes turns."""
    turn = RANKS.index(ranks)
    both = itertools.product(enumerate(LAYOUTS), enumerate((1, 5)))
    return [Cell(layout, count, MODES[(turn + first + second) % 3]) for (first, layout), (second, count) in both]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Weights that bfloat16 holds exactly."""
    config = Qwen3Config(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).bfloat16().float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trajectories():
    """Three groups, each with a prompt in common, in ten sequences that are less than twice as long as each other."""
    rng, found = random.Random(3), []
    for group, members in enumerate((4, 3, 3)):
        prompt = [rng.randrange(2, 41) for _ in range(20 + group)]
        found += [trajectory(rng, prompt, group, member) for member in range(members)]
    return found


def trajectory(rng, prompt, group, member):
    sequence, turns = TokenSequence(), []
    sequence.extend(prompt, Source.PROMPT)
    for index in range(2):
        answer = [rng.randrange(2, 41) for _ in range(rng.randint(1, 6))]
        turns.append(Turn(index=index, start=len(sequence), end=len(sequence) + len(answer)))
        sequence.extend_sampled(answer, logprobs=[rng.uniform(-6, -1) for _ in answer], versions=[0] * len(answer))
        sequence.turns.append(turns[-1])
        sequence.extend([rng.randrange(2, 41) for _ in range(rng.randint(1, 4))], Source.OBSERVATION)
    turns[-1].reward = float(member == 1) + 0.1 * member
    return Trajectory(
        id=f"{group}-{member}",
        task_id=str(group),
        environment="maze",
        seed=0,
        group_id=str(group),
        outcome=Outcome.FINISHED,
        sequences=[sequence],
        reward=turns[-1].reward,
    )


def computed(ranks, path, work, *, context=1, dtype="float32"):
    """By cell: loss, mean size of an advantage, and all gradients, whole.

    Args:
        work: Cells, trajectories, and the tokens of a micro-batch of each cell.
    """
    ranks.arrange(context=context, tensor=1)
    if ranks.is_distributed:
        device, options = torch.device("cpu"), FSDPOptions()
        model = load_sharded(path, dtype=dtype, device=device, ranks=ranks, options=options)
    else:
        model = load_model(path, dtype=dtype, device="cpu")
    cells, trajectories, budgets = work
    return {cell: step(model, ranks, trajectories, cell, budgets[cell.layout, cell.micro_batches]) for cell in cells}


def step(model, ranks, trajectories, cell, budget):
    """A step that leaves the weights as they are."""
    packed, shares = LAYOUTS[cell.layout]
    model.set_attn_implementation("sdpa")  # what a cell before has put in its place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl.training.forward.layout._packs_well", lambda model: packed)
        patch.setattr("agentrl.training.forward.logprobs.chunk_tokens", lambda *_: 7)
        trainer = Trainer(
            model,
            AlgorithmConfig(kl_coef=0.0, entropy_coef=0.05),
            TrainerConfig(
                tokens_per_micro_batch=budget,
                gradient_checkpointing=cell.recomputed,
                share_prefixes=shares,
            ),
            seed=0,
            max_tokens=100,
            ranks=ranks,
        )
        layout = trainer._policy.passes.layout
        assert (layout.packed, layout.share > 0) == (packed, shares)
        gradients = {}

        def record():
            gradients.update({name: whole(p.grad).float().clone() for name, p in model.named_parameters()})
            model.zero_grad()
            return Update(grad_norm=1.0, learning_rate=0.0, non_finite=())

        trainer._optimizer.update = record
        given = trajectories, 0.9, StepExtras()
        numbers = trainer.calls()["step"](*given).metrics  # all ranks are here already
    return numbers["train/loss"], numbers["train/advantage_abs_mean"], gradients


@pytest.fixture(scope="module")
def budgets(trajectories):
    """Tokens of a micro-batch, by layout and the number of micro-batches that they make."""
    sequences = [scored_sequence(s.token_ids, s.loss_mask) for t in trajectories for s in t.sequences]
    found = {}
    for name, (packed, shares) in LAYOUTS.items():
        for budget in (*range(40, 80), 400):
            layout = Layout(packed=packed, share=MIN_SHARED_TOKENS * shares, budget=budget)
            found.setdefault((name, len(layout.micro_batches(sequences))), budget)
    return found


@pytest.fixture(scope="module")
def expected(path, trajectories, budgets):
    return in_ranks(1, lambda ranks: computed(ranks, path, ([Cell()], trajectories, budgets)))[Cell()]


def test_all_pairs_of_choices_are_among_the_cells():
    rows = [(*ranks, *cell) for ranks in RANKS for cell in cells_of(ranks)]
    choices = [(1, 4), (1, 2), tuple(LAYOUTS), (1, 5), MODES]
    for first, second in itertools.combinations(range(len(choices)), 2):
        found = {(row[first], row[second]) for row in rows}
        assert found >= set(itertools.product(choices[first], choices[second])) - {(1, 2)}  # one rank shares no rows


@pytest.mark.parametrize("ranks", RANKS)
def test_every_cell_gives_the_same_loss_and_gradients(path, trajectories, budgets, expected, ranks):
    count, context = ranks
    work = cells_of(ranks), trajectories, budgets
    found = in_ranks(count, lambda ranks: computed(ranks, path, work, context=context))
    loss, _, gradients = expected
    assert abs(loss) > 0.01
    assert len(gradients) == 25
    for cell, (own_loss, _, own_gradients) in found.items():
        assert own_loss == pytest.approx(loss, rel=EXACT), cell
        for name, gradient in gradients.items():
            largest = float(gradient.abs().max())
            assert largest > 0
            assert float((own_gradients[name] - gradient).abs().max()) < EXACT * largest, (cell, name)


@pytest.mark.parametrize("ranks", SHORT_RANKS)
def test_bfloat16_stays_within_its_bounds(path, trajectories, budgets, expected, ranks):
    count, context = ranks
    work = [Cell("padded", 1, "full"), Cell("prefixes", 5, False)], trajectories, budgets
    found = in_ranks(count, lambda ranks: computed(ranks, path, work, context=context, dtype="bfloat16"))
    loss, size, gradients = expected
    for cell, (own_loss, _, own_gradients) in found.items():
        assert abs(own_loss - loss) < SHORT_LOSS * size, cell
        apart = sum(float((own_gradients[name] - gradient).square().sum()) for name, gradient in gradients.items())
        norm = sum(float(gradient.square().sum()) for gradient in gradients.values())
        assert 0 < (apart / norm) ** 0.5 < SHORT_GRADIENT, cell
