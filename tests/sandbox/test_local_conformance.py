"""The conformance kit on the local back end, rule by rule, and the kit itself on a sandbox that holds nothing back."""

import pytest

from agentrl.errors import UnknownNameError, UsageError
from agentrl.sandbox import SandboxSpec, isolation, local
from agentrl.sandbox.allow_list import AllowList
from agentrl.sandbox.local import UNCONFINED
from agentrl.testing.report import CheckStatus, RuleFailed
from agentrl.testing.sandbox_check import RULES, check_sandbox
from agentrl.testing.sandbox_rules import behaviour, network, security
from agentrl.testing.sandbox_subject import SandboxSubject


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
@pytest.mark.slow
async def test_local_sandboxes_keep_every_rule(rule):
    report = await check_sandbox("local", only=[rule])
    (row,) = report.rows
    assert row.status in (CheckStatus.PASSED, CheckStatus.WARNED), report


@pytest.mark.parametrize(
    ("harmless", "words"),
    [
        (security.writes_only_where_it_may, "."),
        (behaviour.lets_no_path_lead_out, "."),
        (security.hides_files_of_the_host, "found in"),
        (security.hides_the_code_of_agentrl, "found"),
    ],
)
async def test_rules_notice_a_sandbox_without_walls(harmless, words):
    subject = SandboxSubject(SandboxSpec(network="all", options={"unconfined": UNCONFINED}))
    with pytest.raises(RuleFailed, match=words):
        await harmless(subject)


def has_all_of_the_network(*words, **options):
    return [word for word in isolation.arguments(*words, **options) if word != "--unshare-net"]


async def test_the_rule_about_the_network_notices_one(monkeypatch):
    monkeypatch.setattr(local, "arguments", has_all_of_the_network)
    with pytest.raises(RuleFailed, match="reached: TCP to 0"):
        await security.reaches_no_network(SandboxSubject(SandboxSpec()))


async def test_the_rule_about_hosts_notices_a_proxy_that_checks_nothing(monkeypatch):
    monkeypatch.setattr(AllowList, "permits", lambda *_: True)
    with pytest.raises(RuleFailed, match="a host that is not listed was reached"):
        await network.reaches_listed_hosts_only(SandboxSubject(SandboxSpec()))


async def test_a_sandbox_without_walls_is_not_attacked():
    with pytest.raises(UsageError, match="would hit this machine"):
        await check_sandbox({"type": "local", "network": "all", "options": {"unconfined": UNCONFINED}})


async def test_unknown_rule_suggests_the_nearest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'stops a fork bomb'"):
        await check_sandbox("local", only=["stops a fork bom"])
