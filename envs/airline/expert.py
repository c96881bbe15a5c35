"""Scripted agent that serves every scripted customer, reads only the texts, and follows the policy."""

from __future__ import annotations

import re
from typing import Any

from agentrl.errors import UsageError

from ..desks.calls import call_text
from ..desks.expert import COLLEAGUE, DONE, Conversation, DeskExpert, Reading, Steps
from . import phrases
from .records import AVAILABLE, BUSINESS, CANCELLED, INSURANCE_PRICE, REGULAR, TODAY, paid_bags
from .requests import COMPENSATION, LAST_DAY

_ASK_RESERVATION = "Which reservation is it?"


class _Conversation(Conversation):
    def __init__(self, opening: str) -> None:
        super().__init__(opening)
        self.user: dict[str, Any] = {}
        self.trip: dict[str, Any] = {}

    def steps(self) -> Steps:
        """Look up the customer, then serve the request."""
        kind = next((kind for kind, texts in phrases.OPENINGS.items() if any(one in self.heard for one in texts)), None)
        user_id = yield from self._know(phrases.USER_ID, "What is your user id?")
        self.user = yield from self.look("get_user_details", user_id=user_id[1])
        if kind != "book":
            yield from self._find_reservation()
        plans = {
            "cancel": self._cancel,
            "change_flight": lambda: self._change(self._new_flights, [(phrases.DATE, "Which date would you like?")]),
            "change_cabin": lambda: self._change(self._new_cabin, [(phrases.CABIN, "Which cabin would you like?")]),
            "add_bags": lambda: self._change(self._more_bags, [(phrases.ADDED, "How many more bags are they?")]),
            "change_passenger": self._passenger,
            "book": self._book,
            "compensation": self._compensate,
            "upgrade_price": self._tell_price,
        }
        if kind not in plans:
            raise UsageError("the airline expert does not know this request", got=repr(self.heard))
        yield from plans[kind]()

    def _find_reservation(self) -> Steps:
        while not (found := phrases.NUMBER.search(self.heard) or phrases.TRIP.search(self.heard)):
            yield from self.ask(_ASK_RESERVATION)
        numbers = [found[1]] if found.re is phrases.NUMBER else self.user["reservations"]
        for number in numbers:
            self.trip = yield from self.look("get_reservation_details", reservation_id=number)
            if found.re is phrases.NUMBER or (self.trip["origin"], self.trip["destination"]) == found.groups():
                return

    def _cancel(self) -> Steps:
        yield from self._know(phrases.REASON, "What is the reason?")
        if any(leg["date"] <= TODAY for leg in self.trip["flights"]):
            yield call_text(
                "transfer_to_human_agents", {"summary": "The trip has begun; the customer wants to cancel it."}
            )
            yield COLLEAGUE
            return
        covered = self.trip["insurance"] == "yes" and phrases.ILL in self.heard
        may = self.trip["created_at"] > LAST_DAY or self.trip["cabin"] == BUSINESS or covered
        if not may:
            may = yield from self._is_cancelled()
        if not may:
            yield from self._refuse("I am sorry, I cannot cancel this reservation.")
            return
        yield from self.ask("I will cancel the whole reservation. Do you confirm it?")
        yield call_text("cancel_reservation", {"reservation_id": self.trip["reservation_id"]})
        yield DONE

    def _compensate(self) -> Steps:
        cancelled = yield from self._is_cancelled()
        is_due = self.user["membership"] != REGULAR or self.trip["insurance"] == "yes" or self.trip["cabin"] == BUSINESS
        if not cancelled or not is_due:
            yield from self._refuse("I am sorry, I cannot offer a compensation.")
            return
        amount = COMPENSATION * len(self.trip["passengers"])
        yield call_text("send_certificate", {"user_id": self.user["user_id"], "amount": amount})
        yield DONE

    def _refuse(self, words: str) -> Steps:
        """Refuse, and repeat the refusal when the customer questions it."""
        yield from self.ask(words)
        yield words

    def _is_cancelled(self) -> Reading:
        for leg in self.trip["flights"]:
            arguments = {"flight_number": leg["flight_number"], "date": leg["date"]}
            if (yield call_text("get_flight_status", arguments)) == CANCELLED:
                return True
        return False

    def _tell_price(self) -> Steps:
        prices = []
        for leg in self.trip["flights"]:
            offers = yield from self._offers(leg["origin"], leg["destination"], leg["date"])
            price = next(one["prices"][BUSINESS] for one in offers if one["flight_number"] == leg["flight_number"])
            prices.append(price - leg["price"])
        yield f"It is {sum(prices) * len(self.trip['passengers']):.2f} dollars."

    def _change(self, plan: Any, needed: list[tuple[re.Pattern[str], str]]) -> Steps:
        """Collect the facts, let the customer confirm until nothing changes, and make the change."""
        for pattern, question in [*needed, (phrases.PAID_WITH, "Which payment method would you like to use?")]:
            yield from self._know(pattern, question)
        yield from self._confirmed(plan)

    def _confirmed(self, plan: Any) -> Steps:
        yield (yield from self.confirm(plan))
        yield DONE

    def _new_flights(self) -> Reading:
        (leg,), date = self.trip["flights"], self.last(phrases.DATE)[1]
        cabin, count = self.trip["cabin"], len(self.trip["passengers"])
        number = yield from self._cheapest(leg["origin"], leg["destination"], date, cabin, count)
        return self._update_call(cabin, [{"flight_number": number["flight_number"], "date": date}])

    def _new_cabin(self) -> Reading:
        yield from ()
        legs = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in self.trip["flights"]]
        return self._update_call(BUSINESS, legs)

    def _update_call(self, cabin: str, flights: list[dict[str, Any]]) -> str:
        arguments = {"reservation_id": self.trip["reservation_id"], "cabin": cabin, "flights": flights}
        return call_text("update_reservation_flights", {**arguments, "payment_id": self._payment()})

    def _more_bags(self) -> Reading:
        yield from ()
        total = self.trip["total_baggages"] + int(self.last(phrases.ADDED)[1])
        paid = paid_bags(self.user["membership"], self.trip["cabin"], len(self.trip["passengers"]), total)
        arguments = {"reservation_id": self.trip["reservation_id"], "total_baggages": total, "nonfree_baggages": paid}
        return call_text("update_reservation_baggages", {**arguments, "payment_id": self._payment()})

    def _passenger(self) -> Steps:
        yield from self._know(phrases.REPLACED, "Who will fly instead of whom?")
        yield from self._confirmed(self._new_passengers)

    def _new_passengers(self) -> Reading:
        yield from ()
        old, first, last, dob = self.last(phrases.REPLACED).groups()
        new = {"first_name": first, "last_name": last, "dob": dob}
        passengers = [new if phrases.full_name(one) == old else one for one in self.trip["passengers"]]
        arguments = {"reservation_id": self.trip["reservation_id"], "passengers": passengers}
        return call_text("update_reservation_passengers", arguments)

    def _book(self) -> Steps:
        for pattern, question in (
            (phrases.BOOKED, "Where and when would you like to fly?"),
            (phrases.COMPANION, "Who will fly?"),
            (phrases.OWN_BAGS, "How many bags are there?"),
            (phrases.INSURANCE, "Would you like the insurance?"),
            (phrases.PAID_WITH, "How would you like to pay?"),
        ):
            yield from self._know(pattern, question)
        yield from self._confirmed(self._booking)

    def _booking(self) -> Reading:
        origin, destination, date, named = self.last(phrases.BOOKED).groups()
        cabin = next(key for key, text in phrases.CABINS.items() if text == named)
        first, last = self.last(phrases.COMPANION).groups()
        saved = [one for one in self.user["saved_passengers"] if (one["first_name"], one["last_name"]) == (first, last)]
        passengers = [{**self.user["name"], "dob": self.user["dob"]}, *saved[:1]]
        offer = yield from self._cheapest(origin, destination, date, cabin, len(passengers))
        bags, insured = int(self.last(phrases.OWN_BAGS)[1]), phrases.INSURED in self.heard
        paid = paid_bags(self.user["membership"], cabin, len(passengers), bags)
        price = (offer["prices"][cabin] + (INSURANCE_PRICE if insured else 0)) * len(passengers) + 50 * paid
        return call_text(
            "book_reservation",
            {
                "user_id": self.user["user_id"],
                "origin": origin,
                "destination": destination,
                "flight_type": "one_way",
                "cabin": cabin,
                "flights": [{"flight_number": offer["flight_number"], "date": date}],
                "passengers": passengers,
                "payment_methods": [{"payment_id": self._payment(), "amount": price}],
                "total_baggages": bags,
                "nonfree_baggages": paid,
                "insurance": "yes" if insured else "no",
            },
        )

    def _cheapest(self, origin: str, destination: str, date: str, cabin: str, passengers: int) -> Reading:
        offers = yield from self._offers(origin, destination, date)
        fitting = [one for one in offers if one["status"] == AVAILABLE and one["available_seats"][cabin] >= passengers]
        return min(fitting, key=lambda one: one["prices"][cabin])

    def _offers(self, origin: str, destination: str, date: str) -> Reading:
        return (yield from self.look("search_direct_flight", origin=origin, destination=destination, date=date))

    def _payment(self) -> str:
        last_four, _ = self.last(phrases.PAID_WITH).groups()
        methods = self.user["payment_methods"].values()
        if last_four is None:
            return str(next(method["id"] for method in methods if method["source"] == "gift_card"))
        return str(next(method["id"] for method in methods if method.get("last_four") == last_four))

    def _know(self, pattern: re.Pattern[str], question: str) -> Reading:
        """Ask until the customer has said something."""
        while not pattern.search(self.heard):
            yield from self.ask(question)
        return self.last(pattern)


class AirlineExpert(DeskExpert):
    """Expert of the airline desk for one episode."""

    desk = "airline"
    conversation = _Conversation
