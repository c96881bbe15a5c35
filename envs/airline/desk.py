"""The agent's tools at the airline's desk, with the database of one episode.

The tools check records, not the policy: what the policy forbids is up to the agent.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from agentrl.errors import ToolError

from ..desks import arithmetic
from ..desks.records import Row
from .records import (
    AVAILABLE,
    BAG_PRICE,
    CABINS,
    CANCELLED,
    CERTIFICATE,
    CREDIT_CARD,
    GIFT_CARD,
    INSURANCE_PRICE,
    NOW,
    Database,
    passengers_of,
)

AIRPORTS: Mapping[str, str] = {
    "ATL": "Atlanta",
    "BOS": "Boston",
    "CLT": "Charlotte",
    "DEN": "Denver",
    "DFW": "Dallas",
    "DTW": "Detroit",
    "EWR": "Newark",
    "IAH": "Houston",
    "JFK": "New York",
    "LAS": "Las Vegas",
    "LAX": "Los Angeles",
    "LGA": "New York LaGuardia",
    "MCO": "Orlando",
    "MIA": "Miami",
    "MSP": "Minneapolis",
    "ORD": "Chicago",
    "PHL": "Philadelphia",
    "PHX": "Phoenix",
    "SEA": "Seattle",
    "SFO": "San Francisco",
}
_MAX_SAME = {CERTIFICATE: 1, CREDIT_CARD: 1, GIFT_CARD: 3}
"""Maximum number of payment methods of each kind in a booking."""
_NEXT_DAY = "+1"
"""End of an arrival time on the day after the departure, in published data."""
_MAX_AMOUNT = 1_000_000
"""Largest count and amount of dollars."""
_LOOK_UP = "ask the customer for the user id, and call get_user_details first"


class Desk:
    """Tools of the agent. Each public method is a tool, and the agent reads its docstring.

    Args:
        database: Database of the episode.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def get_user_details(self, user_id: str) -> str:
        """Shows a customer's profile: membership, payment methods, saved passengers, reservations.

        Args:
            user_id: Such as "ann_lee_1234".
        """
        user = self.database.user(user_id)
        if user is None:
            raise ToolError("there is no user with this id", got=repr(user_id))
        self.database.seen.add(user_id)
        return _to_json(user)

    def get_reservation_details(self, reservation_id: str) -> str:
        """Shows a reservation: flights, cabin, passengers, payments, bags, insurance.

        Args:
            reservation_id: Six letters and digits.
        """
        reservation = self._reservation(reservation_id)
        self.database.seen.add(reservation_id)
        return _to_json(reservation)

    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Shows the status of a flight on a date.

        Args:
            flight_number: Such as "AG1001".
            date: Such as "2024-05-20".
        """
        return str(self._on_date(flight_number, date)["status"])

    def list_all_airports(self) -> str:
        """Lists all airports with their cities."""
        return _to_json(dict(AIRPORTS))

    def search_direct_flight(self, origin: str, destination: str, date: str) -> str:
        """Finds the direct flights that can be booked, with seats and prices in each cabin.

        Args:
            origin: Airport, such as "SFO".
            destination: Airport, such as "JFK".
            date: Such as "2024-05-20".
        """
        return _to_json([_offer(flight, date) for flight in self._direct(origin, destination, date)])

    def search_onestop_flight(self, origin: str, destination: str, date: str) -> str:
        """Finds connections with one stop that can be booked, both flights on the same date.

        Args:
            origin: Airport, such as "SFO".
            destination: Airport, such as "JFK".
            date: Such as "2024-05-20".
        """
        found = []
        for first in self._direct(origin, None, date):
            arrival = first["scheduled_arrival_time_est"]
            onward = _next_day(date) if arrival.endswith(_NEXT_DAY) else date
            found += [
                [_offer(first, date), _offer(second, onward)]
                for second in self._direct(first["destination"], destination, onward)
                if arrival.removesuffix(_NEXT_DAY) <= second["scheduled_departure_time_est"]
            ]
        return _to_json(found)

    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: str,
        cabin: str,
        flights: list[dict[str, Any]],
        passengers: list[dict[str, Any]],
        payment_methods: list[dict[str, Any]],
        total_baggages: int,
        nonfree_baggages: int,
        insurance: str,
    ) -> str:
        """Books flights for up to five passengers.

        Args:
            user_id: The customer.
            origin: Airport where the trip begins.
            destination: Airport to which it goes.
            flight_type: "one_way" or "round_trip".
            cabin: "basic_economy", "economy" or "business", for all flights.
            flights: All flights in order, each as {"flight_number", "date"}.
            passengers: All passengers, each as {"first_name", "last_name", "dob"}.
            payment_methods: Each method as {"payment_id", "amount"}; the amounts add up to the price.
            total_baggages: Number of checked bags.
            nonfree_baggages: Number of those that are paid for.
            insurance: "yes" or "no".
        """
        user = self._user(user_id)
        if not 1 <= len(passengers) <= 5:
            raise ToolError("a reservation is for one to five passengers", got=len(passengers))
        _check(flight_type, ("one_way", "round_trip"), "flight_type")
        _check(insurance, ("yes", "no"), "insurance")
        _check_number(total_baggages, "total_baggages")
        _check_number(nonfree_baggages, "nonfree_baggages")
        taken = self._priced(flights, cabin, len(passengers), {})
        price = sum(flight["price"] for flight in taken) * len(passengers) + BAG_PRICE * nonfree_baggages
        price += INSURANCE_PRICE * len(passengers) if insurance == "yes" else 0
        self._pay_booking(user, payment_methods, price)
        reservation = {
            "reservation_id": self._new_id(),
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": taken,
            "passengers": copy.deepcopy(passengers),
            "payment_history": copy.deepcopy(payment_methods),
            "created_at": NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        self.database.add_reservation(reservation)
        return _to_json(reservation)

    def cancel_reservation(self, reservation_id: str) -> str:
        """Cancels a whole reservation and pays the money back.

        Args:
            reservation_id: Six letters and digits.
        """
        if self._reservation(reservation_id).get("status") == CANCELLED:
            raise ToolError(f"reservation {reservation_id} is cancelled already")
        reservation = self.database.edit_reservation(reservation_id)
        refunds = [{**payment, "amount": -payment["amount"]} for payment in reservation["payment_history"]]
        reservation["payment_history"] += refunds
        reservation["status"] = CANCELLED
        return _to_json(reservation)

    def update_reservation_flights(
        self, reservation_id: str, cabin: str, flights: list[dict[str, Any]], payment_id: str
    ) -> str:
        """Changes the flights or the cabin of a reservation.

        Args:
            reservation_id: Six letters and digits.
            cabin: "basic_economy", "economy" or "business", for all flights.
            flights: All flights of the new trip in order, also those that stay, each as {"flight_number", "date"}.
            payment_id: Method that pays or receives the difference; not a certificate.
        """
        reservation = self._reservation(reservation_id)
        same = cabin == reservation["cabin"]
        kept = {(one["flight_number"], one["date"]): one for one in reservation["flights"]} if same else {}
        count = passengers_of(reservation)
        taken = self._priced(flights, cabin, count, kept)
        before = sum(flight["price"] for flight in reservation["flights"])
        difference = (sum(flight["price"] for flight in taken) - before) * count
        self._pay_change(reservation, payment_id, difference)
        changed = self.database.edit_reservation(reservation_id)
        changed["flights"], changed["cabin"] = taken, cabin
        return _to_json(changed)

    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> str:
        """Changes the number of checked bags of a reservation.

        Args:
            reservation_id: Six letters and digits.
            total_baggages: New number of checked bags.
            nonfree_baggages: New number of checked bags that are not free.
            payment_id: Method that pays for them; not a certificate.
        """
        reservation = self._reservation(reservation_id)
        _check_number(total_baggages, "total_baggages")
        _check_number(nonfree_baggages, "nonfree_baggages")
        price = BAG_PRICE * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        self._pay_change(reservation, payment_id, price)
        changed = self.database.edit_reservation(reservation_id)
        changed["total_baggages"], changed["nonfree_baggages"] = total_baggages, nonfree_baggages
        return _to_json(changed)

    def update_reservation_passengers(self, reservation_id: str, passengers: list[dict[str, Any]]) -> str:
        """Replaces passengers of a reservation; their number cannot change.

        Args:
            reservation_id: Six letters and digits.
            passengers: All passengers, including those who stay, each as {"first_name", "last_name", "dob"}.
        """
        reservation = self._reservation(reservation_id)
        if len(passengers) != passengers_of(reservation):
            expected = f"{passengers_of(reservation)} passengers"
            raise ToolError("the number of passengers cannot change", got=len(passengers), expected=expected)
        changed = self.database.edit_reservation(reservation_id)
        changed["passengers"] = copy.deepcopy(passengers)
        return _to_json(changed)

    def send_certificate(self, user_id: str, amount: int) -> str:
        """Gives a customer a certificate for later trips.

        Args:
            user_id: The customer.
            amount: Dollars.
        """
        methods = self._user(user_id)["payment_methods"]
        _check_number(amount, "amount")
        number = next(number for number in range(9_000_001, 9_100_000) if f"{CERTIFICATE}_{number}" not in methods)
        payment_id = f"{CERTIFICATE}_{number}"
        row = {"source": CERTIFICATE, "amount": amount, "id": payment_id}
        self.database.edit_user(user_id)["payment_methods"][payment_id] = row
        return f"{user_id} has received {payment_id}, worth {amount} dollars."

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Such as "2 * (140 - 90)".
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
        if not any(key in self.database.store.users for key in self.database.seen):
            raise ToolError("the customer cannot be transferred yet", hint=_LOOK_UP)
        self.database.transfers += 1
        return "A human agent will take over. Tell the customer."

    def _user(self, user_id: str) -> Row:
        user = self.database.user(user_id)
        if user is None:
            raise ToolError("there is no user with this id", got=repr(user_id))
        if user_id not in self.database.seen:
            raise ToolError(f"the profile of {user_id} has not been read", hint=_LOOK_UP)
        return user

    def _reservation(self, reservation_id: str) -> Row:
        reservation = self.database.reservation(reservation_id)
        if reservation is None:
            raise ToolError("there is no reservation with this id", got=repr(reservation_id))
        if reservation["user_id"] not in self.database.seen:
            raise ToolError(
                f"reservation {reservation_id} belongs to a user whose profile has not been read", hint=_LOOK_UP
            )
        return reservation

    def _on_date(self, flight_number: str, date: str) -> Row:
        flight = self.database.store.flights.get(flight_number)
        row: Row | None = None if flight is None else flight["dates"].get(date)
        if row is None:
            what = f"flight {flight_number} on {date}" if flight is not None else f"flight {flight_number}"
            raise ToolError(f"there is no {what}")
        return row

    def _direct(self, origin: str, destination: str | None, date: str) -> Iterator[Row]:
        for flight in self.database.store.flights.values():
            is_open = flight["dates"].get(date, {}).get("status") == AVAILABLE
            if is_open and flight["origin"] == origin and destination in (None, flight["destination"]):
                yield flight

    def _priced(
        self, flights: Sequence[Mapping[str, Any]], cabin: str, passengers: int, kept: Mapping[Any, Row]
    ) -> list[Row]:
        """Return the flights of a trip with their prices; those in `kept` keep theirs."""
        _check(cabin, CABINS, "cabin")
        if not flights:
            raise ToolError("there are no flights", expected='[{"flight_number": …, "date": …}]')
        found = []
        for asked in flights:
            number, date = str(asked.get("flight_number")), str(asked.get("date"))
            if (number, date) in kept:
                found.append(dict(kept[number, date]))
                continue
            row = self._on_date(number, date)
            if row["status"] != AVAILABLE:
                raise ToolError(f"flight {number} on {date} cannot be booked", got=row["status"])
            if row["available_seats"][cabin] < passengers:
                raise ToolError(f"flight {number} on {date} has too few seats", got=row["available_seats"][cabin])
            flight = self.database.store.flights[number]
            places = {"origin": flight["origin"], "destination": flight["destination"]}
            found.append({**places, "flight_number": number, "date": date, "price": row["prices"][cabin]})
        return found

    def _pay_booking(self, user: Row, payments: Sequence[Mapping[str, Any]], price: int) -> None:
        """Check all payments of a booking, then charge them."""
        sources: list[str] = []
        for payment in payments:
            method = _method(user, str(payment.get("payment_id")))
            _check_number(payment.get("amount"), f"amount of {method['id']}")
            if method["source"] != CREDIT_CARD and method["amount"] < payment["amount"]:
                raise ToolError(f"{method['id']} does not have enough money", got=method["amount"])
            sources.append(method["source"])
        for source, most in _MAX_SAME.items():
            if sources.count(source) > most:
                raise ToolError(f"a booking takes at most {most} payment methods of this kind", got=source)
        paid = sum(payment["amount"] for payment in payments)
        if paid != price:
            raise ToolError("the payments do not add up to the price", got=paid, expected=price)
        for payment in payments:
            methods = self.database.edit_user(user["user_id"])["payment_methods"]
            method = methods[payment["payment_id"]]
            if method["source"] == GIFT_CARD:
                method["amount"] -= payment["amount"]
            elif method["source"] == CERTIFICATE:
                del methods[payment["payment_id"]]

    def _pay_change(self, reservation: Row, payment_id: str, amount: int) -> None:
        """Charge the price of a change, or refund it if it is negative."""
        method = _method(self._user(reservation["user_id"]), payment_id)
        if method["source"] == CERTIFICATE:
            raise ToolError("a certificate cannot pay for a change", expected="a credit card or a gift card")
        if method["source"] == GIFT_CARD:
            if method["amount"] < amount:
                raise ToolError("the gift card does not have enough money", got=method["amount"], expected=amount)
            self.database.edit_user(reservation["user_id"])["payment_methods"][payment_id]["amount"] -= amount
        if amount:
            history = self.database.edit_reservation(reservation["reservation_id"])["payment_history"]
            history.append({"payment_id": payment_id, "amount": amount})

    def _new_id(self) -> str:
        return next(key for n in range(1, 100) if self.database.reservation(key := f"NEW{n:03}") is None)


def _method(user: Row, payment_id: str) -> Row:
    method: Row | None = user["payment_methods"].get(payment_id)
    if method is None:
        raise ToolError(
            f"the customer has no payment method {payment_id!r}", expected=", ".join(user["payment_methods"])
        )
    return method


def _check(value: str, allowed: Sequence[str], name: str) -> None:
    if value not in allowed:
        raise ToolError(f"{name} is not valid", got=repr(value), expected=" or ".join(allowed))


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_AMOUNT:
        raise ToolError(f"{name} is not valid", got=repr(value)[:80], expected=f"a number from 0 to {_MAX_AMOUNT}")


def _next_day(date: str) -> str:
    return (datetime.date.fromisoformat(date) + datetime.timedelta(days=1)).isoformat()


def _offer(flight: Row, date: str) -> Row:
    return {**{key: value for key, value in flight.items() if key != "dates"}, "date": date, **flight["dates"][date]}


def _to_json(row: Any) -> str:
    return orjson.dumps(row).decode()
