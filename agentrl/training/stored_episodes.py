"""Stored episodes of earlier runs to train on: sources, pairs, and demonstrations.

Pairs for preference training may also come from a file of conversations, whose assistant messages are compared. A row
is ``{"prompt": […], "chosen": […], "rejected": […], "tools": […]}``, each a list of messages; without ``prompt``, both
conversations are whole. Three texts, as in TRL's standard format, are a message of the user and two answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

from agentrl.config import load_config
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import SCRATCH
from agentrl.config.estimate import counted
from agentrl.errors import ConfigError, UsageError, shorten
from agentrl.message import Message
from agentrl.message.data_file import Row, read_rows
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories, step_files
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import check_same_tokens
from agentrl.training.chat_file import Chat, answer_rows, chat_of, check_chats, to_trajectory
from agentrl.training.preferences import Pair, make_pairs
from agentrl.trajectory import Trajectory

SIDES = ("chosen", "rejected")
PAIR = '{"prompt": …, "chosen": …, "rejected": …}, each a list of messages, or each a text'
"""Row of a file of pairs."""
_KTO = {"completion", "label"}
NO_KTO = (
    "rows of KTO (prompt, completion, label) are not pairs: write a good and a bad answer to the same prompt in a row"
)


def check_sources(settings: PreferencesConfig) -> list[Path]:
    """Find the trajectories of the config's sources: folders of trajectory stores, or files in them.

    Raises:
        ConfigError: the config has no source.
        UsageError: a source does not exist or contains no trajectories.
    """
    if not settings.sources:
        raise ConfigError(
            "no source of episodes is given", got="no preferences.sources", expected="--from RUN, once for each source"
        )
    return [find_store(Path(source)) for source in settings.sources]


def load_pairs(
    settings: PreferencesConfig,
    model_path: str,
    renderer: Renderer,
    *,
    max_tokens: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Pair]:
    """Load the pairs of a config's sources, for a model and its renderer: stored episodes, and files of pairs.

    Args:
        settings: The ``preferences`` section.
        model_path: Model that learns.
        renderer: Its renderer.
        max_tokens: Maximum tokens of a conversation of a file; longer ones are left out.
        say: Receives the numbers of pairs that are left out.

    Raises:
        ConfigError: a source's episodes were sampled with another tokenizer.
        TemplateError: the chat template cannot render the conversations of a file.
        UsageError: a source does not exist, or the sources contain no pair to learn from.
    """
    check_pair_tokens(settings, model_path)
    files = [store for store in check_sources(settings) if is_preference_file(store)]
    pairs = [pair for file in files for pair in read_preference_pairs(file, renderer)]
    if pairs:
        pairs = _without_useless(pairs, max_tokens=max_tokens, say=say)
    has_stores = len(files) < len(settings.sources)
    return [*pairs, *(find_pairs(settings) if has_stores or not files else ())]


def _without_useless(pairs: Sequence[Pair], *, max_tokens: int, say: Callable[[str], None]) -> list[Pair]:
    """Leave out pairs of files that are too long or whose sides are equal; raise `UsageError` if none is left."""
    fitting = [pair for pair in pairs if _longest(pair) <= max_tokens]
    useful = [pair for pair in fitting if not _are_equal(pair)]
    left_out = {
        f"longer than agent.max_tokens ({max_tokens:,})": len(pairs) - len(fitting),
        "whose two sides are equal": len(fitting) - len(useful),
    }
    counts = [f"{counted(number, 'pair')} {reason}" for reason, number in left_out.items() if number]
    if not useful:
        expected = f"pairs of at most {max_tokens:,} tokens whose sides differ"
        raise UsageError("no pair can be trained on", got=", ".join(counts), expected=expected)
    for count in counts:
        say(f"left out: {count}")
    return useful


def _longest(pair: Pair) -> int:
    return max(map(len, [*pair.better.sequences, *pair.worse.sequences]))


def _are_equal(pair: Pair) -> bool:
    better, worse = ([list(sequence.token_ids) for sequence in side.sequences] for side in (pair.better, pair.worse))
    return better == worse


def check_pair_tokens(settings: PreferencesConfig, model_path: str | None) -> None:
    """Check that files contain pairs, and that episodes were sampled with the model's tokenizer, if there is a model.

    Raises:
        ConfigError: a source's episodes were sampled with another tokenizer.
        UsageError: a source does not exist, or a row of a file is not a pair.
    """
    for store in check_sources(settings):
        columns = _first_columns(store)
        if is_preference_file(store):
            _read_preference_chats(store)
        elif columns >= _KTO:
            raise UsageError(
                f"{store} is not a file of pairs", got=", ".join(sorted(columns)), expected=PAIR, hint=NO_KTO
            )
        elif store.is_file() and next(_trajectories(store), None) is None:
            raise UsageError(
                f"{store} contains neither pairs nor episodes",
                expected=f"rows {PAIR}, or the episodes of a run: --from RUN",
            )
        elif model_path is not None:
            check_store_tokens(store, model_path)


def load_trajectories(source: str, model_path: str, environments: Set[str]) -> list[Trajectory]:
    """Load the stored episodes of some environments.

    Raises:
        ConfigError: the episodes were sampled with another tokenizer.
        UsageError: the source does not exist, or contains no episode of these environments.
    """
    store = find_store(Path(source))
    check_store_tokens(store, model_path)
    played = list(_trajectories(store))
    found = [trajectory for trajectory in played if trajectory.environment in environments]
    if not found:
        raise UsageError(
            f"no episodes of {' or '.join(sorted(environments))} found in {source}",
            got=f"{len(played)} episodes of {', '.join(sorted({t.environment for t in played})) or 'nothing'}",
            expected="episodes of the run's environment",
        )
    return found


def check_store_tokens(store: Path, model_path: str) -> None:
    """Check that a store's episodes were sampled with the model's tokenizer, if the store is in a run's folder.

    Raises:
        ConfigError: they were sampled with another tokenizer.
        UsageError: the run's model does not exist.
    """
    if (run := run_of(store)) is not None:
        check_same_tokens(f"the run {run.path}", model_of_run(run), model_path)


def model_of_run(run: RunDirectory) -> str:
    """Return a model with the tokenizer of a run's episodes: its newest checkpoint, or else its initial model.

    Raises:
        UsageError: the run has neither.
    """
    try:
        return find_model(str(run.path))
    except UsageError:  # there is no complete checkpoint
        start = load_config(run.config_file).model.path
        if run.model.is_dir():
            return str(run.model)
        if start == SCRATCH:
            raise
        return find_model(start)


def find_pairs(settings: PreferencesConfig) -> list[Pair]:
    """Find the pairs of a config's sources, without a check of the tokenizer.

    Raises:
        ConfigError: the config has no source.
        UsageError: a source does not exist, or the sources contain no pair.
    """
    stores = [store for store in check_sources(settings) if not is_preference_file(store)]
    if not stores:
        raise UsageError("the sources are files of conversations", expected="the episodes of a run: --from RUN")
    found = itertools.chain.from_iterable(map(_trajectories, stores))
    return make_pairs(found, by=settings.pairs, per_task=settings.pairs_per_task)


def policy_of(settings: PreferencesConfig) -> str:
    """Return the model of the policy that played the sources' episodes.

    Raises:
        UsageError: a source does not belong to a run, so its model is unknown.
        ConfigError: the sources' models have different tokenizers.
    """
    models = [model_of_run(first_run([store])) for store in check_sources(settings)]
    for model in models[1:]:
        check_same_tokens(f"the model {model} of another source", model, models[0])
    return models[0]


def find_store(source: Path) -> Path:
    """Return the folder or the file of a trajectory store.

    Args:
        source: A run, its folder ``trajectories``, a file of that folder, or a file of pairs.

    Raises:
        UsageError: the source does not exist or contains no trajectories.
    """
    store = source / "trajectories" if (source / "trajectories").is_dir() else source
    if store.is_file() and (store.suffix == ".jsonl" or is_preference_file(store)):
        return store.resolve()
    if not step_files(store):
        raise UsageError(
            f"no trajectories found in {source}",
            got="a file of another kind"
            if source.is_file()
            else "a folder without step-*.jsonl"
            if source.exists()
            else "no such file or folder",
            expected="a run, its trajectories folder, or a file of it such as step-000012.jsonl",
        )
    return store.resolve()


def run_of(store: Path) -> RunDirectory | None:
    """Return the run whose folder contains a store; ``None`` if there is none."""
    folder = store.parent.parent if store.is_file() else store.parent
    return RunDirectory(folder) if (folder / "config.yaml").is_file() else None


def _trajectories(store: Path) -> Iterator[Trajectory]:
    return (stored.trajectory for stored in read_trajectories(store))


def first_run(sources: Sequence[Path]) -> RunDirectory:
    """Return the run of the first source.

    Raises:
        UsageError: the source is not in a run's folder.
    """
    run = run_of(find_store(sources[0]))
    if run is None:
        raise UsageError(
            "without a config, the first source must be in a run's folder",
            got=str(sources[0]),
            expected="the trajectories of a run, a config, or a file of pairs and --model",
            hint="for example: agentrl dpo --model MODEL --from FILE",
        )
    return run


def is_preference_file(file: Path) -> bool:
    """Return True if the first row of a file has a column of a pair of conversations."""
    return not _first_columns(file).isdisjoint(SIDES)


def _first_columns(file: Path) -> Set[str]:
    """Return the columns of a file's first row; none if it cannot be read."""
    try:
        first = next(iter(read_rows(file, "pairs")), None) if file.is_file() else None
    except UsageError:
        return frozenset()
    return frozenset() if first is None else first.values.keys()


def read_preference_pairs(file: Path, renderer: Renderer) -> list[Pair]:
    """Read the pairs of a file, tokenized for a model.

    Raises:
        UsageError: a row is not a pair of conversations; names the line.
        TemplateError: the model's chat template cannot render them turn by turn.
    """
    chats = _read_preference_chats(file)
    check_chats([chat for pair in chats for chat in pair], renderer)
    return [
        Pair(better=to_trajectory(better, renderer), worse=to_trajectory(worse, renderer)) for better, worse in chats
    ]


def _read_preference_chats(file: Path) -> list[tuple[Chat, ...]]:
    return [_pair_of(row) for row in read_rows(file, "pairs")]


def _pair_of(row: Row) -> tuple[Chat, ...]:
    pair = tuple(_side(row, side) for side in SIDES)
    better, worse = (_before_answer(chat) for chat in pair)
    if better != worse:
        raise UsageError(
            f"chosen and rejected of {row.location} begin with different prompts",
            got=" and ".join(shorten(" ".join(message.text for message in prompt)) for prompt in (better, worse)),
            expected="the same messages before the first answer",
            hint="with a column prompt, chosen and rejected do not repeat it" if row.values.get("prompt") else None,
        )
    return pair


def _before_answer(chat: Chat) -> list[Message]:
    return list(itertools.takewhile(lambda message: message.role != "assistant", chat.messages))


def _side(row: Row, side: str) -> Chat:
    prompt, own = answer_rows(row.values, side)
    if not own:
        raise UsageError(
            f"{row.location} is not a pair of conversations",
            got=f"the columns {', '.join(row.columns)}",
            expected=PAIR,
            hint=NO_KTO if set(row.columns) >= _KTO else None,
        )
    values = {"messages": [*prompt, *own], "tools": row.values.get("tools")}
    return chat_of(Row(location=row.location, values=values, number=row.number))
