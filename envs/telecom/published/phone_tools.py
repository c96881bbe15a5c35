"""The customer's tools on the phone, with the names, arguments and results of tau2-bench."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from agentrl.errors import ToolError

from ...desks.records import Row
from .handset import MODES, SEARCHING, Handset
from .schema import APNSettings, to_plain

_SIM = {
    "active": "Your SIM card is active and working.",
    "missing": "No SIM card detected in the phone.",
    "locked_pin": "The SIM card is locked with a PIN code.",
    "locked_puk": "The SIM card is locked with a PUK code.",
}
_ADVICE = {
    "Very Poor": "Connection is very slow. Basic web browsing might be difficult.",
    "Poor": "Connection is slow. Web browsing may be sluggish, streaming difficult.",
    "Fair": "Connection is okay for web browsing and some standard definition streaming.",
    "Good": "Connection is good for most activities, including HD streaming.",
    "Excellent": "Connection is very fast.",
}


def _on(state: object) -> str:
    return "ON" if state else "OFF"


def _yes(state: object) -> str:
    return "Yes" if state else "No"


class PhoneTools:
    """Tools of the customer, or of an agent without a customer. Each public method is a tool.

    Args:
        phone: The phone, changed in place.
    """

    def __init__(self, phone: Handset) -> None:
        self._phone = phone

    def _with_bar(self, text: str) -> str:
        return f"{text}\nStatus Bar: {self._phone.status_bar()}"

    def check_status_bar(self) -> Any:
        """Shows the symbols at the top of the screen: signal, mobile data, Wi-Fi, battery."""
        return f"Status Bar: {self._phone.status_bar()}"

    def check_network_status(self) -> Any:
        """Shows airplane mode, SIM card, signal, type of network, mobile data, data roaming and Wi-Fi."""
        device = self._phone.device
        lines = [
            f"Airplane Mode: {_on(device['airplane_mode'])}",
            f"SIM Card Status: {self._phone.sim_status}",
            f"Cellular Connection: {device['network_connection_status']}",
            f"Cellular Signal: {device['network_signal_strength']}",
            f"Cellular Network Type: {device['network_technology_connected']}",
            f"Mobile Data Enabled: {_yes(device['data_enabled'])}",
            f"Data Roaming Enabled: {_yes(device['roaming_enabled'])}",
            f"Wi-Fi Radio: {_on(device['wifi_enabled'])}",
            f"Wi-Fi Connected: {_yes(device['wifi_connected'])}",
        ]
        if device["wifi_connected"]:
            lines.append(f"Connected Wi-Fi Network: {device['wifi_ssid']}")
        return "\n".join(lines)

    def check_network_mode_preference(self) -> Any:
        """Shows which type of network the phone prefers."""
        return f"Network Mode Preference: {self._phone.device['network_mode_preference']}"

    def set_network_mode_preference(self, mode: str) -> Any:
        """Changes the type of network that the phone prefers.

        Args:
            mode: 4g_5g_preferred, 4g_only, 3g_only or 2g_only.
        """
        if mode not in MODES:
            options = ", ".join(MODES)
            text = f"Failed to set network mode: '{mode}' is not a valid option. Please use one of: {options}"
            return self._with_bar(text)
        self._phone.device["network_mode_preference"] = mode
        self._phone.search_network()
        return self._with_bar(f"Preferred Network Mode set to: {mode}")

    def run_speed_test(self) -> Any:
        """Measures how fast mobile data is."""
        mbps, grade = self._phone.speed()
        if mbps is None:
            return f"Speed test failed: {grade}."
        return f"Speed Test Result: {mbps:.2f} Mbps ({grade}). {_ADVICE[grade]}"

    def toggle_airplane_mode(self) -> Any:
        """Turns airplane mode on or off. It stops all wireless connections."""
        return self._with_bar(f"Airplane Mode is now {_on(self._phone.toggle_airplane_mode())}.")

    def check_sim_status(self) -> Any:
        """Shows whether the SIM card works, is missing, or is locked."""
        return _SIM[self._phone.sim_status]

    def reseat_sim_card(self) -> Any:
        """Takes the SIM card out and puts it back in."""
        self._phone.device["sim_card_missing"] = False
        self._phone.search_network()
        return self._with_bar("SIM card re-seated successfully.")

    def toggle_data(self) -> Any:
        """Turns mobile data on or off."""
        is_on = self._phone.toggle("data_enabled")
        self._phone.search_network()
        return self._with_bar(f"Mobile Data is now {_on(is_on)}.")

    def toggle_roaming(self) -> Any:
        """Turns data roaming on or off, which mobile data needs abroad."""
        is_on = self._phone.toggle("roaming_enabled")
        self._phone.search_network()
        return self._with_bar(f"Data Roaming is now {_on(is_on)}.")

    def check_data_restriction_status(self) -> Any:
        """Shows whether the data saver is on."""
        if self._phone.device["data_saver_mode"]:
            return "Data Saver mode is ON (limits data usage)."
        return "Data Saver mode is OFF."

    def toggle_data_saver_mode(self) -> Any:
        """Turns the data saver on or off. It makes mobile data slower."""
        return self._with_bar(f"Data Saver Mode is now {_on(self._phone.toggle('data_saver_mode'))}.")

    def check_apn_settings(self) -> Any:
        """Shows the access point's name and its address for picture messages."""
        name, url = self._phone.apn["apn_name"], self._phone.apn["mmsc_url"] or "Not Set"
        return (
            f"Current APN Name: {name}\nMMSC URL (for picture messages): {url}\n"
            "(These are technical settings, usually best left unchanged.)"
        )

    def set_apn_settings(self, apn_settings: dict[str, Any]) -> Any:
        """Replaces the settings of the access point.

        Args:
            apn_settings: Any of apn_name (internet or broken), reset_at_reboot, mms_apn, mmsc_url, mms_proxy, mms_port.
        """
        try:
            settings = to_plain(APNSettings(**apn_settings))
        except (ValidationError, TypeError) as error:
            raise ToolError(str(error)) from error
        self._phone.device["active_apn_settings"] = settings
        self._phone.search_network()
        return self._with_bar(f"APN settings set to: {settings['apn_name']}")

    def reset_apn_settings(self) -> Any:
        """Resets the settings of the access point at the next restart."""
        self._phone.apn["reset_at_reboot"] = True
        self._phone.search_network()
        return self._with_bar("APN settings will reset at reboot.")

    def check_wifi_status(self) -> Any:
        """Shows whether Wi-Fi is on, and the network it is connected to."""
        device = self._phone.device
        if not device["wifi_enabled"]:
            return "Wi-Fi is turned OFF."
        if not device["wifi_connected"]:
            return "Wi-Fi is ON but not connected to any network."
        return (
            f"Wi-Fi is ON and connected to '{device['wifi_ssid']}'. Signal strength: {device['wifi_signal_strength']}."
        )

    def toggle_wifi(self) -> Any:
        """Turns Wi-Fi on or off."""
        if self._phone.device["airplane_mode"]:
            return self._with_bar("Cannot change Wi-Fi settings while Airplane Mode is ON.")
        is_on = self._phone.toggle("wifi_enabled")
        if not is_on:
            self._phone.leave_wifi()
        return self._with_bar(f"Wi-Fi is now {_on(is_on)}.")

    def check_wifi_calling_status(self) -> Any:
        """Shows whether calls go over Wi-Fi."""
        return f"Wi-Fi Calling is currently turned {_on(self._phone.device['wifi_calling_enabled'])}."

    def toggle_wifi_calling(self) -> Any:
        """Turns calls over Wi-Fi on or off."""
        return self._with_bar(f"Wi-Fi Calling is now {_on(self._phone.toggle('wifi_calling_enabled'))}.")

    def check_vpn_status(self) -> Any:
        """Shows whether a VPN is on, and its connection."""
        device = self._phone.device
        if device["vpn_connected"]:
            details: Row | None = device["vpn_details"]
            if details:
                return f"VPN is ON and connected. Details: {_vpn_text(details)}"
            return "VPN is ON and connected (no specific details available)."
        if device["vpn_enabled_setting"]:
            return "VPN is turned ON in settings, but currently not connected."
        return "VPN is turned OFF."

    def connect_vpn(self) -> Any:
        """Connects to the VPN."""
        if not self._phone.connect_vpn():
            return "VPN already connected."
        return self._with_bar("VPN connected successfully.")

    def disconnect_vpn(self) -> Any:
        """Disconnects from the VPN."""
        if self._phone.disconnect_vpn():
            return self._with_bar("VPN disconnected successfully.")
        return self._with_bar("No active VPN connection to disconnect.")

    def check_installed_apps(self) -> Any:
        """Lists the apps of the phone."""
        return f"The following apps are installed on the phone: {', '.join(self._phone.device['app_statuses'])}"

    def check_app_status(self, app_name: str) -> Any:
        """Shows an app with its permissions.

        Args:
            app_name: Name of the app.
        """
        permissions = self._phone.permissions_of(app_name)
        if permissions is None:
            return f"App '{app_name}' not found on this phone."
        granted = [f"   - {name}" for name, is_granted in permissions.items() if is_granted]
        lines = [" - Permissions Granted:", *granted] if granted else [" - Permissions: None granted."]
        return "\n".join([f"Status for App: {app_name}", *lines])

    def check_app_permissions(self, app_name: str) -> Any:
        """Lists what an app may use.

        Args:
            app_name: Name of the app.
        """
        permissions = self._phone.permissions_of(app_name)
        if permissions is None:
            return f"App '{app_name}' not found on this phone."
        granted = [name for name, is_granted in permissions.items() if is_granted]
        if not granted:
            return f"App '{app_name}' currently has no permissions granted."
        return f"App '{app_name}' has permission for: {', '.join(granted)}."

    def grant_app_permission(self, app_name: str, permission: str) -> Any:
        """Lets an app use something.

        Args:
            app_name: Name of the app.
            permission: sms, storage, phone or network.
        """
        permissions, name = self._phone.permissions_of(app_name), permission.lower()
        if permissions is None:
            return self._with_bar(f"Error. App '{app_name}' not found. Cannot grant permission.")
        if name not in permissions:
            known = f"available permissions: {list(permissions)}"
            return self._with_bar(f"Error. Permission '{name}' not tracked for app '{app_name}', {known}")
        permissions[name] = True
        return self._with_bar(f"Success. Permission '{name}' granted to app '{app_name}'.")

    def can_send_mms(self) -> Any:
        """Shows whether the messaging app can send picture messages."""
        return f"Your messaging app {'can' if self._phone.can_send_mms() else 'cannot'} send MMS messages."

    def reboot_device(self) -> Any:
        """Restarts the phone."""
        lines = ["Restarting network services..."]
        if self._phone.apn["reset_at_reboot"]:
            lines.insert(0, "Resetting APN settings...")
            self._phone.device["active_apn_settings"] = to_plain(APNSettings())
        self._phone.device["network_connection_status"] = SEARCHING
        self._phone.search_network()
        return self._with_bar("\n".join(lines))

    def check_payment_request(self) -> Any:
        """Shows whether the company asks for a payment."""
        request = self._phone.surroundings["payment_request"]
        if request is None:
            return "No payment request has been made."
        return f"You have a payment request for bill {request['bill_id']} of {request['amount_due']} USD."

    def make_payment(self) -> Any:
        """Pays the bill of the payment request."""
        request = self._phone.surroundings["payment_request"]
        if request is None:
            return "You do not have a payment request."
        request["paid"] = True
        return f"Payment of {request['amount_due']} USD has been made for bill {request['bill_id']}."


def _vpn_text(details: Row) -> str:
    """Return the details as Python writes them in tau2-bench."""
    address, protocol, performance = (details[key] for key in ("server_address", "protocol", "server_performance"))
    shown = f"<PerformanceLevel.{performance.upper()}: '{performance}'>"
    return f"{{'server_address': {address!r}, 'protocol': {protocol!r}, 'server_performance': {shown}}}"
