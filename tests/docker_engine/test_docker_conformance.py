"""The conformance kit on real containers, rule by rule."""

import pytest

from agentrl.testing.report import CheckStatus
from agentrl.testing.sandbox_check import RULES, check_sandbox


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
async def test_docker_sandboxes_keep_every_rule(rule, spec):
    report = await check_sandbox(spec, only=[rule])
    (row,) = report.rows
    assert row.status is CheckStatus.PASSED, report
