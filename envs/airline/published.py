"""Published data of tau-bench and tau2-bench: the records of the airline, and its tasks. The data is not shipped.

A folder has ``users.json``, ``flights.json`` and ``reservations.json``, or a ``db.json`` with these three; and the
tasks in ``tasks.json`` (tau2-bench) or ``tasks_test.py`` (tau-bench), which is parsed, not run.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ToolError, UsageError

from ..desks.records import Action
from ..retail.briefing import GREETING
from ..retail.role_customer import AGENT, USER, RoleCustomer
from .desk import Desk
from .phrases import STOP
from .records import Database, Store

TASK_FILES = ("tasks.json", "tasks_test.py", "tasks.py")
_TABLES = ("users", "flights", "reservations")
_EXPECTED = f"{', '.join(f'{name}.json' for name in _TABLES)} or db.json, and {' or '.join(TASK_FILES)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCase:
    """A published task with its solution."""

    task_id: str
    store: Store
    user_id: str
    instruction: str
    """Text that the customer's model reads."""
    actions: tuple[Action, ...]
    outputs: tuple[str, ...]
    """Texts that the agent has to say."""
    gold_key: str
    """Hash of the database after the gold actions."""


def _gold_key(store: Store, actions: Sequence[Action]) -> str:
    """Return the hash of the database after some actions; those that the desk refuses change nothing."""
    desk = Desk(Database(store))
    desk.database.seen.update(store.users)
    for action in actions:
        if hasattr(desk, action.name) and not action.name.startswith(("_", "transfer")):
            with suppress(ToolError, TypeError):
                getattr(desk, action.name)(**action.arguments)
    return desk.database.key(with_transfers=False)


@functools.lru_cache(maxsize=4)
def read_published(folder: str) -> Mapping[str, PublishedCase]:
    """Read the tasks of a folder by id.

    Raises:
        UsageError: a file is missing, or cannot be read.
    """
    root = Path(folder).expanduser()
    store = _read_store(root)
    file = next((root / name for name in TASK_FILES if (root / name).is_file()), None)
    if file is None:
        raise UsageError(f"the folder {folder} has no airline tasks", expected=_EXPECTED)
    rows = list(_rows_of_json(file) if file.suffix == ".json" else _rows_of_python(file))
    found = {}
    for number, row in enumerate(rows):
        task_id = f"test-{number}"
        user_id, instruction, actions, outputs = row
        found[task_id] = PublishedCase(
            task_id=task_id,
            store=store,
            user_id=user_id,
            instruction=instruction,
            actions=tuple(actions),
            outputs=tuple(outputs),
            gold_key=_gold_key(store, actions),
        )
    if not found:
        raise UsageError(f"{file} has no tasks", expected="a list of tasks")
    return found


def _read_store(root: Path) -> Store:
    whole = _json(root / "db.json") if (root / "db.json").is_file() else {}
    tables = {name: whole[name] if name in whole else _json(root / f"{name}.json") for name in _TABLES}
    if not all(isinstance(table, dict) and table for table in tables.values()):
        raise UsageError(f"the records in {root} are not objects", expected=_EXPECTED)
    users = {key: {"user_id": key, **row} for key, row in tables["users"].items()}
    return Store(users=users, flights=tables["flights"], reservations=tables["reservations"])


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read", got=error, expected=_EXPECTED) from error


_TaskRow = tuple[str, str, Sequence[Action], Sequence[str]]


def _rows_of_json(file: Path) -> Iterator[_TaskRow]:
    """Read tasks of tau2-bench; lists of tau-bench's tasks as JSON are read, too."""
    for number, row in enumerate(_json(file)):
        try:
            if "user_scenario" in row:
                scenario, criteria = row["user_scenario"]["instructions"], row["evaluation_criteria"] or {}
                text = scenario if isinstance(scenario, str) else _described(scenario)
                actions, outputs = criteria.get("actions") or (), criteria.get("communicate_info") or ()
                yield "", text, [Action(one["name"], one["arguments"]) for one in actions], list(map(str, outputs))
            else:
                actions = [Action(one["name"], one.get("kwargs") or one["arguments"]) for one in row["actions"]]
                yield row["user_id"], row["instruction"], actions, list(map(str, row.get("outputs") or ()))
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"task {number} of {file} cannot be read", got=f"{type(error).__name__}: {error}"
            ) from error


def _described(scenario: Mapping[str, Any]) -> str:
    """Join the parts of a scenario of tau2-bench."""
    parts = ("known_info", "reason_for_call", "unknown_info", "task_instructions")
    return "\n\n".join(str(scenario[name]).strip() for name in parts if scenario.get(name))


def _rows_of_python(file: Path) -> Iterator[_TaskRow]:
    """Read the calls ``Task(…)`` of a module, whose arguments are literals and calls ``Action(…)``."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read", got=error, expected="tasks of tau-bench") from error
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "Task":
            continue
        given = {word.arg: word.value for word in node.keywords}
        try:
            actions = [
                Action(name=values["name"], arguments=values["kwargs"])
                for call in _elements(given["actions"])
                for values in [{str(word.arg): ast.literal_eval(word.value) for word in call.keywords}]
            ]
            outputs = ast.literal_eval(given["outputs"]) if "outputs" in given else []
            yield ast.literal_eval(given["user_id"]), ast.literal_eval(given["instruction"]), actions, outputs
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            where = f"{file} line {node.lineno}"
            raise UsageError(f"the task at {where} cannot be read", got=f"{type(error).__name__}: {error}") from error


def _elements(node: ast.expr) -> list[Any]:
    if not isinstance(node, ast.List):
        raise TypeError("actions are not a list")
    return node.elts


class PublishedCustomer(RoleCustomer):
    """Customer of a published task, played as the role `user`."""

    def __init__(self, case: PublishedCase, talk: Sequence[str] = (), failed: int = 0) -> None:
        super().__init__(case, talk, failed)  # type: ignore[arg-type]
        self._published = case

    @property
    def question(self) -> tuple[str, ...]:
        """No question: the outputs are texts."""
        return ()

    def answer(self, text: str, database: Any) -> str:
        """Return the agent's message for the customer, or the last words of a customer who cannot answer any more."""
        return super().answer(text, database)

    def briefing(self) -> dict[str, Any]:
        """Return the players and the customer's instructions, for the info of `reset`."""
        template = importlib.resources.files(__package__).joinpath("data/customer.md").read_text(encoding="utf-8")
        text = template.format(instruction=self._published.instruction, stop=STOP)
        return {"players": [AGENT, USER], "instructions": {USER: text}}

    def open(self) -> str:
        """Return the first text that the customer reads."""
        return GREETING
