"""Ids of the shipped environments in Gymnasium's registry.

Importing this module registers them. Gymnasium 1.0 and later do not load plug-ins, but import the module before a
colon: ``gymnasium.make("agentrl.envs.registration:agentrl/Household-v0")``. agentrl finds the ids without it.
"""

from __future__ import annotations

import gymnasium

from agentrl.registry import load

from . import PLUGINS

ENTRY_POINTS = {
    "agentrl/Airline-v0": "agentrl.envs.airline.environment:AirlineDesk",
    "agentrl/Alfworld-v0": "agentrl.envs.household.alfworld.environment:make_alfworld",
    "agentrl/Bandit-v1": "agentrl.envs.puzzles.bandit:make",
    "agentrl/Blackjack-v1": "agentrl.envs.puzzles.blackjack:make",
    "agentrl/Countdown-v0": "agentrl.envs.puzzles.countdown:make",
    "agentrl/Crafting-v0": "agentrl.envs.puzzles.crafting:make",
    "agentrl/FifteenPuzzle-v0": "agentrl.envs.puzzles.fifteen_puzzle:make",
    "agentrl/FrozenLake-v1": "agentrl.envs.frozen_lake:FrozenLake",
    "agentrl/Game2048-v1": "agentrl.envs.puzzles.game_2048:make",
    "agentrl/Gem-v0": "agentrl.envs.adapters.gem:Gem",
    "agentrl/GuessNumber-v0": "agentrl.envs.guess_number:GuessNumber",
    "agentrl/Gymnasium-v0": "agentrl.envs.adapters.gymnasium_text:make",
    "agentrl/Hanoi-v1": "agentrl.envs.puzzles.hanoi:make",
    "agentrl/Household-v0": "agentrl.envs.household.environment:HouseholdEnv",
    "agentrl/LongQa-v0": "agentrl.envs.puzzles.long_qa:make",
    "agentrl/Mastermind-v0": "agentrl.envs.puzzles.mastermind:make",
    "agentrl/MathProblems-v0": "agentrl.envs.math_problems.problems:MathEnv",
    "agentrl/Maze-v0": "agentrl.envs.puzzles.maze:make",
    "agentrl/Minesweeper-v0": "agentrl.envs.puzzles.minesweeper:make",
    "agentrl/MiniGrid-v0": "agentrl.envs.adapters.minigrid:MiniGrid",
    "agentrl/Points24-v0": "agentrl.envs.puzzles.points24:make",
    "agentrl/Prompts-v0": "agentrl.envs.prompts:Prompts",
    "agentrl/ReasoningGym-v0": "agentrl.envs.adapters.reasoning_gym:ReasoningGym",
    "agentrl/Retail-v0": "agentrl.envs.retail.environment:RetailDesk",
    "agentrl/SearchQa-v0": "agentrl.envs.search_qa.environment:SearchQA",
    "agentrl/SearchReact-v0": "agentrl.envs.search_qa.environment:make_search_react",
    "agentrl/SkyRLGym-v0": "agentrl.envs.adapters.skyrl_gym:SkyRLGym",
    "agentrl/Sokoban-v0": "agentrl.envs.puzzles.sokoban:make",
    "agentrl/Sudoku-v0": "agentrl.envs.puzzles.sudoku:make",
    "agentrl/Telecom-v0": "agentrl.envs.telecom.environment:TelecomDesk",
    "agentrl/TextArena-v0": "agentrl.envs.adapters.textarena:TextArena",
    "agentrl/TicTacToe-v1": "agentrl.envs.puzzles.tic_tac_toe:make",
    "agentrl/WebClicks-v0": "agentrl.envs.web_clicks.environment:WebClicks",
    "agentrl/WebShop-v0": "agentrl.envs.webshop.environment:WebShopEnv",
    "agentrl/Wordle-v0": "agentrl.envs.puzzles.wordle:make",
}


def register_all() -> None:
    """Register every id that is not registered yet; also the entry point of the group ``gymnasium.envs``.

    The reward threshold is that of the spec, if it has one. Gymnasium gets no step limit, because its wrapper would
    cut off longer episodes: the environments have their own limits, which are options.
    """
    specs = {name.replace("_", ""): reference for name, reference in PLUGINS["environment"].items()}
    for env_id, entry_point in ENTRY_POINTS.items():
        if env_id not in gymnasium.registry:
            spec = load(specs[env_id.removeprefix("agentrl/").rpartition("-v")[0].lower()])
            gymnasium.register(env_id, entry_point=entry_point, reward_threshold=spec.success_threshold)


register_all()
