"""Functions with which published tasks start, and the conditions on their ends, by the names in the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.errors import ToolError

from .company import (
    ACTIVE,
    LAST_MONTH,
    OVERDUE,
    PAID,
    SUSPENDED,
    TODAY,
    Records,
    add_overdue_bill,
    bills_of,
    find_row,
    line_of,
)
from .handset import BROKEN_APN, POOR, Handset

_CONNECTIONS = ("connected", "searching", "no_service", "emergency_only")


class CompanyFunctions:
    """Functions of the company's system that are not tools.

    Args:
        records: The company's tables, changed in place.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def set_data_usage(self, customer_id: str, line_id: str, data_used_gb: float) -> None:
        """Set the data that a line has used."""
        line_of(self._records, customer_id, line_id)["data_used_gb"] = data_used_gb

    def suspend_line_for_overdue_bill(
        self, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
    ) -> None:
        """Suspend an active line, with an unpaid bill of the last month, and perhaps with an ended contract."""
        line = find_row(self._records, "line", line_id)
        if line["status"] != ACTIVE:
            raise ToolError("Line must be active to suspend for unpaid bill")
        amount = find_row(self._records, "plan", line["plan_id"])["price_per_month"]
        if amount <= 0:
            raise ToolError("Amount must be positive for overdue bill")
        customer = find_row(self._records, "customer", customer_id)
        if bills_of(self._records, customer, OVERDUE):
            raise ToolError("Customer already has an overdue bill")
        add_overdue_bill(self._records, customer, new_bill_id, amount, f"Charge for line {line_id}")
        line.update(status=SUSPENDED, suspension_start_date=TODAY)
        if contract_ended:
            line["contract_end_date"] = LAST_MONTH[1]

    def assert_data_refueling_amount(self, customer_id: str, line_id: str, expected_amount: float) -> bool:
        """Return True if a line has refueled an amount of data."""
        line = line_of(self._records, customer_id, line_id)
        return bool(abs(line["data_refueling_gb"] - expected_amount) < 1e-6)

    def assert_line_status(self, customer_id: str, line_id: str, expected_status: str) -> bool:
        """Return True if a line is in a state."""
        return bool(line_of(self._records, customer_id, line_id)["status"] == expected_status)

    def assert_overdue_bill_exists(self, customer_id: str, overdue_bill_id: str) -> bool:
        """Return True if a customer has an overdue bill; otherwise, it is an error."""
        if overdue_bill_id not in find_row(self._records, "customer", customer_id)["bill_ids"]:
            raise ToolError(f"Overdue bill {overdue_bill_id} not found")
        if find_row(self._records, "bill", overdue_bill_id)["status"] != OVERDUE:
            raise ToolError(f"Overdue bill {overdue_bill_id} is not overdue")
        return True

    def assert_no_overdue_bill(self, overdue_bill_id: str) -> bool:
        """Return True if a bill is paid or does not exist."""
        try:
            return bool(find_row(self._records, "bill", overdue_bill_id)["status"] == PAID)
        except ToolError:
            return True


class PhoneFunctions:
    """Functions of the customer's phone that are not tools.

    Args:
        phone: The phone, changed in place.
    """

    def __init__(self, phone: Handset) -> None:
        self._phone = phone

    def set_user_info(self, name: str, phone_number: str) -> None:
        """Set who the customer is."""
        self._phone.surroundings.update(name=name, phone_number=phone_number)

    def set_user_location(self, abroad: bool) -> None:
        """Set where the customer is."""
        self._phone.surroundings["is_abroad"] = abroad

    def simulate_network_search(self) -> None:
        """Let the phone look for a network."""
        self._phone.search_network()

    def turn_airplane_mode_on(self) -> None:
        """Turn airplane mode on."""
        self._toggle_airplane_mode(True)

    def turn_airplane_mode_off(self) -> None:
        """Turn airplane mode off."""
        self._toggle_airplane_mode(False)

    def _toggle_airplane_mode(self, to: bool) -> None:
        if self._phone.toggle_airplane_mode() != to:  # it was so already; switching twice has effects
            self._phone.toggle_airplane_mode()

    def unseat_sim_card(self) -> None:
        """Take the SIM card out."""
        self._phone.device["sim_card_missing"] = True
        self._phone.search_network()

    def lock_sim_card(self, mode: str) -> None:
        """Lock the SIM card with its PIN or PUK."""
        if mode not in ("pin", "puk"):
            raise ToolError("unknown mode of lock_sim_card", got=repr(mode), expected="pin or puk")
        self._phone.device["sim_card_status"] = f"locked_{mode}"
        self._phone.search_network()

    def turn_data_on(self) -> None:
        """Turn mobile data on."""
        self._phone.device["data_enabled"] = True

    def turn_data_off(self) -> None:
        """Turn mobile data off."""
        self._phone.device["data_enabled"] = False
        self._phone.search_network()

    def turn_roaming_on(self) -> None:
        """Turn data roaming on."""
        self._phone.device["roaming_enabled"] = True
        self._phone.search_network()

    def turn_roaming_off(self) -> None:
        """Turn data roaming off."""
        self._phone.device["roaming_enabled"] = False
        self._phone.search_network()

    def turn_data_saver_mode_on(self) -> None:
        """Turn the data saver on."""
        self._phone.device["data_saver_mode"] = True

    def turn_data_saver_mode_off(self) -> None:
        """Turn the data saver off."""
        self._phone.device["data_saver_mode"] = False

    def break_apn_settings(self) -> None:
        """Break the access point."""
        self._phone.apn["apn_name"] = BROKEN_APN
        self._phone.search_network()

    def break_apn_mms_setting(self) -> None:
        """Remove the address for picture messages."""
        self._phone.apn["mmsc_url"] = None

    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        """Set whether calls, and picture messages, go over Wi-Fi."""
        self._phone.device["wifi_calling_enabled"] = enabled
        if mms_over_wifi is not None:
            self._phone.device["wifi_calling_mms_over_wifi"] = mms_over_wifi

    def break_vpn(self) -> None:
        """Connect to a slow VPN; later connections are as slow."""
        self._phone.connect_vpn()
        details = self._phone.device["vpn_details"]
        if details is None:
            raise ToolError("the phone is connected to a VPN without details, which cannot be broken")
        details["server_performance"] = POOR

    def remove_app_permission(self, app_name: str, permission: str) -> None:
        """Take a permission from an app, if both exist."""
        permissions, name = self._phone.permissions_of(app_name), permission.lower()
        if permissions is not None and name in permissions:
            permissions[name] = False

    def assert_airplane_mode_status(self, expected_status: bool) -> bool:
        """Return True if airplane mode is on, or off."""
        return bool(self._phone.device["airplane_mode"] == expected_status)

    def assert_service_status(self, expected_status: str) -> bool:
        """Return True if the phone's connection is in a state."""
        if expected_status not in _CONNECTIONS:
            raise ToolError("unknown state of the connection", got=repr(expected_status), expected=_CONNECTIONS)
        return bool(self._phone.device["network_connection_status"] == expected_status)

    def assert_mobile_data_status(self, expected_status: bool) -> bool:
        """Return True if mobile data works, or does not."""
        return self._phone.has_data() == expected_status

    def assert_mobile_roaming_status(self, expected_status: bool) -> bool:
        """Return True if data roaming is on, or off."""
        return bool(self._phone.device["roaming_enabled"] == expected_status)

    def assert_mobile_data_saver_mode_status(self, expected_status: bool) -> bool:
        """Return True if the data saver is on, or off."""
        return bool(self._phone.device["data_saver_mode"] == expected_status)

    def assert_internet_speed(self, expected_speed: float, expected_desc: str | None = None) -> bool:
        """Return True if mobile data has at least a speed, and the grade if one is given."""
        mbps, grade = self._phone.speed()
        is_graded = expected_desc is None or grade.lower() == expected_desc.lower()
        return (mbps or 0.0) >= expected_speed and is_graded

    def assert_internet_not_excellent(self) -> bool:
        """Return True if mobile data is not excellent."""
        return self._phone.speed().grade != "Excellent"

    def assert_can_send_mms(self, expected_status: bool) -> bool:
        """Return True if picture messages can be sent, or cannot."""
        return self._phone.can_send_mms() == expected_status

    def assert_mobile_data_usage_exceeded(self, expected_status: bool) -> bool:
        """Return True if the plan's data is used up, or is not."""
        return bool(self._phone.surroundings["mobile_data_usage_exceeded"] == expected_status)


def public_methods(kind: type) -> Mapping[str, Any]:
    """Return the public methods of a class by name."""
    return {name: method for name, method in vars(kind).items() if not name.startswith("_")}
