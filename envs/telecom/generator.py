"""The telephone company of a split: its plans and customers with their lines, phones and bills, from a seed."""

from __future__ import annotations

import functools
from random import Random

from ..desks.records import Row
from ..task_ids import TEST, TRAIN, VALID, check_split
from .records import ACTIVE, ISSUED, PAID, TelecomStore

CUSTOMERS = {TRAIN: 300, VALID: 80, TEST: 80}
FIRST_DIGIT = {TRAIN: 1, VALID: 5, TEST: 7}
"""First digit of the numbers in all ids; different splits share no id and no phone number."""
_FIRST = ("Alma", "Boris", "Clara", "Dario", "Edith", "Femi", "Greta", "Hassan", "Ines", "Jonas", "Keiko", "Luca")
_LAST = ("Abbott", "Berger", "Castro", "Duarte", "Ekman", "Fischer", "Gupta", "Hale", "Ivanov", "Joshi", "Keller")
MODELS = ("Aster 5", "Aster 6 Pro", "Birch Mini", "Birch Max", "Comet S", "Comet X", "Delta One", "Ember 3")
"""Models of phones; the lines of a customer have different ones."""
_PLANS = (("Basic", 5, 20, 3.0), ("Plus", 15, 35, 2.5), ("Premium", 40, 55, 2.0))
"""Name, GB per month, dollars per month, and dollars per refueled GB."""
_PERIODS = (("2024-12", "2025-01-15"), ("2025-01", "2025-02-15"), ("2025-02", "2025-03-25"))
"""Month and due date of the bills; the last one is not due yet."""


@functools.cache
def store_of(split: str) -> TelecomStore:
    """Return the records of a split; they are generated once per process.

    Raises:
        UsageError: the split does not exist.
    """
    check_split(split, "telecom")
    maker = _Maker(split)
    for number in range(1, CUSTOMERS[split] + 1):
        maker.add_customer(number)
    return TelecomStore(
        customers=maker.customers, lines=maker.lines, plans=maker.plans, devices=maker.devices, bills=maker.bills
    )


class _Maker:
    """Generator of a company, which draws everything from one random stream in a fixed order."""

    def __init__(self, split: str) -> None:
        self._first, self._random = FIRST_DIGIT[split], Random(f"telecom {split}")
        self.customers: dict[str, Row] = {}
        self.lines: dict[str, Row] = {}
        self.devices: dict[str, Row] = {}
        self.bills: dict[str, Row] = {}
        self.plans: dict[str, Row] = {
            f"P{self._first}{number:02}": {
                "plan_id": f"P{self._first}{number:02}",
                "name": name,
                "data_limit_gb": limit,
                "price_per_month": price,
                "refuel_price_per_gb": refuel,
            }
            for number, (name, limit, price, refuel) in enumerate(_PLANS, 1)
        }

    def add_customer(self, number: int) -> None:
        """Add a customer with one to three lines and three bills."""
        random, key = self._random, f"C{self._first}{number:03}"
        name = f"{random.choice(_FIRST)} {random.choice(_LAST)}"
        born = f"{random.randint(1950, 2002)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"
        models = random.sample(MODELS, random.randint(1, 3))
        line_ids = [self._add_line(number, place, model) for place, model in enumerate(models, 1)]
        self.customers[key] = {
            "customer_id": key,
            "full_name": name,
            "date_of_birth": born,
            "email": f"{name.lower().replace(' ', '.')}{number}@example.com",
            "line_ids": line_ids,
            "bill_ids": [self._add_bill(key, number, place) for place in range(1, len(_PERIODS) + 1)],
            "charges_on_next_bill": [],
        }

    def _add_line(self, number: int, place: int, model: str) -> str:
        random, key, device = self._random, f"L{self._first}{number:03}{place}", f"D{self._first}{number:03}{place}"
        plan = random.choice(list(self.plans.values()))
        month = random.randint(1, 12)
        self.devices[device] = {"device_id": device, "model": model, "type": "phone"}
        self.lines[key] = {
            "line_id": key,
            "phone_number": f"555-{self._first}{number // 100:02}-{number % 100:02}{place}{random.randint(0, 9)}",
            "status": ACTIVE,
            "plan_id": plan["plan_id"],
            "device_id": device,
            "data_used_gb": round(plan["data_limit_gb"] * random.uniform(0.1, 0.8), 1),
            "data_refueled_gb": 0,
            "roaming_enabled": random.random() < 0.5,
            "contract_end_date": f"{random.choice((2026, 2027))}-{month:02}-28",
        }
        return key

    def _add_bill(self, customer: str, number: int, place: int) -> str:
        key, (month, due) = f"B{self._first}{number:03}{place}", _PERIODS[place - 1]
        self.bills[key] = {
            "bill_id": key,
            "customer_id": customer,
            "month": month,
            "due_date": due,
            "total_due": round(self._random.uniform(20, 120), 2),
            "status": ISSUED if place == len(_PERIODS) else PAID,
        }
        return key
