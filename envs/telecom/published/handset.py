"""The customer's phone: how its settings affect the signal, mobile data and picture messages, as in tau2-bench.

Its state is plain JSON: ``device`` and ``surroundings`` of `schema.CustomerFile`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...desks.records import Row

CONNECTED, SEARCHING, NO_SERVICE = "connected", "searching", "no_service"
NONE = "none"
BROKEN_APN = "broken"
POOR = "poor"
MODES = {"4g_5g_preferred": "5G", "4g_only": "4G", "3g_only": "3G", "2g_only": "2G"}
"""Network modes and the technology that each prefers."""
_BARS = {
    NONE: "📵 No Signal",
    POOR: "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}
_MBPS = {NONE: (0.0, 0.0), "2G": (0.1, 0.4), "3G": (1.0, 5.0), "4G": (10.0, 100.0), "5G": (50.0, 500.0)}
"""Lowest and highest speed of each technology."""
_SIGNAL_FACTORS = {NONE: 0.0, POOR: 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
_GRADES = ((1, "Very Poor"), (5, "Poor"), (25, "Fair"), (100, "Good"))
"""Names of speeds below a limit in Mbps."""
SYMBOLS = "".join(_BARS.values()) + "✈️📱🔽📡🔒🔋"
"""Characters of the status bar, which are not on every keyboard."""


class SpeedReading(NamedTuple):
    """Result of a speed test."""

    mbps: float | None
    """``None`` without a connection."""
    grade: str


def default_vpn() -> Row:
    """Return the connection that the phone makes by default."""
    return {"server_address": "192.168.1.1", "protocol": "OpenVPN", "server_performance": "excellent"}


class Handset:
    """Phone and its surroundings, which change in place.

    Args:
        device: Settings and state.
        surroundings: Place, signal, and what the company allows.
        vpn: Connection that the phone makes; a task's start may have broken it.
    """

    def __init__(self, device: Row, surroundings: Row, vpn: Row | None = None) -> None:
        self.device = device
        self.surroundings = surroundings
        self.vpn = default_vpn() if vpn is None else vpn

    @property
    def sim_status(self) -> str:
        """State of the SIM card."""
        return "missing" if self.device["sim_card_missing"] else str(self.device["sim_card_status"])

    @property
    def apn(self) -> Row:
        """Settings of the access point."""
        settings: Row = self.device["active_apn_settings"]
        return settings

    def search_network(self) -> None:
        """Connect to a network, or lose it, as the settings and the line allow."""
        blocked = (
            self.sim_status != "active"
            or self.device["airplane_mode"]
            or self.apn["apn_name"] == BROKEN_APN
            or not self.surroundings["line_active"]
        )
        if blocked:
            self._connect(NO_SERVICE, NONE, NONE)
            return
        signals = self.surroundings["signal_strength"]
        technology = MODES[self.device["network_mode_preference"]]
        if technology == "5G" and signals.get("5G", NONE) == NONE:
            technology = "4G"
        self._connect(CONNECTED, technology, signals.get(technology, NONE))

    def _connect(self, status: str, technology: str, signal: str) -> None:
        self.device["network_connection_status"] = status
        self.device["network_technology_connected"] = technology
        self.device["network_signal_strength"] = signal

    def status_bar(self) -> str:
        """Return the text of the status bar, at the top of the screen."""
        device, shown = self.device, []
        if device["airplane_mode"]:
            shown.append("✈️ Airplane Mode")
        else:
            technology = device["network_technology_connected"]
            shown.append(_BARS[device["network_signal_strength"]])
            if technology != NONE:
                shown.append(technology)
            if device["data_enabled"] and technology != NONE:
                shown.append("📱 Data Enabled")
                if device["data_saver_mode"]:
                    shown.append("🔽 Data Saver")
            else:
                shown.append("📵 Data Disabled")
        if device["wifi_enabled"] and device["wifi_connected"]:
            shown.append(f"📡 Connected to {device['wifi_ssid']}" if device["wifi_ssid"] else "📡 Enabled")
        if device["vpn_connected"]:
            shown.append("🔒 VPN Connected")
        shown.append(f"🔋 {device['battery_level']}%")
        return " | ".join(shown)

    def has_data(self) -> bool:
        """Return True if mobile data works."""
        device, around = self.device, self.surroundings
        if device["airplane_mode"] or device["network_signal_strength"] == NONE:
            return False
        if device["network_connection_status"] == NO_SERVICE:
            return False
        if around["is_abroad"] and not (device["roaming_enabled"] and around["roaming_allowed"]):
            return False
        return bool(device["data_enabled"]) and not around["mobile_data_usage_exceeded"]

    def speed(self) -> SpeedReading:
        """Return the speed of mobile data."""
        if not self.has_data():
            return SpeedReading(None, "No Connection")
        device, details = self.device, self.device["vpn_details"]
        is_slowed = device["vpn_connected"] and details and details["server_performance"] == POOR
        factor = 0.1 if is_slowed else 1.0
        if device["data_saver_mode"]:
            factor *= 0.2
        low, high = _MBPS[device["network_technology_connected"]]
        mbps = round((low + high) / 2.0 * _SIGNAL_FACTORS[device["network_signal_strength"]] * factor, 2)
        return SpeedReading(mbps, next((name for limit, name in _GRADES if mbps < limit), "Excellent"))

    def can_send_mms(self) -> bool:
        """Return True if picture messages can be sent."""
        device = self.device
        if not self.has_data() or device["network_technology_connected"] == "2G":
            return False
        if device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"]:
            return False
        app = device["app_statuses"].get("messaging")
        if self.apn["mmsc_url"] is None or app is None:
            return False
        return bool(app["permissions"]["storage"] and app["permissions"]["sms"])

    def toggle(self, setting: str) -> bool:
        """Change a setting that is on or off; return its new state."""
        self.device[setting] = not self.device[setting]
        return bool(self.device[setting])

    def toggle_airplane_mode(self) -> bool:
        """Change airplane mode; return its new state."""
        is_on = self.toggle("airplane_mode")
        if is_on or self.device["wifi_enabled"]:
            self.leave_wifi()
        if is_on and self.device["vpn_connected"]:
            self.disconnect_vpn()
        self.search_network()
        return is_on

    def leave_wifi(self) -> None:
        """Disconnect from the Wi-Fi network."""
        self.device.update(wifi_connected=False, wifi_ssid=None, wifi_signal_strength=NONE)

    def connect_vpn(self) -> bool:
        """Connect to the VPN; return False if it is connected already."""
        if self.device["vpn_connected"]:
            return False
        self.device.update(vpn_connected=True, vpn_details=self.vpn)
        return True

    def disconnect_vpn(self) -> bool:
        """Disconnect from the VPN; return False if it is not connected."""
        if not self.device["vpn_connected"]:
            return False
        self.device.update(vpn_connected=False, vpn_details=None)
        return True

    def permissions_of(self, app_name: str) -> dict[str, bool] | None:
        """Return an app's permissions; ``None`` if there is no such app."""
        app = self.device["app_statuses"].get(app_name)
        return None if app is None else app["permissions"]

    def to_plain(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {"device": self.device, "surroundings": self.surroundings}
