"""The airline of a split: its flights, users and reservations, generated from a seed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from random import Random

from ..desks.records import Row
from ..task_ids import TEST, TRAIN, VALID, check_split
from .desk import AIRPORTS
from .records import (
    AVAILABLE,
    BASIC,
    BUSINESS,
    CABINS,
    CANCELLED,
    CERTIFICATE,
    CREDIT_CARD,
    ECONOMY,
    GIFT_CARD,
    INSURANCE_PRICE,
    MEMBERSHIPS,
    Store,
    paid_bags,
)

USERS = {TRAIN: 300, VALID: 80, TEST: 80}
FIRST_NUMBER = {TRAIN: 1, VALID: 5, TEST: 7}
"""Leading digit of the numbers of users, flights, payments and reservations; different splits share none."""
_FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kira", "Liam", "Mona", "Noel")
_LAST = ("Adler", "Brand", "Costa", "Dunn", "Evans", "Ferro", "Grant", "Holt", "Ito", "Jensen", "Kaya", "Lund", "Moss")
_PAST, _FUTURE = [f"2024-05-{day:02}" for day in range(8, 15)], [f"2024-05-{day:02}" for day in range(16, 28)]
_FARES: Mapping[str, tuple[int, int]] = {BASIC: (50, 100), ECONOMY: (100, 200), BUSINESS: (250, 500)}
_SERVED = 10
"""Number of airports of each split."""


@functools.cache
def store_of(split: str) -> Store:
    """Return the records of a split; they are generated once per process.

    Raises:
        UsageError: the split does not exist.
    """
    check_split(split, "airline")
    maker = _Maker(split)
    flights = maker.flights()
    users, reservations = maker.users_and_reservations(flights)
    return Store(users=users, flights=flights, reservations=reservations)


class _Maker:
    """Generator of an airline, which draws everything from one random stream in a fixed order."""

    def __init__(self, split: str) -> None:
        self._split, self._first = split, FIRST_NUMBER[split]
        self._random = Random(f"airline {split}")
        self._payments = itertools.count(self._first * 1_000_000 + 1)
        self._taken: set[str] = set()

    def flights(self) -> dict[str, Row]:
        """Return two flights a day between every two airports."""
        served = self._random.sample(sorted(AIRPORTS), _SERVED)
        numbers = (f"AG{self._first}{number:03}" for number in itertools.count(1))
        found = {}
        for origin, destination in itertools.permutations(served, 2):
            for hour in (self._random.randint(6, 11), self._random.randint(13, 19)):
                minute = self._random.choice((0, 15, 30, 45))
                number = next(numbers)
                found[number] = {
                    "flight_number": number,
                    "origin": origin,
                    "destination": destination,
                    "scheduled_departure_time_est": f"{hour:02}:{minute:02}:00",
                    "scheduled_arrival_time_est": f"{hour + self._random.randint(1, 4):02}:{minute:02}:00",
                    "dates": self._dates(),
                }
        return found

    def _dates(self) -> dict[str, Row]:
        dates: dict[str, Row] = {date: {"status": "landed"} for date in _PAST}
        dates["2024-05-15"] = {"status": "on time"}
        for date in _FUTURE:
            if self._random.random() < 0.04:
                dates[date] = {"status": CANCELLED}
                continue
            seats = {cabin: self._random.randint(3, 20) for cabin in CABINS}
            prices = {cabin: self._random.randint(*fares) for cabin, fares in _FARES.items()}
            dates[date] = {"status": AVAILABLE, "available_seats": seats, "prices": prices}
        return dates

    def users_and_reservations(self, flights: Mapping[str, Row]) -> tuple[dict[str, Row], dict[str, Row]]:
        """Return the users, each with three to five reservations."""
        users, reservations = {}, {}
        for number in range(1, USERS[self._split] + 1):
            user = self._user(number)
            users[user["user_id"]] = user
            for _ in range(self._random.randint(3, 5)):
                reservation = self._reservation(user, flights)
                user["reservations"].append(reservation["reservation_id"])
                reservations[reservation["reservation_id"]] = reservation
        return users, reservations

    def _user(self, number: int) -> Row:
        person = self._person()
        name = f"{person['first_name']}_{person['last_name']}".lower()
        methods: list[Row] = [
            {"source": CREDIT_CARD, "brand": brand, "last_four": f"{self._random.randint(1000, 9999)}"}
            for brand in self._random.sample(("visa", "mastercard"), self._random.randint(1, 2))
        ]
        methods.append({"source": GIFT_CARD, "amount": self._random.randint(20, 300)})
        if self._random.random() < 0.5:
            methods.append({"source": CERTIFICATE, "amount": self._random.choice((100, 150, 250))})
        known = {f"{row['source']}_{next(self._payments)}": row for row in methods}
        return {
            "user_id": f"{name}_{self._first}{number:03}",
            "name": {"first_name": person["first_name"], "last_name": person["last_name"]},
            "email": f"{name.replace('_', '.')}{number}@example.com",
            "dob": person["dob"],
            "payment_methods": {key: {**row, "id": key} for key, row in known.items()},
            "saved_passengers": self._others(person, self._random.randint(1, 3)),
            "membership": self._random.choice(MEMBERSHIPS),
            "reservations": [],
        }

    def _others(self, person: Row, count: int) -> list[Row]:
        """Draw people with other names than a person's and one another's."""
        found = {(person["first_name"], person["last_name"]): person}
        while len(found) <= count:
            other = self._person()
            found.setdefault((other["first_name"], other["last_name"]), other)
        return list(found.values())[1:]

    def _person(self) -> Row:
        born = f"{self._random.randint(1950, 2002)}-{self._random.randint(1, 12):02}-{self._random.randint(1, 28):02}"
        return {"first_name": self._random.choice(_FIRST), "last_name": self._random.choice(_LAST), "dob": born}

    def _reservation(self, user: Row, flights: Mapping[str, Row]) -> Row:
        random = self._random
        out = flights[random.choice(list(flights))]
        back = random.choice([one for one in flights.values() if _returns(out, one)])
        is_round = random.random() < 0.4
        first, second = sorted(random.sample(range(len(_FUTURE)), 2))
        has_flown = random.random() < 0.15
        start = random.choice(_PAST) if has_flown and is_round else _FUTURE[first]
        cabin, trips = random.choice(CABINS), [(out, start), *([(back, _FUTURE[second])] if is_round else [])]
        legs = [
            {
                "origin": flight["origin"],
                "destination": flight["destination"],
                "flight_number": flight["flight_number"],
                "date": date,
                "price": random.randint(*_FARES[cabin]),
            }
            for flight, date in trips
        ]
        own = {**user["name"], "dob": user["dob"]}
        passengers = [own, *user["saved_passengers"]][: random.randint(1, 3)]
        bags = random.randint(0, 3)
        paid, insurance = paid_bags(user["membership"], cabin, len(passengers), bags), random.choice(("yes", "no"))
        total = (sum(leg["price"] for leg in legs) + (INSURANCE_PRICE if insurance == "yes" else 0)) * len(passengers)
        card = next(key for key in user["payment_methods"] if key.startswith(CREDIT_CARD))
        is_new = random.random() < 0.2
        return {
            "reservation_id": self._id(),
            "user_id": user["user_id"],
            "origin": out["origin"],
            "destination": out["destination"],
            "flight_type": "round_trip" if is_round else "one_way",
            "cabin": cabin,
            "flights": legs,
            "passengers": passengers,
            "payment_history": [{"payment_id": card, "amount": total + 50 * paid}],
            "created_at": f"2024-05-{15 if is_new else random.randint(1, 13):02}T{random.randint(1, 14):02}:30:00",
            "total_baggages": bags,
            "nonfree_baggages": paid,
            "insurance": insurance,
        }

    def _id(self) -> str:
        while True:
            found = f"{self._first}" + "".join(self._random.choice("ABCDEFGHKLMNPRSTUVWXYZ23456789") for _ in range(5))
            if found not in self._taken:
                self._taken.add(found)
                return found


def _returns(out: Row, back: Row) -> bool:
    return bool(back["origin"] == out["destination"] and back["destination"] == out["origin"])
