"""Tensors in memory that another process opens."""

import json
import subprocess
import sys

import pytest
import torch

from agentrl.weights.tensors import open_handle, pack, pickle_handles

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([7.0]), "c": torch.tensor([[1, 2]])}
OPEN_RUN = """
import json, sys, torch
handle = json.loads(sys.argv[1])
storage = torch.UntypedStorage._new_shared_filename_cpu(
    handle["manager"].encode(), handle["name"].encode(), handle["size"]
)
run = torch.empty(0, dtype=torch.uint8).set_(storage).view(torch.float32)
print(json.dumps(run.tolist()))
run.zero_()
"""
OPEN_PICKLE = """
import base64, json, pickle, sys, torch
tensors = dict(pickle.loads(base64.b64decode(sys.argv[1])))
print(json.dumps({name: tensor.tolist() for name, tensor in tensors.items()}))
for tensor in tensors.values():
    tensor.zero_()
"""


def in_another_process(program, argument):
    done = subprocess.run([sys.executable, "-c", program, argument], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_another_process_opens_a_run_and_sees_the_same_memory():
    bucket = pack(WEIGHTS, bucket_bytes=1000)[0]
    handle = json.loads(json.dumps(open_handle(bucket.run)))
    assert in_another_process(OPEN_RUN, json.dumps(handle)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert not bucket.run.any()


@pytest.mark.slow
def test_each_process_opens_its_own_pickle_without_values():
    buckets = pack({**WEIGHTS, "large": torch.ones(100_000)}, bucket_bytes=1_000_000)
    for number in range(2):  # the first process leaves zeros
        texts = [pickle_handles(bucket) for bucket in buckets]
        assert sum(map(len, texts)) < 4000
        found = {name: tensor for text in texts for name, tensor in in_another_process(OPEN_PICKLE, text).items()}
        assert found.pop("large") == [1.0 - number] * 100_000
        assert found == {name: (tensor * (1 - number)).tolist() for name, tensor in WEIGHTS.items()}
    assert not any(bucket.run.any() for bucket in buckets)
