"""Tasks and splits."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.task import Task, TaskSource
from agentrl.testing.env_subject import Broken, Finding, Missing, Subject, Suspect, until


def has_tasks(subject: Subject) -> Finding:
    """Every split has tasks, and gives the same one for the same number."""
    sizes = {}
    for split in subject.spec.splits:
        source = subject.spec.tasks(split, **subject.options)
        if len(source) == 0:
            raise Broken(f"split {split} has no tasks")
        for index in (0, len(source) - 1):
            if repr(source[index]) != repr(subject.spec.tasks(split, **subject.options)[index]):
                raise Broken(f"task {index} of {split} is another one when the split is made again")
        sizes[split] = len(source)
    return Finding(detail=", ".join(f"{split} {size:,}" for split, size in sizes.items()))


def keeps_splits_apart(subject: Subject) -> Finding:
    """No two splits share a task: neither an id, nor a seed with the same options, nor the state of an opening."""
    if len(subject.spec.splits) < 2:
        raise Missing("one split")
    sources = {split: subject.spec.tasks(split, **subject.options) for split in subject.spec.splits}
    compared, total = _compare_tasks(sources, subject), sum(map(len, sources.values()))
    openings = _compare_openings(sources, subject)
    what = "all" if compared == total else f"{compared:,} of {total:,}"
    return Finding(detail=f"{what} tasks compared, {openings} openings")


def _compare_tasks(sources: dict[str, TaskSource], subject: Subject) -> int:
    owners: dict[int, str] = {}
    compared = 0
    for split, source in sources.items():
        for task in until(subject.effort.split_s, _some_tasks(source, subject.effort.split_tasks)):
            compared += 1
            for what, key in _identities(task).items():
                if owners.setdefault(hash((what, key)), split) != split:
                    raise Broken(f"task {task.id} of {split} has the {what} of a task of another split")
    return compared


def _identities(task: Task) -> dict[str, str]:
    start = (task.seed, sorted(task.options.items()), task.prompt)
    return {"id": task.id, "seed and options": repr(start)}


def _some_tasks(source: TaskSource, most: int) -> Iterator[Task]:
    """All tasks; of many the first, and others at equal distances."""
    first = range(min(len(source), most if len(source) <= most else most // 2))
    rest = range(len(first), len(source), max(1, 2 * len(source) // most))
    return (source[index] for numbers in (first, rest) for index in numbers)


def _compare_openings(sources: dict[str, TaskSource], subject: Subject) -> int:
    """How many openings were compared by the key of their state; none where there are no keys."""
    owners: dict[str, str] = {}
    compared, shared = 0, []
    with subject.session() as session:
        if session.find("state_key") is None:
            return 0
        for split, source in sources.items():
            tasks = _some_tasks(source, subject.effort.openings)
            for task in until(subject.effort.openings_s / len(sources), tasks):
                session.reset(task)
                compared += 1
                if owners.setdefault(str(session.call("state_key")), split) != split:
                    shared.append(f"{task.id} of {split}")
    if shared:
        raise Suspect(f"{len(shared)} of {compared} openings are also those of another split, one {shared[0]}")
    return compared
