"""What an agent can do at the desk, with one episode's database."""

from __future__ import annotations

import orjson

from agentrl.errors import ToolError

from . import arithmetic
from .database import Database, Row
from .ledger import (
    DELIVERED,
    MODIFIED,
    PENDING,
    REASONS,
    Swap,
    items_of,
    method_of,
    require_status,
    settle,
)

_IDENTIFY = (
    "ask the customer for the email address, or for name and zip code, and call find_user_id_by_email or"
    " find_user_id_by_name_zip first"
)


class Desk:
    """What an agent can do. Each public method is a tool; its docstring is what the agent reads.

    Args:
        database: Of the episode.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def find_user_id_by_email(self, email: str) -> str:
        """Finds a user by the email address.

        Args:
            email: The email address, such as "ann.lee1234@example.com".
        """
        wanted = email.strip().lower()
        for user_id, user in self.database.store.users.items():
            if user["email"] == wanted:
                return self._identified(user_id)
        raise ToolError("there is no user with this email address", got=repr(email))

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Finds a user by name and zip code, for customers who do not remember their email address.

        Args:
            first_name: The first name.
            last_name: The last name.
            zip: The zip code, such as "12345".
        """
        wanted = (first_name.strip().lower(), last_name.strip().lower(), zip.strip())
        for user_id, user in self.database.store.users.items():
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return self._identified(user_id)
        raise ToolError("there is no user with this name and zip code", got=", ".join(wanted))

    def get_user_details(self, user_id: str) -> str:
        """Shows the name, email, address, payment methods and orders of a user who was identified.

        Args:
            user_id: The user's id, such as "ann_lee_1234".
        """
        return _shown(self._user(user_id))

    def get_order_details(self, order_id: str) -> str:
        """Shows the status, items, address and payments of an order of a user who was identified.

        Args:
            order_id: The order's number with the leading "#", such as "#W1234567".
        """
        return _shown(self._order(order_id))

    def get_product_details(self, product_id: str) -> str:
        """Shows a product's options with their item ids, prices and availability.

        Args:
            product_id: The product's id, which is not an item's id.
        """
        product = self.database.store.products.get(product_id)
        if product is None:
            raise ToolError("there is no product with this id", got=repr(product_id), hint="see list_all_product_types")
        return _shown(product)

    def list_all_product_types(self) -> str:
        """Lists the names and ids of all products of the shop."""
        return _shown({product["name"]: key for key, product in self.database.store.products.items()})

    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """Cancels a pending order, and gives the money back. The customer must have confirmed it.

        Args:
            order_id: The order's number, such as "#W1234567".
            reason: Either "no longer needed" or "ordered by mistake".
        """
        order = self._order_with_status(order_id, PENDING)
        if reason not in REASONS:
            raise ToolError("this is no reason to cancel", got=repr(reason), expected=" or ".join(REASONS))
        order = self.database.edit_order(order_id)
        for payment in list(order["payment_history"]):
            sign = -1 if payment["transaction_type"] == "payment" else 1
            settle(self.database, order, payment["payment_method_id"], sign * payment["amount"])
        order["status"], order["cancel_reason"] = "cancelled", reason
        return _shown(order)

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes where a pending order is sent. The customer must have confirmed it.

        Args:
            order_id: The order's number, such as "#W1234567".
            address1: Number and street, such as "123 Main Street".
            address2: Apartment, such as "Apt 4"; empty if there is none.
            city: The city.
            state: The state, such as "CA".
            country: The country, such as "USA".
            zip: The zip code, such as "12345".
        """
        if not self._order(order_id)["status"].startswith(PENDING):
            raise ToolError(f"order {order_id} is not pending", got=self._order(order_id)["status"])
        order = self.database.edit_order(order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return _shown(order)

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Changes items of a pending order to other options of their products, once per order. The customer must have
        confirmed it.

        Args:
            order_id: The order's number, such as "#W1234567".
            item_ids: The items to change.
            new_item_ids: What they become, in the same order.
            payment_method_id: What pays or receives the difference in price, such as "paypal_1234567".
        """
        order = self._order_with_status(order_id, PENDING)
        swap = Swap(self.database, order, item_ids, new_item_ids)
        self._check_funds(order, payment_method_id, swap.difference)
        order = self.database.edit_order(order_id)
        settle(self.database, order, payment_method_id, swap.difference)
        new_of = {old["item_id"]: new for old, new in swap.pairs}
        for item in order["items"]:
            if new := new_of.get(item["item_id"]):
                item.update(item_id=new["item_id"], options=dict(new["options"]), price=new["price"])
        order["status"] = MODIFIED
        return _shown(order)

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> str:
        """Changes the payment method of a pending order. The customer must have confirmed it.

        Args:
            order_id: The order's number, such as "#W1234567".
            payment_method_id: The other method, such as "credit_card_1234567".
        """
        order = self._order_with_status(order_id, PENDING)
        (payment, *later) = order["payment_history"]
        if later or payment["payment_method_id"] == payment_method_id:
            raise ToolError("the payment of this order cannot be changed to that", expected="another method, once")
        self._check_funds(order, payment_method_id, payment["amount"])
        order = self.database.edit_order(order_id)
        settle(self.database, order, payment_method_id, payment["amount"])
        settle(self.database, order, payment["payment_method_id"], -payment["amount"])
        return _shown(order)

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes a user's own address, and no order's. The customer must have confirmed it.

        Args:
            user_id: The user's id, such as "ann_lee_1234".
            address1: Number and street, such as "123 Main Street".
            address2: Apartment, such as "Apt 4"; empty if there is none.
            city: The city.
            state: The state, such as "CA".
            country: The country, such as "USA".
            zip: The zip code, such as "12345".
        """
        self._user(user_id)
        user = self.database.edit_user(user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return _shown(user)

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
        """Returns items of a delivered order. The customer must have confirmed it.

        Args:
            order_id: The order's number, such as "#W1234567".
            item_ids: The items to return.
            payment_method_id: What receives the money: the original method, or a gift card of the customer.
        """
        order = self._order_with_status(order_id, DELIVERED)
        items_of(order, item_ids)
        method = method_of(self._user(order["user_id"]), payment_method_id)
        original = order["payment_history"][0]["payment_method_id"]
        if method["source"] != "gift_card" and payment_method_id != original:
            raise ToolError("the money cannot go there", expected=f"{original}, or a gift card of the customer")
        order = self.database.edit_order(order_id)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return _shown(order)

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Exchanges items of a delivered order for other options of their products. The customer must have confirmed
        it.

        Args:
            order_id: The order's number, such as "#W1234567".
            item_ids: The items to exchange.
            new_item_ids: What they are exchanged for, in the same order.
            payment_method_id: What pays or receives the difference in price, such as "paypal_1234567".
        """
        order = self._order_with_status(order_id, DELIVERED)
        swap = Swap(self.database, order, item_ids, new_item_ids)
        self._check_funds(order, payment_method_id, swap.difference)
        order = self.database.edit_order(order_id)
        order.update(
            status="exchange requested",
            exchange_items=sorted([old["item_id"], new["item_id"]] for old, new in swap.pairs),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=swap.difference,
        )
        return _shown(order)

    def calculate(self, expression: str) -> str:
        """Calculates the value of an expression.

        Args:
            expression: Numbers, + - * / and parentheses, such as "19.99 + 5.5".
        """
        return arithmetic.calculate(expression)

    def think(self, thought: str) -> str:
        """Notes a thought. Nothing happens, and the customer does not see it.

        Args:
            thought: What to think about.
        """
        return "Noted."

    def transfer_to_human_agents(self, summary: str) -> str:
        """Hands an identified customer to a human agent, for what is beyond the tools and the policy.

        Args:
            summary: What the customer wants.
        """
        if not self.database.identified:
            raise ToolError("the customer cannot be transferred yet", hint=_IDENTIFY)
        self.database.transfers += 1
        return "A human agent will take over. Tell the customer."

    def _identified(self, user_id: str) -> str:
        self.database.identified.add(user_id)
        return user_id

    def _user(self, user_id: str) -> Row:
        user = self.database.user(user_id)
        if user is None:
            raise ToolError("there is no user with this id", got=repr(user_id))
        if user_id not in self.database.identified:
            raise ToolError(f"user {user_id} has not been identified", hint=_IDENTIFY)
        return user

    def _order(self, order_id: str) -> Row:
        order = self.database.order(order_id)
        if order is None:
            hint = "a number starts with #W" if not order_id.startswith("#W") else None
            raise ToolError("there is no order with this number", got=repr(order_id), hint=hint)
        if order["user_id"] not in self.database.identified:
            raise ToolError(f"order {order_id} belongs to a user who has not been identified", hint=_IDENTIFY)
        return order

    def _order_with_status(self, order_id: str, status: str) -> Row:
        order = self._order(order_id)
        require_status(order, status)
        return order

    def _check_funds(self, order: Row, payment_method_id: str, amount: float) -> None:
        """Refuse before anything is changed."""
        method = method_of(self._user(order["user_id"]), payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ToolError("the gift card does not hold enough", got=method["balance"], expected=amount)


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Row:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }


def _shown(row: Row) -> str:
    return orjson.dumps(row).decode()
