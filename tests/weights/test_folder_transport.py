import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from support.vision import vision_model, vision_tokenizer

from agentrl.errors import TrainingError, UsageError
from agentrl.models.load import load_model
from agentrl.weights import AdapterTransport, FolderTransport, write_served_model
from agentrl.weights.folder import (
    INDEX,
    PREFIX,
    OwnedFolder,
    _open_locked,
    _separate,
    clear_abandoned,
    lock_file,
    write_tensors,
)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 4, generator=generator)
    return {
        "a": whole,
        "tied": whole,
        "part": whole[2:4],
        "turned": whole.t(),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "count": torch.tensor(7),
    }


def read(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("shard_bytes", [1 << 20, 140, 101, 100, 1])
def test_every_tensor_is_read_as_it_was_written(tensors, tmp_path, shard_bytes):
    size = write_tensors(tensors, tmp_path, shard_bytes=shard_bytes)
    found = read(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    if shard_bytes == 1 << 20:
        assert files == {"model.safetensors"}
    else:
        places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        assert (places.keys(), set(places.values())) == (tensors.keys(), files)
        shards = [load_file(path) for path in tmp_path.glob("*.safetensors")]
        assert all(len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= shard_bytes for shard in shards)
        assert len(files) == {140: 3, 101: 5, 100: 5, 1: 6}[shard_bytes]


async def test_adapters_are_written_by_their_writer_and_measured(tensors, tmp_path):
    def write(weights, folder):
        write_tensors(weights, folder)
        (folder / "adapter_config.json").write_text("{}")

    transport = AdapterTransport(tmp_path, write)
    prepared = await transport.prepare(tensors, 3)
    assert {path.name for path in prepared.folder.iterdir()} == {"model.safetensors", "adapter_config.json"}
    assert prepared.size == (prepared.folder / "model.safetensors").stat().st_size
    assert prepared.tensors().keys() == tensors.keys()
    await transport.close()


async def test_versions_exist_until_they_are_discarded(tensors, tmp_path):
    transport = FolderTransport(tmp_path)
    first = await transport.prepare(tensors, 1)
    second = await transport.prepare(tensors, 2)
    assert sorted(transport.path.iterdir()) == sorted([first.folder, second.folder])
    await first.discard()
    again = await transport.prepare(tensors, 2)
    assert again.folder != second.folder
    assert sorted(transport.path.iterdir()) == sorted([again.folder, second.folder])
    assert second.folder.is_absolute()
    await transport.close()
    await transport.close()
    assert list(tmp_path.iterdir()) == []


async def test_removed_version_can_be_discarded(tensors, tmp_path):
    transport = FolderTransport(tmp_path)
    written = await transport.prepare(tensors, 1)
    shutil.rmtree(written.folder)
    await written.discard()
    await transport.close()
    assert not written.folder.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_closed_and_foreign_folders_leave_no_file_open(tmp_path):
    other, before = OwnedFolder(tmp_path / "other"), os.listdir("/proc/self/fd")
    OwnedFolder(tmp_path).close()
    assert clear_abandoned(tmp_path / "other") == []
    assert os.listdir("/proc/self/fd") == before
    other.close()


def test_a_lock_that_vanishes_before_it_is_taken_is_made_again(tmp_path, monkeypatch):
    path, real, before = tmp_path / "a.lock", fcntl.flock, os.listdir("/proc/self/fd")
    stolen = []

    def steal(descriptor, operation):
        real(descriptor, operation)
        if not stolen:
            stolen.append(path.unlink())

    monkeypatch.setattr(fcntl, "flock", steal)
    descriptor = _open_locked(path)
    assert os.fstat(descriptor).st_ino == path.stat().st_ino
    os.close(descriptor)
    assert os.listdir("/proc/self/fd") == before


def test_folder_without_its_lock_file_can_be_closed(tmp_path):
    folder = OwnedFolder(tmp_path)
    lock_file(folder.path).unlink()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_only_tensors_that_share_memory_are_copied():
    whole, matrix = torch.arange(6.0), torch.arange(4.0).reshape(2, 2)
    separate = _separate({"whole": whole, "again": whole, "part": torch.arange(9.0)[3:6], "turned": matrix.t()})
    assert separate["whole"].data_ptr() == whole.data_ptr() != separate["again"].data_ptr()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in separate.values())
    assert {name: tensor.tolist() for name, tensor in separate.items()} == {
        "whole": whole.tolist(),
        "again": whole.tolist(),
        "part": [3.0, 4.0, 5.0],
        "turned": [[0.0, 2.0], [1.0, 3.0]],
    }


async def test_a_failed_write_leaves_nothing_that_could_be_read(tensors, tmp_path, monkeypatch):
    transport = FolderTransport(tmp_path)

    def half(weights, folder, *, shard_bytes):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.weights.folder.write_tensors", half)
    with pytest.raises(TrainingError, match="cannot write the weights of version 3"):
        await transport.prepare(tensors, 3)
    assert list(transport.path.iterdir()) == []
    await transport.close()


async def test_shared_memory_is_used_where_it_exists_and_the_temporary_folder_elsewhere(tmp_path, monkeypatch):
    for memory, expected in ((tmp_path / "memory", tmp_path / "memory"), (tmp_path / "none", tmp_path / "temporary")):
        (tmp_path / "memory").mkdir(exist_ok=True)
        monkeypatch.setattr("agentrl.weights.folder.MEMORY", memory)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        transport = FolderTransport.shared_memory()
        assert transport.path.parent == expected
        await transport.close()


ENDS = """
import sys
from pathlib import Path
from agentrl.weights.folder import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
(folder.path / "model.safetensors").write_bytes(b"weights")
print(folder.path, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_removes_its_folder(tmp_path):
    result = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True)
    assert result.stdout.startswith(str(tmp_path)), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_dead_processes_are_removed(tmp_path):
    mine = OwnedFolder(tmp_path)
    child = os.fork()
    if child == 0:
        folder = OwnedFolder(tmp_path)
        (folder.path / "model.safetensors").write_bytes(b"weights")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 1
    (tmp_path / "somebody-else").mkdir()
    other = OwnedFolder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [mine.path.name, lock_file(mine.path).name, other.path.name, lock_file(other.path).name, "somebody-else"]
    )
    assert str(os.getpid()) in mine.path.name
    mine.close()
    assert not mine.path.exists()
    assert clear_abandoned(tmp_path) == []
    other.close()


def test_removed_folders_are_returned(tmp_path):
    left = [tmp_path / f"{PREFIX}{name}" for name in ("1-a", "2-b")]
    for folder in left:
        folder.mkdir()
    assert clear_abandoned(tmp_path) == left
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tied", [True, False])
def test_the_served_model_is_the_model_untied(tmp_path, tied):
    model = tiny_model(vocab_size=300, tied=tied)
    write_served_model(model, build_tokenizer("qwen3", vocab_size=280), tmp_path / "served")
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["architectures"]) == (False, ["Qwen3ForCausalLM"])
    assert config["dtype"] == "float32"
    assert not (tmp_path / "served" / "generation_config.json").exists()
    served = load_model(tmp_path / "served", dtype="float32", device="cpu")
    assert served.lm_head.weight.data_ptr() != served.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(20)[None]
    assert torch.equal(served(ids).logits, model(ids).logits)
    assert model.config.tie_word_embeddings is tied


def test_a_served_model_with_a_part_for_text_is_untied_in_both_places(tmp_path):
    tokenizer = vision_tokenizer()
    write_served_model(vision_model("qwen2_5_vl", tokenizer), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, False)


def test_a_model_without_a_head_cannot_be_served(tmp_path):
    with pytest.raises(UsageError, match=r"got Qwen3Model, expected a tensor lm_head\.weight"):
        write_served_model(tiny_model().model, build_tokenizer("qwen3"), tmp_path)
