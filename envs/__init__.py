"""The shipped environments, which are ordinary plug-ins."""

if __name__ != "agentrl.envs":
    raise ImportError(f"{__name__} is the folder of agentrl.envs in a checkout: import agentrl.envs instead")

PLUGINS: dict[str, dict[str, str]] = {
    "environment": {
        "agentgym": "agentrl.envs.agentgym:SPEC",
        "airline": "agentrl.envs.airline.spec:SPEC",
        "alfworld": "agentrl.envs.household.alfworld.spec:SPEC",
        "bandit": "agentrl.envs.puzzles.bandit:SPEC",
        "blackjack": "agentrl.envs.puzzles.blackjack:SPEC",
        "code": "agentrl.envs.code.spec:SPEC",
        "countdown": "agentrl.envs.puzzles.countdown:SPEC",
        "crafting": "agentrl.envs.puzzles.crafting:SPEC",
        "fifteen_puzzle": "agentrl.envs.puzzles.fifteen_puzzle:SPEC",
        "frozen_lake": "agentrl.envs.frozen_lake:SPEC",
        "game_2048": "agentrl.envs.puzzles.game_2048:SPEC",
        "gem": "agentrl.envs.adapters.gem:SPEC",
        "guess_number": "agentrl.envs.guess_number:SPEC",
        "gymnasium": "agentrl.envs.adapters.gymnasium_text:SPEC",
        "hanoi": "agentrl.envs.puzzles.hanoi:SPEC",
        "household": "agentrl.envs.household.spec:SPEC",
        "long_qa": "agentrl.envs.puzzles.long_qa:SPEC",
        "mastermind": "agentrl.envs.puzzles.mastermind:SPEC",
        "math_problems": "agentrl.envs.math_problems.problems:SPEC",
        "maze": "agentrl.envs.puzzles.maze:SPEC",
        "minesweeper": "agentrl.envs.puzzles.minesweeper:SPEC",
        "minigrid": "agentrl.envs.adapters.minigrid:SPEC",
        "openenv": "agentrl.envs.openenv:SPEC",
        "points24": "agentrl.envs.puzzles.points24:SPEC",
        "prompts": "agentrl.envs.prompts:SPEC",
        "python_math": "agentrl.envs.python_math.environment:SPEC",
        "reasoning_gym": "agentrl.envs.adapters.reasoning_gym:SPEC",
        "repo_fix": "agentrl.envs.repo_fix.environment:SPEC",
        "retail": "agentrl.envs.retail.spec:SPEC",
        "search_qa": "agentrl.envs.search_qa.spec:SPEC",
        "search_react": "agentrl.envs.search_qa.spec:REACT_SPEC",
        "sokoban": "agentrl.envs.puzzles.sokoban:SPEC",
        "sudoku": "agentrl.envs.puzzles.sudoku:SPEC",
        "terminal": "agentrl.envs.terminal.environment:SPEC",
        "textarena": "agentrl.envs.adapters.textarena:SPEC",
        "tic_tac_toe": "agentrl.envs.puzzles.tic_tac_toe:SPEC",
        "verifiers": "agentrl.envs.adapters.verifiers:SPEC",
        "webshop": "agentrl.envs.webshop.spec:SPEC",
        "wordle": "agentrl.envs.puzzles.wordle:SPEC",
    }
}
