"""The agent's tools at the desk, with the database of one episode."""

from __future__ import annotations

import orjson

from agentrl.errors import ToolError

from ..desks import arithmetic
from ..desks.records import Row
from .database import Database
from .ledger import DELIVERED, MODIFIED, PENDING, REASONS, Swap, items_of, method_of, require_status, settle

_IDENTIFY = (
    "ask the customer for the email address, or for name and zip code, and call find_user_id_by_email or"
    " find_user_id_by_name_zip first"
)


class Desk:
    """Tools of the agent. Each public method is a tool, and the agent reads its docstring.

    Args:
        database: Database of the episode.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def find_user_id_by_email(self, email: str) -> str:
        """Finds a customer by email address.

        Args:
            email: The address.
        """
        wanted = email.strip().lower()
        for user_id, user in self.database.store.users.items():
            if user["email"] == wanted:
                return self._identify(user_id)
        raise ToolError("there is no user with this email address", got=repr(email))

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Finds a customer by name and zip code, if the customer does not know the email address.

        Args:
            first_name: The first name.
            last_name: The last name.
            zip: The zip code.
        """
        wanted = (first_name.strip().lower(), last_name.strip().lower(), zip.strip())
        for user_id, user in self.database.store.users.items():
            name = user["name"]
            if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == wanted:
                return self._identify(user_id)
        raise ToolError("there is no user with this name and zip code", got=", ".join(wanted))

    def get_user_details(self, user_id: str) -> str:
        """Shows a customer's address, payment methods and orders.

        Args:
            user_id: Such as "ann_lee_1234".
        """
        return _to_json(self._user(user_id))

    def get_order_details(self, order_id: str) -> str:
        """Shows an order's status, items, address and payments.

        Args:
            order_id: Such as "#W1234567".
        """
        return _to_json(self._order(order_id))

    def get_product_details(self, product_id: str) -> str:
        """Shows a product's options with their item ids, prices and availability.

        Args:
            product_id: The id of a product, not of an item.
        """
        product = self.database.store.products.get(product_id)
        if product is None:
            raise ToolError("there is no product with this id", got=repr(product_id), hint="see list_all_product_types")
        return _to_json(product)

    def list_all_product_types(self) -> str:
        """Lists the names and ids of all products."""
        return _to_json({product["name"]: key for key, product in self.database.store.products.items()})

    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """Cancels a pending order and pays the money back.

        Args:
            order_id: Such as "#W1234567".
            reason: "no longer needed" or "ordered by mistake".
        """
        order = self._order_with_status(order_id, PENDING)
        if reason not in REASONS:
            raise ToolError("this is not a reason to cancel", got=repr(reason), expected=" or ".join(REASONS))
        order = self.database.edit_order(order_id)
        for payment in list(order["payment_history"]):
            sign = -1 if payment["transaction_type"] == "payment" else 1
            settle(self.database, order, payment["payment_method_id"], sign * payment["amount"])
        order["status"], order["cancel_reason"] = "cancelled", reason
        return _to_json(order)

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes the shipping address of a pending order.

        Args:
            order_id: Such as "#W1234567".
            address1: Such as "123 Main Street".
            address2: Such as "Apt 4"; may be empty.
            city: The city.
            state: Such as "CA".
            country: Such as "USA".
            zip: The zip code.
        """
        if not self._order(order_id)["status"].startswith(PENDING):
            raise ToolError(f"order {order_id} is not pending", got=self._order(order_id)["status"])
        order = self.database.edit_order(order_id)
        order["address"] = _address(address1, address2, city, state, country, zip)
        return _to_json(order)

    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Changes items of a pending order to other options, only once per order.

        Args:
            order_id: Such as "#W1234567".
            item_ids: The items to change.
            new_item_ids: The new items, in the same order.
            payment_method_id: Method that pays or receives the difference in price.
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
        return _to_json(order)

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> str:
        """Changes the payment method of a pending order.

        Args:
            order_id: Such as "#W1234567".
            payment_method_id: The new method.
        """
        order = self._order_with_status(order_id, PENDING)
        (payment, *later) = order["payment_history"]
        if later or payment["payment_method_id"] == payment_method_id:
            raise ToolError(
                "the payment of this order cannot be changed to this method", expected="another method, and only once"
            )
        self._check_funds(order, payment_method_id, payment["amount"])
        order = self.database.edit_order(order_id)
        settle(self.database, order, payment_method_id, payment["amount"])
        settle(self.database, order, payment["payment_method_id"], -payment["amount"])
        return _to_json(order)

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> str:
        """Changes a customer's own address, but not the address of an order.

        Args:
            user_id: Such as "ann_lee_1234".
            address1: Such as "123 Main Street".
            address2: Such as "Apt 4"; may be empty.
            city: The city.
            state: Such as "CA".
            country: Such as "USA".
            zip: The zip code.
        """
        self._user(user_id)
        user = self.database.edit_user(user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return _to_json(user)

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
        """Returns items of a delivered order.

        Args:
            order_id: Such as "#W1234567".
            item_ids: The items to return.
            payment_method_id: Method that receives the money: the original one or a gift card.
        """
        order = self._order_with_status(order_id, DELIVERED)
        items_of(order, item_ids)
        method = method_of(self._user(order["user_id"]), payment_method_id)
        original = order["payment_history"][0]["payment_method_id"]
        if method["source"] != "gift_card" and payment_method_id != original:
            raise ToolError(
                "the money cannot go to this payment method", expected=f"{original}, or a gift card of the customer"
            )
        order = self.database.edit_order(order_id)
        order.update(
            status="return requested", return_items=sorted(item_ids), return_payment_method_id=payment_method_id
        )
        return _to_json(order)

    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Exchanges items of a delivered order for other options.

        Args:
            order_id: Such as "#W1234567".
            item_ids: The items to exchange.
            new_item_ids: The new items, in the same order.
            payment_method_id: Method that pays or receives the difference in price.
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
        return _to_json(order)

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Such as "19.99 + 5.5".
        """
        return arithmetic.calculate(expression)

    def think(self, thought: str) -> str:
        """Writes down a thought, which the customer does not see.

        Args:
            thought: The thought.
        """
        return "Noted."

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfers the customer to a human agent.

        Args:
            summary: What the customer wants.
        """
        if not self.database.identified:
            raise ToolError("the customer cannot be transferred yet", hint=_IDENTIFY)
        self.database.transfers += 1
        return "A human agent will take over. Tell the customer."

    def _identify(self, user_id: str) -> str:
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
        """Check the balance of a gift card before anything is changed."""
        method = method_of(self._user(order["user_id"]), payment_method_id)
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ToolError("the gift card does not have enough money", got=method["balance"], expected=amount)


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Row:
    return {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}


def _to_json(row: Row) -> str:
    return orjson.dumps(row).decode()
