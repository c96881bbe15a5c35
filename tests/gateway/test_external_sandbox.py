"""An external agent program in a sandbox reaches only its own session of the gateway."""

import asyncio
import textwrap

import pytest
from agentrl.agent_loops.external import External
from support.sandboxes import needs_bubblewrap

from agentrl.errors import Outcome, UsageError
from agentrl.gateway import Gateway
from agentrl.sandbox.channel import Ports
from agentrl.sandbox.local import UNCONFINED, LocalSandbox

from .conftest import AGENT

LOCAL = {"type": "local"}
ATTACK = """
import socket, urllib.error
base, (host, port) = os.environ["AGENTRL_URL"], os.environ["AGENTRL_URL"].split("/")[2].split(":")
own, other, key = base.rpartition("/s/")[2], *sys.argv[1:3]
shut, gateway = map(int, sys.argv[3:5])
assert ask("hm") == "42"
reached = []
def try_path(path, key, body=b"{}"):
    request = urllib.request.Request(f"http://{host}:{port}{path}", body, {"Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(request) as answer: reached.append((path, answer.status))
    except urllib.error.HTTPError as error:
        if error.code != 404: reached.append((path, error.code))
chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
for path in (f"/s/{other}/v1/chat/completions", f"/s/{own}/../{other}/v1/chat/completions", "/v1/chat/completions",
             f"/s/{own}%2f..%2f{other}/v1/chat/completions", f"//s/{other}/v1/chat/completions", f"/s/{other}/step",
             f"/s/{own}/../../v1/chat/completions", f"/s/{other}/reward", "/metrics", "/health", "/", "/s/",
             f"/s/{own}/"):
    for secret in (key, os.environ["OPENAI_API_KEY"], os.environ["AGENTRL_SECRET"]):
        try_path(path, secret, chat)
try_path("/health", key, None)
with socket.create_connection((host, int(port)), 5) as end:
    end.sendall(f"POST /s/{own}/v1/nothing HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 0\\r\\n\\r\\n"
                f"POST /s/{other}/v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n"
                f"Authorization: Bearer {key}\\r\\nContent-Length: {len(chat)}\\r\\n\\r\\n".encode() + chat)
    heard = b""
    while piece := end.recv(65536): heard += piece
    if heard.count(b" 404 ") != 2: reached.append(("smuggled", heard))
for place in (("127.0.0.1", shut), ("127.0.0.1", gateway), ("::1", gateway), ("1.1.1.1", 443), ("169.254.169.254", 80)):
    try: socket.create_connection(place, 2).close()
    except OSError: continue
    reached.append(place)
for name in list(os.environ):
    if name not in ("PATH", "AGENTRL_URL"): del os.environ[name]
print(reached or "42")
"""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Writes a program of these lines, after `AGENT`, into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(lines):
        tmp_path.joinpath("agent.py").write_text(AGENT + textwrap.dedent(lines))
        return "{python} agent.py"

    return write


@needs_bubblewrap
async def test_a_program_in_a_sandbox_plays_an_episode(run_loop, agent):
    command = agent("""
        task = json.load(open(os.environ["AGENTRL_TASK"]))
        assert task["prompt"] == os.environ["AGENTRL_PROMPT"] == sys.stdin.read(), task
        assert os.environ["EXTRA"] == "1" and "HOST_VARIABLE" not in os.environ
        assert os.environ["NO_PROXY"] == "*" and os.environ["no_proxy"] == "127.0.0.1,localhost"
        print(ask(task["prompt"]))
        print("aside", file=sys.stderr)
        json.dump({"reward": 0.25}, open("reward.json", "w"))
    """)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOST_VARIABLE", "1")
        variables = {"EXTRA": "1", "NO_PROXY": "*"}
        loop = External(command=command, sandbox=LOCAL, variables=variables, reward_file="reward.json")
        trajectory, script = await run_loop(loop, "it is 42")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 0.25), trajectory.error
    assert trajectory.log == "it is 42\naside\n"
    script.check(trajectory)


@needs_bubblewrap
async def test_a_program_reaches_its_own_session_and_nothing_else(run_loop, agent):
    agent(ATTACK)
    heard = []

    async def hear(reader, writer):
        heard.append(1)
        writer.close()

    loop = External(command="true", sandbox=LOCAL)
    gateway = await loop._gateway()
    async with await asyncio.start_server(hear, "127.0.0.1", 0) as server:
        shut, own = server.sockets[0].getsockname()[1], gateway.url.rpartition(":")[2]

        class WithNeighbour(External):
            """Plays while another session of the same gateway is open, whose key the program knows."""

            async def run(self, episode):
                async with gateway.session(episode) as other:
                    words = ["{python}", "agent.py", other.id, other.key, str(shut), str(own)]
                    inner = External(command=words, sandbox=LOCAL)
                    inner._gateways = self._gateways
                    await inner.run(episode)
                    assert other.answers == 0

        attacked = WithNeighbour(command="true", sandbox=LOCAL)
        attacked._gateways = loop._gateways
        trajectory, _ = await run_loop(attacked, "42")
    assert heard == []
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0), (trajectory.error, trajectory.log)


@needs_bubblewrap
@pytest.mark.usefixtures("time_from_the_first_request")
@pytest.mark.parametrize(
    ("lines", "options", "outcome", "says"),
    [
        ('ask("hm")\nsys.exit(3)', {}, Outcome.POLICY_ERROR, "the program ended with 3"),
        ('print("42")', {}, Outcome.ENVIRONMENT_ERROR, "never got an answer from the gateway"),
        ('ask("hm")', {"reward_file": "none.json"}, Outcome.ENVIRONMENT_ERROR, "left no reward in none.json"),
        ('print(ask("hm"), flush=True)\nimport time; time.sleep(60)', {"seconds": 2}, Outcome.TRUNCATED_TIME, None),
        ('ask("hm")\nx = bytearray(2**30)', {}, Outcome.POLICY_ERROR, "the program ended with"),
    ],
)
async def test_a_program_in_a_sandbox_that_fails_says_whose_fault_it_is(run_loop, agent, lines, options, outcome, says):
    sandbox = {**LOCAL, "limits": {"memory_bytes": 2**28}}
    trajectory, _ = await run_loop(External(command=agent(lines), sandbox=sandbox, **options), "42")
    assert trajectory.outcome is outcome
    assert says is None or says in trajectory.error
    assert outcome is not Outcome.TRUNCATED_TIME or trajectory.log == "42\n"


@needs_bubblewrap
async def test_a_lost_sandbox_is_not_the_policys_fault(run_loop, agent, monkeypatch):
    opened = []
    start = LocalSandbox.start

    async def note(self):
        await start(self)
        opened.append(self)

    async def kill(self, *words, **options):
        opened[0]._program.kill()
        return await carry(self, *words, **options)

    carry = Ports._carry
    monkeypatch.setattr(LocalSandbox, "start", note)
    monkeypatch.setattr(Ports, "_carry", kill)
    trajectory, _ = await run_loop(External(command=agent('ask("hm")'), sandbox=LOCAL), "42")
    assert trajectory.outcome is Outcome.SANDBOX_ERROR


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sandbox": {"network": "none"}}, "cannot reach the policy"),
        ({"sandbox": {"network": ["example.org"]}}, "a list that contains gateway"),
        ({"sandbox": "local"}, "expected {type: local}"),
        ({"sandbox": {"type": "http", "url": "http://127.0.0.1:1"}}, "cannot be reached from an http sandbox"),
        ({"sandbox": {"options": {"unconfined": UNCONFINED}}}, "can use this machine's whole network"),
        ({"sandbox": {"tpye": "local"}}, "Did you mean 'type'"),
        ({"sandbox": LOCAL, "command": None, "function": "builtins:print"}, "does not run in a sandbox"),
    ],
)
def test_a_sandbox_that_cannot_be_is_refused_before_the_run(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        External(**{"command": "true", **options})


def test_files_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").touch()
    with pytest.raises(UsageError, match=r"the same name in the sandbox: got a/x\.py, b/x\.py"):
        External(command="sh a/x.py b/x.py", sandbox=LOCAL)


async def test_a_session_that_has_ended_serves_no_connection(played):
    gateways = []

    async def play(gateway: Gateway, session):
        gateways.append(gateway)
        await gateway.protocol_of(session)

    await played(play, "42")
    assert gateways[0]._runners == {}
