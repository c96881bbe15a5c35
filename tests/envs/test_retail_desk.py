"""The desk's tools and rules, and how the customer talks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from agentrl.envs.desks.arithmetic import calculate
from agentrl.envs.retail.customer import PATIENCE, Customer
from agentrl.envs.retail.database import Database, Store
from agentrl.envs.retail.desk import Desk
from agentrl.envs.retail.hearing import figures_in, hear
from agentrl.envs.retail.phrases import STOP
from agentrl.envs.retail.requests import Fact, Persona, Request, RequestKind, Scenario, Topic

from agentrl.errors import ToolError


def variant(item_id: str, color: str, price: float, available: bool = True) -> dict[str, Any]:
    return {"item_id": item_id, "options": {"color": color}, "available": available, "price": price}


def order(order_id: str, status: str, *items: str, method: str = "credit_card_1") -> dict[str, Any]:
    prices = {"11": 20.0, "21": 50.0}
    rows = [
        {
            "name": {"1": "Mug", "2": "Lamp"}[item[0]],
            "product_id": item[0],
            "item_id": item,
            "options": {"color": "red"},
            "price": prices[item],
        }
        for item in items
    ]
    total = sum(row["price"] for row in rows)
    history = [{"transaction_type": "payment", "amount": total, "payment_method_id": method}]
    address = {"address1": "1 Elm", "address2": "", "city": "Boston", "state": "MA", "country": "USA", "zip": "02101"}
    return {
        "order_id": order_id,
        "user_id": "ann_lee_1",
        "address": address,
        "items": rows,
        "status": status,
        "payment_history": history,
    }


@pytest.fixture
def desk() -> Desk:
    """A shop with a mug in three colours, a lamp, and one customer."""
    methods = {
        "credit_card_1": {"source": "credit_card", "id": "credit_card_1", "last_four": "1111"},
        "paypal_1": {"source": "paypal", "id": "paypal_1"},
        "gift_card_1": {"source": "gift_card", "id": "gift_card_1", "balance": 30.0},
    }
    user = {
        "user_id": "ann_lee_1",
        "name": {"first_name": "Ann", "last_name": "Lee"},
        "email": "ann.lee1@example.com",
        "address": {"zip": "02101"},
        "payment_methods": methods,
        "orders": ["#W1", "#W2", "#W3"],
    }
    mug = {"11": variant("11", "red", 20.0), "12": variant("12", "blue", 24.5), "13": variant("13", "pink", 9.0, False)}
    lamp = {"21": variant("21", "red", 50.0), "22": variant("22", "blue", 95.0)}
    products = {
        "1": {"name": "Mug", "product_id": "1", "variants": mug},
        "2": {"name": "Lamp", "product_id": "2", "variants": lamp},
    }
    orders = {
        "#W1": order("#W1", "pending", "11", "21"),
        "#W2": order("#W2", "delivered", "11", "21"),
        "#W3": order("#W3", "pending", "11", method="gift_card_1"),
        "#W4": order("#W4", "processed", "11"),
    }
    shop = Store(users={"ann_lee_1": user}, products=products, orders=orders)
    return Desk(Database(shop, {"identified": ["ann_lee_1"]}))


NEEDS_TO_KNOW_WHO_CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("get_user_details", ("ann_lee_1",)),
    ("get_order_details", ("#W1",)),
    ("cancel_pending_order", ("#W1", "no longer needed")),
    ("modify_pending_order_address", ("#W1", "2 Oak", "", "Miami", "FL", "USA", "33101")),
    ("modify_pending_order_items", ("#W1", ["11"], ["12"], "paypal_1")),
    ("modify_pending_order_payment", ("#W1", "paypal_1")),
    ("modify_user_address", ("ann_lee_1", "2 Oak", "", "Miami", "FL", "USA", "33101")),
    ("return_delivered_order_items", ("#W2", ["11"], "credit_card_1")),
    ("exchange_delivered_order_items", ("#W2", ["11"], ["12"], "paypal_1")),
    ("transfer_to_human_agents", ("Help.",)),
]


@pytest.mark.parametrize(("tool", "arguments"), NEEDS_TO_KNOW_WHO_CALLS)
def test_nothing_is_shown_or_changed_before_the_customer_is_identified(
    desk: Desk, tool: str, arguments: tuple[Any, ...]
) -> None:
    unknown = Desk(Database(desk.database.store))
    before = unknown.database.key()
    with pytest.raises(ToolError, match="find_user_id_by_email or find_user_id_by_name_zip first"):
        getattr(unknown, tool)(*arguments)
    assert unknown.database.key() == before
    unknown.find_user_id_by_email("ann.lee1@example.com")
    getattr(unknown, tool)(*arguments)


def balance(desk: Desk) -> float:
    user = desk.database.user("ann_lee_1")
    assert user is not None
    return float(user["payment_methods"]["gift_card_1"]["balance"])


def test_users_are_found(desk: Desk) -> None:
    assert desk.find_user_id_by_email(" Ann.Lee1@example.com") == "ann_lee_1"
    assert desk.find_user_id_by_name_zip("ann", "LEE", "02101") == "ann_lee_1"
    assert orjson.loads(desk.get_user_details("ann_lee_1"))["orders"] == ["#W1", "#W2", "#W3"]
    assert orjson.loads(desk.list_all_product_types()) == {"Mug": "1", "Lamp": "2"}
    assert orjson.loads(desk.get_product_details("1"))["variants"]["13"]["available"] is False


def test_cancelling_gives_the_money_back(desk: Desk) -> None:
    cancelled = orjson.loads(desk.cancel_pending_order("#W3", "no longer needed"))
    assert (cancelled["status"], cancelled["cancel_reason"]) == ("cancelled", "no longer needed")
    assert cancelled["payment_history"][1:] == [
        {"transaction_type": "refund", "amount": 20.0, "payment_method_id": "gift_card_1"}
    ]
    assert balance(desk) == 50.0


def test_items_are_changed_once_and_the_difference_is_paid(desk: Desk) -> None:
    changed = orjson.loads(desk.modify_pending_order_items("#W1", ["11"], ["12"], "gift_card_1"))
    assert [(item["item_id"], item["price"]) for item in changed["items"]] == [("12", 24.5), ("21", 50.0)]
    assert changed["payment_history"][1] == {
        "transaction_type": "payment",
        "amount": 4.5,
        "payment_method_id": "gift_card_1",
    }
    assert balance(desk) == 25.5
    with pytest.raises(ToolError, match="is not pending: got pending \\(items modified\\)"):
        desk.modify_pending_order_items("#W1", ["21"], ["22"], "paypal_1")
    moved = desk.modify_pending_order_address("#W1", "2 Oak", "", "Miami", "FL", "USA", "33101")
    assert orjson.loads(moved)["address"]["city"] == "Miami"


def test_the_payment_method_is_changed_once(desk: Desk) -> None:
    changed = orjson.loads(desk.modify_pending_order_payment("#W3", "paypal_1"))
    kinds = [(row["transaction_type"], row["payment_method_id"]) for row in changed["payment_history"]]
    assert kinds == [("payment", "gift_card_1"), ("payment", "paypal_1"), ("refund", "gift_card_1")]
    assert balance(desk) == 50.0
    with pytest.raises(ToolError, match="another method, and only once"):
        desk.modify_pending_order_payment("#W3", "credit_card_1")


def desk_again(desk: Desk) -> Desk:
    return Desk(Database(desk.database.store, desk.database.changes()))


def test_returns_and_exchanges_do_not_depend_on_the_order_of_items(desk: Desk) -> None:
    first, second = desk_again(desk), desk_again(desk)
    first.return_delivered_order_items("#W2", ["11", "21"], "gift_card_1")
    second.return_delivered_order_items("#W2", ["21", "11"], "gift_card_1")
    assert first.database.key() == second.database.key() != desk.database.key()
    first, second = desk_again(desk), desk_again(desk)
    first.exchange_delivered_order_items("#W2", ["11", "21"], ["12", "22"], "paypal_1")
    second.exchange_delivered_order_items("#W2", ["21", "11"], ["22", "12"], "paypal_1")
    assert first.database.key() == second.database.key()
    changed = first.database.order("#W2")
    assert changed is not None
    assert changed["exchange_price_difference"] == 49.5


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("find_user_id_by_email", ("x@example.com",), "no user with this email"),
    ("find_user_id_by_name_zip", ("Ann", "Lee", "1"), "no user with this name"),
    ("get_user_details", ("x",), "no user with this id"),
    ("get_order_details", ("1",), "starts with #W"),
    ("get_product_details", ("11",), "no product with this id"),
    ("cancel_pending_order", ("#W2", "no longer needed"), "is not pending: got delivered"),
    ("cancel_pending_order", ("#W1", "too dear"), "not a reason to cancel"),
    ("modify_pending_order_address", ("#W4", "", "", "", "", "", ""), "is not pending: got processed"),
    ("modify_user_address", ("x", "", "", "", "", "", ""), "no user with this id"),
    ("modify_pending_order_items", ("#W1", ["11"], ["11"], "paypal_1"), "already in the order"),
    ("modify_pending_order_items", ("#W1", ["11"], ["13"], "paypal_1"), "is not available"),
    ("modify_pending_order_items", ("#W1", ["11"], ["22"], "paypal_1"), "is not a Mug"),
    ("modify_pending_order_items", ("#W1", ["11"], [], "paypal_1"), "differ in length"),
    ("modify_pending_order_items", ("#W1", ["11", "11"], ["12", "12"], "paypal_1"), "not items of order"),
    ("modify_pending_order_items", ("#W1", ["21"], ["22"], "gift_card_1"), "does not have enough money"),
    ("modify_pending_order_items", ("#W1", ["11"], ["12"], "paypal_2"), "no payment method"),
    ("modify_pending_order_payment", ("#W1", "gift_card_1"), "does not have enough money"),
    ("modify_pending_order_payment", ("#W1", "credit_card_1"), "another method"),
    ("return_delivered_order_items", ("#W2", ["11"], "paypal_1"), "the money cannot go to this payment method"),
    ("return_delivered_order_items", ("#W2", [], "credit_card_1"), "not items of order"),
    ("return_delivered_order_items", ("#W1", ["11"], "credit_card_1"), "is not delivered"),
    ("exchange_delivered_order_items", ("#W1", ["11"], ["12"], "paypal_1"), "is not delivered"),
    ("calculate", ("2 ** 3",), "cannot calculate"),
]


@pytest.mark.parametrize(("tool", "arguments", "message"), REFUSED)
def test_what_the_rules_forbid_changes_nothing(desk: Desk, tool: str, arguments: tuple[Any, ...], message: str) -> None:
    before = desk.database.key()
    with pytest.raises(ToolError, match=message):
        getattr(desk, tool)(*arguments)
    assert desk.database.key() == before


def test_what_changes_nothing_leaves_the_hash(desk: Desk) -> None:
    before = desk.database.key()
    desk.think("Hm.")
    desk.database.edit_user("ann_lee_1")["email"] = "other@example.com"
    assert desk.database.key() != before
    desk.database.edit_user("ann_lee_1")["email"] = "ann.lee1@example.com"
    assert desk.database.key() == before
    desk.transfer_to_human_agents("Help.")
    assert desk.database.key() != before


@pytest.mark.parametrize(("expression", "value"), [("1 + 2", "3"), ("(19.99 + 5) * -2 / 4", "-12.49"), ("0.1", "0.10")])
def test_calculations(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "a", "1 / 0", "print(1)", "1" * 300, "True + 1", "(" * 90])
def test_what_is_no_calculation(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    ("text", "amounts", "counts"),
    [
        ("It is $1,234.50.", ["1234.50"], []),
        ("It is 1234.5 dollars, $1234.50 that is.", ["1234.50"], []),
        ("**7** of them, from 9 USD", ["9.00"], ["7"]),
        ("There are 17, for $ 3.", ["3.00"], ["17"]),
        ("Order #W7, item-7 and card 4242", [], []),
        ("1.77 or 1.7", ["1.70", "1.77"], []),
    ],
)
def test_figures_are_heard(text: str, amounts: list[str], counts: list[str]) -> None:
    assert figures_in(text) == (tuple(amounts), tuple(counts), False)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("7 options, from $9.50.", STOP),
        ("6 options, from $9.50.", STOP),
        ("6 or 7 options, from $9.50.", "only, for example: 3 options, $12.50."),
        ("7 options, $9.50 or $8.50.", "only, for example: 3 options, $12.50."),
        ('{"options": 7, "price": 9.50}', "only, for example: 3 options, $12.50."),
        ("From $9.50.", "And how many are there?"),
        ("There are 7.", "As I said"),
        ("I will look.", "As I said"),
    ],
)
def test_a_question_is_over_with_the_first_single_answer(desk: Desk, text: str, reply: str) -> None:
    caller = customer(Persona.DIRECT, kind=RequestKind.QUESTION, outputs=("7", "9.50"))
    caller.open()
    said = caller.answer(text, desk.database)
    assert reply in said
    assert (STOP in said) == (reply == STOP)


def test_questions_are_heard() -> None:
    heard = hear("To verify who you are: what is your e-mail? And which payment method, which item?")
    assert heard.wants_email
    assert heard.topics == {Topic.PAYMENT, Topic.ITEM}
    assert hear("I can’t do that.").refuses
    assert hear("Shall I cancel it (yes/no)?").wants_confirmation
    assert not hear("Hello.").wants_confirmation


def customer(persona: Persona, *, kind: RequestKind = RequestKind.CANCEL, outputs: tuple[str, ...] = ()) -> Customer:
    facts = (Fact(Topic.ORDER, "The order is one."), Fact(Topic.REASON, "I erred.", at_first="I dislike it."))
    request = Request(kind=kind, opening="Cancel it.", facts=facts, outputs=outputs, order_id="#W1")
    scenario = Scenario(
        user_id="ann_lee_1", by_email="I am a@b.", by_name="I am Ann, 1.", persona=persona, requests=(request,)
    )
    return Customer(scenario, ({"status": "cancelled"},))


@pytest.mark.parametrize(
    ("persona", "texts"),
    [
        (
            Persona.DIRECT,
            [
                "Hello. Cancel it. I am a@b. The order is one. I erred.",
                "Yes, please.",
                "As I said: Cancel it. The order is one. I erred.",
            ],
        ),
        (Persona.TERSE, ["Hello. Cancel it.", "The order is one.", "I erred."]),
        (
            Persona.CHATTY,
            [
                "Hello there, I hope that you are well! Cancel it.",
                "No problem. The order is one. I erred.",
                "Of course. As I said: Cancel it. The order is one. I erred.",
            ],
        ),
        (
            Persona.WAVERING,
            [
                "Hello. Cancel it.",
                "The order is one. I dislike it.",
                "As I said: Cancel it. The order is one. I dislike it.",
            ],
        ),
    ],
)
def test_personas_talk_differently(desk: Desk, persona: Persona, texts: list[str]) -> None:
    caller = customer(persona)
    said = [caller.open(), caller.answer("Do you confirm?", desk.database), caller.answer("Hm.", desk.database)]
    assert said == texts


def test_customer_answers_questions_and_changes_the_request_once(desk: Desk) -> None:
    caller = customer(Persona.WAVERING)
    caller.open()
    assert caller.answer("What is the reason?", desk.database) == "I dislike it."
    assert caller.answer("Please confirm.", desk.database) == "No, wait. I erred."
    assert caller.answer("Which order?", desk.database) == "The order is one."
    assert caller.answer("Please confirm.", desk.database) == "Yes, please."
    assert caller.answer("What is the reason?", desk.database) == "As I said: I erred."


def test_a_customer_confirms_only_after_telling_everything(desk: Desk) -> None:
    caller = customer(Persona.TERSE)
    caller.open()
    assert caller.answer("Is the reason that you erred? Please confirm.", desk.database) == "I erred."
    assert caller.answer("Which order is it? Please confirm.", desk.database) == "The order is one."
    assert caller.answer("Please confirm.", desk.database) == "Yes, please."


def test_who_forgot_the_email_gives_the_name(desk: Desk) -> None:
    caller = customer(Persona.FORGETFUL)
    assert caller.answer("Your email?", desk.database) == "I do not remember my email address. I am Ann, 1."
    assert caller.answer("Your name?", desk.database) == "I am Ann, 1."
    assert customer(Persona.TERSE).answer("Your name?", desk.database) == "I am Ann, 1."
    assert customer(Persona.TERSE).answer("Verify your identity.", desk.database) == "I am a@b."


def test_patience_ends(desk: Desk) -> None:
    caller = customer(Persona.DIRECT)
    caller.open()
    replies = [caller.answer("Hm.", desk.database) for _ in range(PATIENCE + 1)]
    assert [STOP in reply for reply in replies] == [False] * PATIENCE + [True]


def test_a_customer_leaves_when_served(desk: Desk) -> None:
    caller = customer(Persona.TERSE)
    caller.open()
    desk.database.edit_order("#W1").clear()
    desk.database.edit_order("#W1")["status"] = "cancelled"
    assert caller.answer("Done.", desk.database) == f"Thank you, that is all. {STOP}"
    told = customer(Persona.TERSE, kind=RequestKind.QUESTION, outputs=("7", "9.50"))
    assert STOP in told.answer("It is 7, for $9.5.", desk.database)
    refused = customer(Persona.TERSE, kind=RequestKind.REFUSED)
    assert STOP in refused.answer("I cannot do that.", desk.database)
    desk.transfer_to_human_agents("Help.")
    assert customer(Persona.TERSE).answer("Wait.", desk.database).startswith("All right, I will wait")
