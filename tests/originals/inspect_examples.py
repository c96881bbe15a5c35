"""Tasks of Inspect."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, accuracy, includes, match, model_graded_qa, scorer
from inspect_ai.solver import generate, prompt_template, solver, system_message, use_tools
from inspect_ai.tool import bash, tool
from inspect_ai.util import sandbox


@task
def arithmetic(most=20):
    """One answer, in a prompt template."""
    samples = [Sample(input=f"What is {n} + {n}?", target=str(2 * n), id=f"sum-{n}") for n in range(most)]
    return Task(
        dataset=MemoryDataset(samples),
        solver=[system_message("You are a calculator."), prompt_template("{prompt}\nEnd with the number."), generate()],
        scorer=[match(), includes()],
    )


@scorer(metrics=[accuracy()])
def file_scorer():
    async def score(state, target):
        return Score(value="C" if (await sandbox().read_file("note.txt")).strip() == target.text else "I")

    return score


@task
def notes():
    """The model writes a file into its sandbox by a shell."""
    samples = [
        Sample(input=f"Write {word} into note.txt.", target=word, files={"seen.txt": word}) for word in ("a", "b")
    ]
    return Task(
        dataset=MemoryDataset(samples),
        solver=[use_tools([bash(timeout=30)]), generate()],
        scorer=file_scorer(),
        sandbox="local",
    )


@tool
def broken():
    async def execute(number: int):
        """Fail.

        Args:
            number: Any number.
        """
        raise RuntimeError("the tool broke")

    return execute


@solver
def failing():
    async def solve(state, generate):
        raise ValueError("no such book")

    return solve


@scorer(metrics=[accuracy()])
def unsure(value):
    async def score(state, target):
        return Score(value=value)

    return score


@task
def unscored(first=1.0):
    """Scores that Inspect does not count; a null of JSON is NaN."""
    scorers = [unsure(float("nan") if first is None else first), unsure({"a": 1.0, "b": float("nan")})]
    return Task(dataset=MemoryDataset([Sample(input="Go.", target="x")] * 10), solver=generate(), scorer=scorers)


@task
def failures(how="tool"):
    """Solvers and tools that fail, and a scorer that asks the model."""
    solvers = {"tool": [use_tools([broken()]), generate()], "solver": [failing()], "scorer": [generate()]}
    judge = model_graded_qa() if how == "scorer" else includes()
    return Task(dataset=MemoryDataset([Sample(input="Go.", target="x")] * 10), solver=solvers[how], scorer=judge)
