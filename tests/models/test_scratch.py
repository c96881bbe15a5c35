"""Model folders with random weights and a new tokenizer."""

import hashlib
import itertools
import json

import pytest
from transformers import AutoTokenizer

from agentrl.config.config import ScratchModelConfig
from agentrl.errors import ConfigError
from agentrl.models.load import load_model
from agentrl.models.scratch import build_scratch_model, build_scratch_tokenizer

CORPUS = [
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1 and a fridge 1.",
    "Your task is to: put a clean lettuce in diningtable.",
    "take lettuce 1 from countertop 2",
] * 20
SIZES = ScratchModelConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, vocab_size=300, max_context=512)
SINGLE = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
SINGLE += ["<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
CONVERSATION = [
    {"role": "system", "content": "Play."},
    {"role": "user", "content": [{"type": "text", "text": "A room."}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [{"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "fridge 1"}}}],
    },
    {"role": "tool", "content": "It is closed.", "tool_call_id": "1", "name": "look"},
    {"role": "assistant", "content": "done"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scratch") / "model"
    build_scratch_model(path, CORPUS, SIZES, seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_loads_with_the_configured_sizes(folder, tokenizer):
    model = load_model(folder, dtype="float32", device="cpu")
    assert len(tokenizer) <= SIZES.vocab_size
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.model_type == "qwen3"
    assert model.config.max_position_embeddings == 512
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.06, rel=0.1)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_special_tokens_are_single(tokenizer):
    assert all(len(tokenizer.encode(text)) == 1 for text in SINGLE)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text", [CORPUS[0], "Ünïcödé 漢字 🙂\n\n\t x", "<|im_start|>user\nhi<|im_end|>\n", " 12 345  "]
)
def test_every_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_markup_is_text_and_control_is_not(tokenizer):
    ids = tokenizer.encode("<think>x</think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"


def test_words_of_the_corpus_become_tokens(tokenizer):
    assert len(tokenizer.encode("take lettuce 1 from countertop 2")) < 18


@pytest.mark.parametrize(
    ("joined", "pieces"),
    [
        (True, ["take", " lettuce 1", " from", " countertop 2"]),
        (False, ["take", " lettuce", " 1", " from", " countertop", " 2"]),
    ],
)
def test_numbered_names_can_be_one_token(joined, pieces):
    tokenizer = build_scratch_tokenizer(CORPUS, vocab_size=400, max_context=64, numbered_names=joined)
    assert tokenizer.batch_decode([[i] for i in tokenizer.encode("take lettuce 1 from countertop 2")]) == pieces
    assert tokenizer.decode(tokenizer.encode("lettuce 12, lettuce 123.\n")) == "lettuce 12, lettuce 123.\n"


def test_conversation(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
    assert text == (
        "<|im_start|>system\nPlay.\n\n# Tools\n" + json.dumps(TOOLS[0]) + "\n\nTo call one, answer with\n<tool_call>\n"
        '{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nA room.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n<tool_call>\n"
        '{"name": "look", "arguments": {"at": "fridge 1"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nIt is closed.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_appending_messages_only_appends_text(tokenizer, tools):
    texts = [
        tokenizer.apply_chat_template(CONVERSATION[:n], tools=tools, tokenize=False)
        for n in range(1, len(CONVERSATION) + 1)
    ]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], tools=tools, tokenize=False, add_generation_prompt=True)
    assert texts[2].startswith(prompt)


def test_tools_without_a_system_message(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[1:2], tools=TOOLS, tokenize=False)
    assert text.startswith("<|im_start|>system\n# Tools\n")


def test_equal_seeds_write_equal_files(folder, tmp_path):
    def digests(path):
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}

    build_scratch_model(tmp_path / "same", CORPUS, SIZES, seed=1)
    build_scratch_model(tmp_path / "other", CORPUS, SIZES, seed=2)
    assert digests(tmp_path / "same") == digests(folder)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(folder)["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 200}, "vocabulary is too small: got 200, expected at least 270"),
        ({"heads": 3}, "do not fit together"),
        ({"kv_heads": 4, "heads": 2}, "do not fit together"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        build_scratch_model(tmp_path, CORPUS, SIZES.model_copy(update=change), seed=0)
