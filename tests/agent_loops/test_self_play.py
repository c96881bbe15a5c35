"""Two roles in one game: visible messages, rewards by role, and stalling."""

from dataclasses import replace

import gymnasium
import pytest
from agentrl.envs.puzzles.environment import PuzzleEnv
from agentrl.envs.puzzles.tic_tac_toe import SPEC, TicTacToe
from support.runs import numbers

import agentrl
from agentrl.agent_loop import AgentRole
from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.roles.run_roles import RoleSetup
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.waits import WaitTracker
from agentrl.runs.rl import train
from agentrl.runs.start import resume_run
from agentrl.serving.scripted import ScriptedEngine
from agentrl.task import Task


class EmptyBoard(PuzzleEnv):
    """Games that begin at the beginning."""

    def __init__(self, **options):
        super().__init__(TicTacToe, **options)

    def reset(self, **words):
        super().reset(**words)
        self.game.load({"board": "." * 9, "to_move": "X", "mine": self.game.mine and "X", "strikes": 0, "dice": 0})
        return self.game.text(), self._opening_info()


@pytest.fixture
def game(renderer):
    """Plays tic-tac-toe from the empty board; the players say the given texts in turn, the last one again and again."""

    async def run(*answers, seed=0, options=None, roles=(), env_options=None, **limits):
        seconds = [0.0]  # of a clock that goes on with every move

        def script(request):
            seconds[0] += 1
            turn = int(request.request_id.rpartition("-")[2])
            return [*renderer.encoder.encode(answers[min(turn, len(answers) - 1)]), renderer.boundary.end_id]

        pool = EnvPool(
            replace(SPEC, make=EmptyBoard),
            options={"opponent": "self"} if env_options is None else env_options,
            waits=WaitTracker(lambda: seconds[0]),
        )
        runner = EpisodeRunner(
            pool=pool,
            loop=make_agent_loop("self_play", {"format": "plain", **(options or {})}),
            policy=EngineEpisodePolicy(ScriptedEngine(script=script, vocab_size=400), renderer, SamplingParams()),
            roles=roles,
            limits=EpisodeLimits(**limits),
        )
        trajectory = await runner.run(Task(id="t", environment="w", seed=seed), group_id="g", member=0, seed=0)
        await pool.close()
        return trajectory

    return run


async def test_the_winner_gets_what_the_loser_pays(game, renderer):
    trajectory = await game("1", "4", "2", "5", "3")
    assert trajectory.outcome is Outcome.FINISHED
    assert [turn.role for turn in trajectory.turns] == ["player_1", "player_2"] * 2 + ["player_1"]
    assert trajectory.role_returns == {"player_1": 1.0, "player_2": -1.0}
    assert trajectory.reward == 0.0
    first, second = (renderer.encoder.decode(sequence.ids_list()) for sequence in trajectory.sequences)
    assert "You are X." in first
    assert "You are O." not in first
    assert "X took field 1.\nX 2 3\n4 5 6\n7 8 9\nYou are O. Which" in second
    assert "O took field 4.\nX 2 3\nO 5 6\n7 8 9\nYou are X." in first
    assert sum(int(s.loss_mask.sum()) for s in trajectory.sequences) == sum(t.end - t.start for t in trajectory.turns)


async def test_a_draw_pays_nobody(game):
    trajectory = await game(*DRAWN)
    assert trajectory.role_returns == {"player_1": 0.0, "player_2": 0.0}
    assert trajectory.success is False
    assert len(trajectory.turns) == 9


@pytest.mark.parametrize("refusal", ["pass", "", "10", "5 5", "1\n2"])
async def test_who_refuses_to_play_loses_and_the_other_wins_nothing(game, refusal):
    trajectory = await game("5", refusal)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.role_returns == {"player_1": 0.0, "player_2": -1.0}
    assert [turn.valid for turn in trajectory.turns] == [True, False, False]


async def test_an_answer_that_cannot_be_read_is_a_move_that_is_not_allowed(game, renderer):
    trajectory = await game("<action>5</action>", "I pass.", "<action>1</action>", "no", options={"format": "react"})
    second = renderer.encoder.decode(trajectory.sequences[1].ids_list())
    assert "Your last answer had no <action> </action>" in second
    assert "Play one of the free fields" in second
    assert trajectory.role_returns == {"player_1": -1.0, "player_2": 0.0}
    assert "invalid_answers" not in trajectory.metrics


class Polite(gymnasium.Env):
    """Two players speak in turn; who says nothing passes."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        self.moves = 0
        return "Speak, a.", {"players": ["a", "b"], "player": "a"}

    def step(self, action):
        self.moves += 1
        ends = self.moves == 3
        info = {"player": "ab"[self.moves % 2]} | ({"rewards": {"a": 1.0, "b": -1.0}} if ends else {})
        return f"{action or 'Nothing'} was said.", 0.0, ends, False, info


async def test_what_was_wrong_with_an_answer_is_told_to_nobody_else(play):
    played = await play(Polite, "self_play", "", "one", "two", options={"format": "plain"})
    first, second = played.texts
    assert "was empty" not in first + second
    assert "Nothing was said." in second
    assert played.trajectory.role_returns == {"player_1": 1.0, "player_2": -1.0}


async def test_a_player_that_uses_up_its_tokens_loses_alone(game):
    long = "5" + " and on" * 60
    trajectory = await game("1", long, "4", "2", long, options={"format": "plain"}, max_tokens=460)
    assert trajectory.outcome is Outcome.TRUNCATED_TOKENS or trajectory.role_returns["player_2"] == -1.0
    assert trajectory.role_returns["player_1"] == 0.0


async def test_a_game_that_runs_out_of_turns_is_lost_for_both(game):
    trajectory = await game("1", "4", "2", max_turns=3)
    assert trajectory.outcome is Outcome.TRUNCATED_TURNS
    assert trajectory.role_returns == {"player_1": -1.0, "player_2": -1.0}
    lenient = await game("1", "4", "2", max_turns=3, options={"unfinished": 0})
    assert lenient.role_returns == {"player_1": 0.0, "player_2": 0.0}


async def test_a_game_that_runs_out_of_time_is_lost_for_both(game):
    trajectory = await game("1", "4", "2", max_seconds=2.5)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.TRUNCATED_TIME, 3)
    assert trajectory.role_returns == {"player_1": -1.0, "player_2": -1.0}


async def test_seats_rotate_by_the_task_s_seed(game):
    for seed, winner in ((2, "player_1"), (1, "player_2")):
        trajectory = await game("1", "4", "2", "5", "3", seed=seed, options={"rotate": True})
        assert trajectory.turns[0].role == winner
        assert trajectory.role_returns[winner] == 1.0


WON_BY_FIRST, WON_BY_SECOND = ("1", "4", "2", "5", "3"), ("1", "4", "2", "5", "9", "6")
DRAWN = ("1", "2", "3", "5", "4", "6", "8", "7", "9")


@pytest.mark.parametrize(("moves", "first"), [(WON_BY_FIRST, 1.0), (WON_BY_SECOND, -1.0), (DRAWN, 0.0)])
@pytest.mark.parametrize(("learner", "sign"), [("player_1", 1.0), ("player_2", -1.0)])
async def test_against_an_untrained_player_a_game_is_a_success_if_it_is_won(game, moves, first, learner, sign):
    """A draw is none, and neither is a win of the other player."""
    other = "player_2" if learner == "player_1" else "player_1"
    trajectory = await game(*moves, roles=[RoleSetup(role=AgentRole(name=other, trained=False))])
    assert trajectory.success is (sign * first > 0)
    assert trajectory.role_returns == {learner: sign * first}
    assert trajectory.reward == sign * first


async def test_it_needs_a_game_of_as_many_players(game):
    with pytest.raises(UsageError, match=r"self_play has 2 roles.*a single player.*opponent: self"):
        await game("1", env_options={})
    with pytest.raises(UsageError, match="expected 3 players"):
        await game("1", options={"roles": ["a", "b", "c"]})


@pytest.mark.parametrize(
    "options", [{"roles": "ab"}, {"roles": ["a"]}, {"roles": ["a", "a"]}, {"unfinished": "no"}, {"format": "x"}]
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError):
        make_agent_loop("self_play", options)


@pytest.mark.parametrize("policy", ["expert", "random"])
def test_scripted_policies_play_both_sides(policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["agent.loop=self_play", "environment.options={opponent: self, opening: 1}"]
    result = agentrl.evaluate("tic_tac_toe/valid", policy=policy, tasks=16, samples=1, overrides=overrides)
    assert result.reward.mean == 0.0
    assert (result.success.mean == 0.0) is (policy == "expert")


def test_a_perfect_player_is_never_beaten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "agent.loop=self_play",
        "agent.options.rotate=true",
        "agent.roles={player_2: {policy: random}}",
        "environment.options={opponent: self, opening: 1}",
    ]
    result = agentrl.evaluate("tic_tac_toe/valid", policy="expert", tasks=32, samples=1, overrides=overrides)
    assert result.success.mean > 0.7
    assert result.reward.mean >= result.success.mean


RUN = (
    "environment={name: tic_tac_toe, options: {opponent: self}}",
    "agent={loop: self_play, options: {format: plain, explain: false}, max_answer_tokens: 4, max_tokens: 256}",
    "algorithm.group_size=4",
)


@pytest.mark.slow
def test_both_players_train_and_a_run_goes_on_bit_for_bit(tiny_run):
    whole = tiny_run(*RUN, "trainer.steps=2", "checkpoint.every=1", name="whole")
    train(whole)
    lines = numbers(whole.folder.path)
    for line in lines:
        own = line["episode/reward_of/player_1"] + line["episode/reward_of/player_2"]
        assert line["reward/mean"] == pytest.approx(own)
        assert line["reward/mean"] <= 0
    cut = tiny_run(*RUN, "trainer.steps=1", "checkpoint.every=1", name="cut")
    train(cut)
    train(resume_run(cut.folder.path, ["trainer.steps=2"]))
    assert numbers(cut.folder.path) == lines


def test_the_environment_is_played_alone_by_default():
    assert resolve_environment("tic_tac_toe").make().game.players == ()
