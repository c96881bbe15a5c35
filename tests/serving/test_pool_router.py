from hypothesis import given
from hypothesis import strategies as st

from agentrl.serving.pool import QueuedRequest, Router, ServerSlots


def router(*limits):
    return Router([ServerSlots(limit=limit) for limit in limits])


def enter(router, session, tokens=10):
    ticket = QueuedRequest(session_id=session, tokens=tokens)
    router.enter(ticket)
    router.place()
    return ticket


def test_a_new_session_goes_where_the_fewest_tokens_are_in_flight():
    servers = router(8, 8)
    assert [enter(servers, name, tokens).server for name, tokens in [("a", 100), ("b", 30), ("c", 30), ("d", 50)]] == [
        0,
        1,
        1,
        1,
    ]
    assert enter(servers, "e").server == 0


def test_a_session_stays_where_it_is_and_waits_there():
    servers = router(1, 8)
    first = enter(servers, "a")
    second = enter(servers, "a")
    assert (first.server, second.server) == (0, None)
    servers.leave(first)
    assert servers.place() == [second]
    assert second.server == 0


def test_those_behind_a_waiting_request_are_served_elsewhere():
    servers = router(1, 1)
    enter(servers, "a")
    waiting = enter(servers, "a")
    assert enter(servers, "b").server == 1
    assert (waiting.server, list(servers.waiting)) == (None, [waiting])


def test_sessions_of_a_closed_server_move_and_stay():
    servers = router(4, 4)
    enter(servers, "a")
    servers.servers[0].limit = 0
    assert enter(servers, "a").server == 1
    servers.servers[0].limit = 4
    assert enter(servers, "a").server == 1


def test_an_ended_session_is_placed_anew():
    servers = router(4, 4)
    enter(servers, "a", tokens=100)
    servers.end_session("a")
    servers.end_session("unknown")
    assert enter(servers, "a").server == 1


def test_nothing_is_placed_while_it_is_held_or_all_are_closed():
    servers = router(2)
    servers.is_held = True
    ticket = enter(servers, "a")
    assert ticket.server is None
    servers.is_held, servers.servers[0].limit = False, 0
    assert servers.place() == []
    servers.servers[0].limit = 1
    assert servers.place() == [ticket]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "limit"]), st.integers(0, 5), st.integers(1, 9)), max_size=60
    ),
)
def test_counts_are_those_of_the_tickets_and_limits_hold(limits, events):
    servers = router(*limits)
    tickets = []
    for event, number, size in events:
        if event == "enter":
            tickets.append(enter(servers, str(number), size))
        elif event == "leave" and tickets:
            servers.leave(tickets.pop(number % len(tickets)))
        elif event == "limit":
            servers.servers[number % len(limits)].limit = size - 1
        before = [places.requests for places in servers.servers]
        for ticket in servers.place():
            before[ticket.server] += 1
            assert before[ticket.server] <= servers.servers[ticket.server].limit
        for index, places in enumerate(servers.servers):
            mine = [ticket for ticket in tickets if ticket.server == index]
            assert (places.requests, places.tokens) == (len(mine), sum(ticket.tokens for ticket in mine))
        assert list(servers.waiting) == [ticket for ticket in tickets if ticket.server is None]
