"""Requests of the airline's customers, drawn from the records: their messages, and the agent's required actions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from ..desks.records import Action, Row
from . import phrases
from .records import (
    AVAILABLE,
    BASIC,
    BUSINESS,
    CANCELLED,
    CREDIT_CARD,
    ECONOMY,
    GIFT_CARD,
    INSURANCE_PRICE,
    REGULAR,
    TODAY,
    Store,
    paid_bags,
    passengers_of,
)

LAST_DAY = "2024-05-14T15:00:00"
"""Reservations made after this time can be cancelled for any reason."""
COMPENSATION = 100
"""Dollars of a certificate for each passenger of a flight that the airline cancelled."""


class RequestKind(enum.StrEnum):
    """A kind of request."""

    CANCEL = "cancel"
    REFUSED_CANCEL = "refused_cancel"
    FLIGHT = "change_flight"
    CABIN = "change_cabin"
    BAGS = "add_bags"
    PASSENGER = "change_passenger"
    BOOK = "book"
    COMPENSATION = "compensation"
    REFUSED_COMPENSATION = "refused_compensation"
    QUESTION = "upgrade_price"
    TRANSFER = "transfer"
    """Request to cancel a trip that has begun."""

    @property
    def is_refused(self) -> bool:
        """True if the agent must refuse it."""
        return self in (RequestKind.REFUSED_CANCEL, RequestKind.REFUSED_COMPENSATION)


class Persona(enum.StrEnum):
    """Conversation style of a customer."""

    DIRECT = "direct"
    """States everything at once."""
    TERSE = "terse"
    """States one fact at a time."""
    FORGETFUL = "forgetful"
    """Knows only the route of a reservation."""
    WAVERING = "wavering"
    """Wants something else when asked to confirm."""


class Topic(enum.StrEnum):
    """Topic of a fact, which an agent may ask for."""

    USER = "user"
    RESERVATION = "reservation"
    REASON = "reason"
    WISH = "wish"
    PASSENGERS = "passengers"
    BAGS = "bags"
    INSURANCE = "insurance"
    PAYMENT = "payment"


class Fact(NamedTuple):
    """A fact that the customer tells."""

    topic: Topic
    text: str
    at_first: str | None = None
    """First version of the fact, from a customer that changes its mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A customer with a request."""

    user_id: str
    persona: Persona
    kind: RequestKind
    opening: str
    facts: tuple[Fact, ...]
    """Facts in the order in which the customer volunteers them; the first one is the user id."""
    actions: tuple[Action, ...] = ()
    outputs: tuple[str, ...] = ()
    """The amount that the agent has to say."""
    reservation_id: str | None = None

    @property
    def wavers_about(self) -> Fact | None:
        """Fact about which a wavering customer changes its mind; ``None`` for others or without a choice."""
        if self.persona is not Persona.WAVERING:
            return None
        return next((fact for fact in self.facts if fact.at_first is not None), None)


def draw_scenario(store: Store, random: Random, kind: RequestKind) -> Scenario:
    """Draw a scenario of a kind."""
    users = list(store.users)
    while True:
        user, persona = store.users[random.choice(users)], random.choice(list(Persona))
        found = _Writer(store, random, user, persona).write(kind)
        if found is not None:
            return found


def is_cancelled_by_airline(store: Store, reservation: Row) -> bool:
    """Return True if the airline has cancelled one of the flights."""
    return any(
        store.flights[leg["flight_number"]]["dates"][leg["date"]]["status"] == CANCELLED
        for leg in reservation["flights"]
    )


def has_begun(reservation: Row) -> bool:
    """Return True if one of the flights has taken off."""
    return any(leg["date"] <= TODAY for leg in reservation["flights"])


class _Writer:
    """Writer of a request of one user; each method returns ``None`` if the user cannot have such a request."""

    def __init__(self, store: Store, random: Random, user: Row, persona: Persona) -> None:
        self._store, self._random, self._user, self._persona = store, random, user, persona

    def write(self, kind: RequestKind) -> Scenario | None:
        """Draw a request of a kind."""
        if kind is RequestKind.BOOK:
            return self._book()
        writers: Mapping[RequestKind, Callable[[Row], Scenario | None]] = {
            RequestKind.CANCEL: self._cancel,
            RequestKind.REFUSED_CANCEL: self._refused_cancel,
            RequestKind.FLIGHT: self._flight,
            RequestKind.CABIN: self._cabin,
            RequestKind.BAGS: self._bags,
            RequestKind.PASSENGER: self._passenger,
            RequestKind.COMPENSATION: self._compensation,
            RequestKind.REFUSED_COMPENSATION: self._compensation,
            RequestKind.QUESTION: self._question,
            RequestKind.TRANSFER: self._transfer,
        }
        reservation = self._store.reservations[self._random.choice(self._user["reservations"])]
        found = writers[kind](reservation)
        return found if found is None or found.kind is kind else None

    def _cancel(self, reservation: Row) -> Scenario | None:
        ill = self._random.random() < 0.5
        if has_begun(reservation) or not self._may_cancel(reservation, ill=ill):
            return None
        action = Action("cancel_reservation", {"reservation_id": reservation["reservation_id"]})
        return self._about(RequestKind.CANCEL, reservation, [_reason(ill)], [action])

    def _refused_cancel(self, reservation: Row) -> Scenario | None:
        ill = self._random.random() < 0.3
        if has_begun(reservation) or self._may_cancel(reservation, ill=ill):
            return None
        return self._about(RequestKind.REFUSED_CANCEL, reservation, [_reason(ill)], [])

    def _transfer(self, reservation: Row) -> Scenario | None:
        if not has_begun(reservation):
            return None
        action = Action("transfer_to_human_agents", {"summary": ""})
        return self._about(RequestKind.TRANSFER, reservation, [_reason(False)], [action])

    def _may_cancel(self, reservation: Row, *, ill: bool) -> bool:
        return (
            reservation["created_at"] > LAST_DAY
            or reservation["cabin"] == BUSINESS
            or (reservation["insurance"] == "yes" and ill)
            or is_cancelled_by_airline(self._store, reservation)
        )

    def _flight(self, reservation: Row) -> Scenario | None:
        if len(reservation["flights"]) > 1 or reservation["cabin"] == BASIC or not self._is_open(reservation):
            return None
        (leg,), count, cabin = reservation["flights"], passengers_of(reservation), reservation["cabin"]
        dates = [date for date in self._open_dates(leg) if date != leg["date"]]
        if len(dates) < 2:
            return None
        date, other = self._random.sample(dates, 2)
        cheapest = self._cheapest(leg["origin"], leg["destination"], date, cabin, count)
        if cheapest is None or self._cheapest(leg["origin"], leg["destination"], other, cabin, count) is None:
            return None
        wish = Fact(Topic.WISH, phrases.NEW_DATE.format(date=date), at_first=phrases.NEW_DATE.format(date=other))
        flights = [{"flight_number": cheapest["flight_number"], "date": date}]
        return self._update(RequestKind.FLIGHT, reservation, wish, cabin, flights, max_price=count * 200)

    def _cabin(self, reservation: Row) -> Scenario | None:
        if reservation["cabin"] == BUSINESS or not self._has_seats(reservation, BUSINESS):
            return None
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in reservation["flights"]]
        wish = Fact(Topic.WISH, phrases.NEW_CABIN)
        price = passengers_of(reservation) * 500 * len(flights)
        return self._update(RequestKind.CABIN, reservation, wish, BUSINESS, flights, max_price=price)

    def _update(
        self,
        kind: RequestKind,
        reservation: Row,
        wish: Fact,
        cabin: str,
        flights: list[dict[str, Any]],
        *,
        max_price: int,
    ) -> Scenario | None:
        payment_id, payment = self._payment(max_price)
        arguments = {
            "reservation_id": reservation["reservation_id"],
            "cabin": cabin,
            "flights": flights,
            "payment_id": payment_id,
        }
        return self._about(kind, reservation, [wish, payment], [Action("update_reservation_flights", arguments)])

    def _question(self, reservation: Row) -> Scenario | None:
        if reservation["cabin"] == BUSINESS or not self._has_seats(reservation, BUSINESS):
            return None
        prices = [self._day(leg)["prices"][BUSINESS] - leg["price"] for leg in reservation["flights"]]
        amount = f"{sum(prices) * passengers_of(reservation):.2f}"
        found = self._about(RequestKind.QUESTION, reservation, [], [])
        return None if found is None else dataclasses.replace(found, outputs=(amount,))

    def _bags(self, reservation: Row) -> Scenario | None:
        if has_begun(reservation):
            return None
        more, other = self._random.sample((1, 2, 3), 2)
        total = reservation["total_baggages"] + more
        payment_id, payment = self._payment(150)
        paid = paid_bags(self._user["membership"], reservation["cabin"], passengers_of(reservation), total)
        arguments = {
            "reservation_id": reservation["reservation_id"],
            "total_baggages": total,
            "nonfree_baggages": paid,
            "payment_id": payment_id,
        }
        wish = Fact(Topic.WISH, phrases.MORE_BAGS.format(count=more), at_first=phrases.MORE_BAGS.format(count=other))
        return self._about(
            RequestKind.BAGS, reservation, [wish, payment], [Action("update_reservation_baggages", arguments)]
        )

    def _passenger(self, reservation: Row) -> Scenario | None:
        others = [one for one in self._user["saved_passengers"] if one not in reservation["passengers"]]
        if passengers_of(reservation) < 2 or not others or has_begun(reservation):
            return None
        old, new = reservation["passengers"][-1], others[0]
        passengers = [*reservation["passengers"][:-1], new]
        arguments = {"reservation_id": reservation["reservation_id"], "passengers": passengers}
        text = phrases.NEW_PASSENGER.format(old=phrases.full_name(old), new=phrases.full_name(new), dob=new["dob"])
        action = Action("update_reservation_passengers", arguments)
        return self._about(RequestKind.PASSENGER, reservation, [Fact(Topic.WISH, text)], [action])

    def _compensation(self, reservation: Row) -> Scenario | None:
        if has_begun(reservation) or not is_cancelled_by_airline(self._store, reservation):
            return None
        is_due = (
            self._user["membership"] != REGULAR or reservation["insurance"] == "yes" or reservation["cabin"] == BUSINESS
        )
        kind = RequestKind.COMPENSATION if is_due else RequestKind.REFUSED_COMPENSATION
        amount = COMPENSATION * passengers_of(reservation)
        action = Action("send_certificate", {"user_id": self._user["user_id"], "amount": amount})
        return self._about(kind, reservation, [], [action] if is_due else [])

    def _book(self) -> Scenario | None:
        flight = self._store.flights[self._random.choice(list(self._store.flights))]
        cabin = self._random.choice((BASIC, ECONOMY, BUSINESS))
        companions = self._user["saved_passengers"][: self._random.randint(0, 1)]
        passengers = [{**self._user["name"], "dob": self._user["dob"]}, *companions]
        dates = self._random.sample([date for date, row in flight["dates"].items() if row["status"] == AVAILABLE], 2)
        offers = [
            self._cheapest(flight["origin"], flight["destination"], date, cabin, len(passengers)) for date in dates
        ]
        if offers[0] is None or offers[1] is None:
            return None
        texts = [
            phrases.NEW_TRIP.format(
                origin=flight["origin"], destination=flight["destination"], date=date, cabin=phrases.CABINS[cabin]
            )
            for date in dates
        ]
        bags, insured = self._random.randint(0, 3), self._random.random() < 0.5
        card = self._random.choice([key for key in self._user["payment_methods"] if key.startswith(CREDIT_CARD)])
        paid = paid_bags(self._user["membership"], cabin, len(passengers), bags)
        price = (offers[0]["price"] + (INSURANCE_PRICE if insured else 0)) * len(passengers) + 50 * paid
        arguments = {
            "user_id": self._user["user_id"],
            "origin": flight["origin"],
            "destination": flight["destination"],
            "flight_type": "one_way",
            "cabin": cabin,
            "flights": [{"flight_number": offers[0]["flight_number"], "date": dates[0]}],
            "passengers": passengers,
            "payment_methods": [{"payment_id": card, "amount": price}],
            "total_baggages": bags,
            "nonfree_baggages": paid,
            "insurance": "yes" if insured else "no",
        }
        alone = phrases.ALONE if not companions else phrases.WITH.format(name=phrases.full_name(companions[0]))
        facts = [
            Fact(Topic.WISH, texts[0], at_first=texts[1]),
            Fact(Topic.PASSENGERS, alone),
            Fact(Topic.BAGS, phrases.BAGS.format(count=bags)),
            Fact(Topic.INSURANCE, phrases.INSURED if insured else phrases.UNINSURED),
            Fact(Topic.PAYMENT, phrases.describe_payment(self._user["payment_methods"][card])),
        ]
        return self._scenario(RequestKind.BOOK, facts, [Action("book_reservation", arguments)])

    def _cheapest(self, origin: str, destination: str, date: str, cabin: str, passengers: int) -> Row | None:
        """Return the number and price of the cheapest direct flight with enough seats; ``None`` if it is not unique."""
        found = [
            {"flight_number": flight["flight_number"], "price": flight["dates"][date]["prices"][cabin]}
            for flight in self._store.flights.values()
            if (flight["origin"], flight["destination"]) == (origin, destination)
            and flight["dates"][date]["status"] == AVAILABLE
            and flight["dates"][date]["available_seats"][cabin] >= passengers
        ]
        found.sort(key=lambda one: one["price"])
        return found[0] if found and (len(found) == 1 or found[0]["price"] < found[1]["price"]) else None

    def _open_dates(self, leg: Row) -> list[str]:
        dates = self._store.flights[leg["flight_number"]]["dates"]
        return [date for date, row in dates.items() if row["status"] == AVAILABLE]

    def _day(self, leg: Row) -> Row:
        row: Row = self._store.flights[leg["flight_number"]]["dates"][leg["date"]]
        return row

    def _is_open(self, reservation: Row) -> bool:
        return all(self._day(leg)["status"] == AVAILABLE for leg in reservation["flights"])

    def _has_seats(self, reservation: Row, cabin: str) -> bool:
        count = passengers_of(reservation)
        legs = reservation["flights"]
        return self._is_open(reservation) and all(self._day(leg)["available_seats"][cabin] >= count for leg in legs)

    def _payment(self, most: int) -> tuple[str, Fact]:
        """Choose a method that can pay an amount."""
        methods = self._user["payment_methods"]
        cards = [key for key, one in methods.items() if one["source"] == CREDIT_CARD]
        gifts = [key for key, one in methods.items() if one["source"] == GIFT_CARD and one["amount"] >= most]
        choices = [*cards, *gifts]
        chosen = self._random.choice(choices)
        others = [phrases.describe_payment(methods[key]) for key in choices if key != chosen]
        return chosen, Fact(Topic.PAYMENT, phrases.describe_payment(methods[chosen]), at_first=next(iter(others), None))

    def _about(self, kind: RequestKind, reservation: Row, facts: list[Fact], actions: list[Action]) -> Scenario | None:
        """Return a request about a reservation, which is the second fact."""
        route = (reservation["origin"], reservation["destination"])
        text = phrases.RESERVATION.format(reservation_id=reservation["reservation_id"])
        if self._persona is Persona.FORGETFUL:
            rows = [self._store.reservations[key] for key in self._user["reservations"]]
            if sum((row["origin"], row["destination"]) == route for row in rows) > 1:
                return None
            text = phrases.ROUTE.format(origin=route[0], destination=route[1])
        found = self._scenario(kind, [Fact(Topic.RESERVATION, text), *facts], actions)
        return dataclasses.replace(found, reservation_id=reservation["reservation_id"])

    def _scenario(self, kind: RequestKind, facts: list[Fact], actions: list[Action]) -> Scenario:
        return Scenario(
            user_id=self._user["user_id"],
            persona=self._persona,
            kind=kind,
            opening=self._random.choice(phrases.OPENINGS[kind]),
            facts=(Fact(Topic.USER, phrases.USER.format(user_id=self._user["user_id"])), *facts),
            actions=tuple(actions),
        )


def _reason(ill: bool) -> Fact:
    return Fact(Topic.REASON, phrases.ILL if ill else phrases.PLANS)
