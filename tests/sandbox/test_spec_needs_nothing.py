"""What a sandbox's section of a config becomes, and which limits a command gets; no sandbox is needed."""

from typing import Any

import pytest

from agentrl.errors import UsageError
from agentrl.sandbox import Limits, SandboxSpec, read_spec
from agentrl.sandbox.spec import DEFAULT_LIMITS, ExecResult


def test_plain_data_become_a_spec() -> None:
    given = {
        "type": "local",
        "network": ["example.org", "gateway"],
        "limits": {"seconds": 5, "processes": 3},
        "env": {"COUNT": 7},
        "files": {"a.txt": "größer", "b.bin": b"\xff"},
        "options": {"readable": ["/data"]},
    }
    spec = read_spec(given)
    assert spec.env == {"COUNT": "7"}
    assert spec.files == {"a.txt": "größer".encode(), "b.bin": b"\xff"}
    assert (spec.limits.seconds, spec.limits.processes) == (5, 3)
    assert spec.limits.memory_bytes == DEFAULT_LIMITS.memory_bytes
    assert (spec.network, spec.hosts, spec.uses_gateway) == (("example.org", "gateway"), ("example.org",), True)
    assert read_spec(spec) is spec
    assert read_spec("docker") == SandboxSpec(type="docker")


@pytest.mark.parametrize(
    ("network", "hosts", "uses_gateway"),
    [("none", (), False), ("all", (), False), ("gateway", (), True), (("a.org",), ("a.org",), False)],
)
def test_reachable_hosts_of_each_network_setting(network: Any, hosts: tuple[str, ...], uses_gateway: bool) -> None:
    spec = SandboxSpec(network=network)
    assert (spec.hosts, spec.uses_gateway) == (hosts, uses_gateway)


@pytest.mark.parametrize(
    ("own", "other", "seconds", "processes", "output_bytes"),
    [
        ({"seconds": 9}, None, 9, None, None),
        ({"seconds": 9, "processes": 4}, {"seconds": 20, "output_bytes": 5}, 9, 4, 5),
        ({"seconds": 9, "processes": 4}, {"seconds": 2, "processes": 7}, 2, 4, None),
        ({}, {"processes": 7}, None, 7, None),
    ],
)
def test_a_command_gets_the_lower_of_two_limits(
    own: Any, other: Any, seconds: Any, processes: Any, output_bytes: Any
) -> None:
    found = Limits(**own).narrow(None if other is None else Limits(**other))
    assert found == Limits(seconds=seconds, processes=processes, output_bytes=output_bytes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"typ": "local"}, r"sandbox has no key 'typ'.*Did you mean 'type'"),
        ({"limits": {"second": 1}}, r"sandbox.limits has no key 'second'.*Did you mean 'seconds'"),
        ({"limits": 5}, "sandbox.limits is invalid: got 5, expected keys and values"),
        ({"limits": {"seconds": 0}}, "limit seconds is invalid: got 0, expected a number above 0"),
        ({"limits": {"processes": 1.5}}, "limit processes is invalid: got 1.5, expected a whole number"),
        ({"limits": {"seconds": True}}, "limit seconds is invalid: got True"),
        ({"limits": {"output_bytes": 2**61}}, "limit output_bytes is invalid"),
        ({"env": ["A"]}, "sandbox.env is invalid"),
        ({"image": 5}, "sandbox.image is invalid: got 5, expected text"),
        ({"network": "some"}, r"sandbox.network is invalid: got 'some'"),
        ({"network": "nones"}, "Did you mean 'none'"),
        ({"network": []}, "sandbox.network is invalid"),
        ({"network": ["a.org", "all"]}, "sandbox.network is invalid"),
        ({"network": ["a.org", 5]}, "expected none, all, or a list of hosts"),
        ({"network": 5}, "expected none, all, or a list of hosts"),
    ],
)
def test_error_names_the_invalid_setting(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_spec(given)


def test_limits_end_at_the_largest_number() -> None:
    assert Limits(file_bytes=2**60).non_null == {"file_bytes": 2**60}
    assert Limits(seconds=0.5).non_null == {"seconds": 0.5}


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "succeeded"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_a_command_succeeds_if_it_ends_in_time_with_0(exit_code: int, timed_out: bool, succeeded: bool) -> None:
    assert ExecResult(exit_code=exit_code, stdout=b"", stderr=b"", timed_out=timed_out).is_success is succeeded
