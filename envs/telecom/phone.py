"""The customer's phone: its settings, its working functions, and the customer's observations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple


class Feature(enum.StrEnum):
    """A part of the phone that a customer can look at or act on. The value is its name in sentences."""

    STATUS_BAR = "status bar"
    AIRPLANE_MODE = "airplane mode"
    SIM = "SIM card"
    DATA = "mobile data"
    ROAMING = "data roaming"
    DATA_SAVER = "data saver"
    VPN = "VPN"
    WIFI_CALLING = "Wi-Fi calling"
    NETWORK_MODE = "network mode"
    APN = "APN settings"
    PERMISSIONS = "permissions of the messaging app"
    SPEED = "speed test"
    PICTURE_MESSAGE = "picture message"
    POWER = "restart"
    PAYMENT = "payment request"


class Verb(enum.StrEnum):
    """Action of the customer on a feature."""

    CHECK = "check"
    ON = "on"
    OFF = "off"
    TOGGLE = "toggle"
    SET = "set"
    RESET = "reset"


class PhoneStep(NamedTuple):
    """One thing that a customer does on the phone."""

    verb: Verb
    feature: Feature
    values: tuple[str, ...] = ()
    """The network mode, or the permissions."""


class Network(NamedTuple):
    """State of the network for a phone, from the company's records and the customer's place."""

    active: bool
    """True if the line is not suspended."""
    has_data: bool
    """True if the month's data is not used up."""
    roaming: bool
    """True if the line may use data abroad."""
    abroad: bool


class Functions(NamedTuple):
    """Functions of a phone, each true if it works."""

    service: bool
    data: bool
    fast: bool
    """True if data works at `GOOD_SPEED` or more."""
    picture_messages: bool


SWITCHES: Final = (
    Feature.AIRPLANE_MODE,
    Feature.DATA,
    Feature.ROAMING,
    Feature.DATA_SAVER,
    Feature.VPN,
    Feature.WIFI_CALLING,
)
SIM_OK, SIM_LOOSE, SIM_LOCKED = "active", "missing", "locked with a PIN"
APN_OK, APN_WRONG, APN_WITHOUT_MMS = "carrier defaults", "custom", "incomplete"
SPEEDS: Mapping[str, float] = {"5G": 200.0, "4G": 80.0, "3G": 3.0, "2G": 0.2}
"""Mbit/s in each network mode."""
GOOD_SPEED = 50.0
SMS, STORAGE = PERMISSIONS = ("SMS", "storage")
_APN_SHOWN = {
    APN_OK: "they are the carrier defaults",
    APN_WRONG: "the access point is a custom one",
    APN_WITHOUT_MMS: "the address for picture messages (MMSC) is empty",
}


@dataclass(slots=True, kw_only=True)
class Phone:
    """Settings of a phone; with the defaults, everything works at home."""

    switches: dict[str, bool] = field(default_factory=lambda: {one.value: one is Feature.DATA for one in SWITCHES})
    """Switches by the names of their features."""
    sim: str = SIM_OK
    network_mode: str = "5G"
    apn: str = APN_OK
    """Access point in the settings."""
    apn_in_use: str = APN_OK
    """Access point since the last restart."""
    permissions: list[str] = field(default_factory=lambda: list(PERMISSIONS))
    registered: bool = True
    """True if the phone has found the network since the line was last suspended."""

    def __post_init__(self) -> None:
        """Copy the settings that the phone changes."""
        self.switches, self.permissions = dict(self.switches), list(self.permissions)

    def to_plain(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return asdict(self)

    def functions(self, network: Network) -> Functions:
        """Return the functions that work."""
        service = not self.is_on(Feature.AIRPLANE_MODE) and self.sim == SIM_OK and self.registered and network.active
        roams = not network.abroad or (network.roaming and self.is_on(Feature.ROAMING))
        has_data = self.is_on(Feature.DATA) and network.has_data and self.apn_in_use != APN_WRONG
        data = service and roams and has_data
        messages = (
            data
            and self.apn_in_use == APN_OK
            and self.network_mode != "2G"
            and not self.is_on(Feature.WIFI_CALLING)
            and set(self.permissions) == set(PERMISSIONS)
        )
        return Functions(service, data, data and self.speed() >= GOOD_SPEED, messages)

    def is_on(self, feature: Feature) -> bool:
        """Return True if a switch is on."""
        return self.switches[feature]

    def speed(self) -> float:
        """Return the speed of a working connection, in Mbit/s."""
        slowed = (0.1 if self.is_on(Feature.VPN) else 1.0) * (0.2 if self.is_on(Feature.DATA_SAVER) else 1.0)
        return round(SPEEDS[self.network_mode] * slowed, 2)

    def carry_out(self, step: PhoneStep, network: Network) -> str:
        """Perform an action on the phone, and return the customer's report."""
        verb, feature, values = step
        if feature in SWITCHES:
            return self._switch(verb, feature, network)
        match feature:
            case Feature.POWER:
                self.apn_in_use = self.apn
                self._search(network)
                return f"I have restarted the phone. {self._status(network)}"
            case Feature.SIM if verb is not Verb.CHECK:
                return self._reseat(network)
            case Feature.SIM:
                return f"The settings say that the SIM card is {self.sim}."
            case Feature.NETWORK_MODE:
                return self._mode(verb, values)
            case Feature.APN if verb is not Verb.CHECK:
                self.apn = APN_OK
                return "I have reset the APN settings. The phone says that this takes effect after a restart."
            case Feature.APN:
                return f"In the APN settings, {_APN_SHOWN[self.apn]}."
            case Feature.PERMISSIONS:
                return self._permissions(verb, values)
            case Feature.SPEED:
                return self._test_speed(network)
            case Feature.PICTURE_MESSAGE:
                works = self.functions(network).picture_messages
                return f"I have tried to send a picture message, and it {'was sent' if works else 'was not sent'}."
        return self._status(network)

    def _switch(self, verb: Verb, feature: Feature, network: Network) -> str:
        was_on = self.is_on(feature)
        if verb is Verb.CHECK:
            return f"{_capital(feature)} is {_on(was_on)}."
        self.switches[feature] = is_on = not was_on if verb is Verb.TOGGLE else verb is not Verb.OFF
        if is_on == was_on:
            return f"{_capital(feature)} was {_on(is_on)} already."
        if feature is Feature.AIRPLANE_MODE:
            self._search(network)
        return f"I have turned {feature} {_on(is_on)}. {self._status(network)}"

    def _reseat(self, network: Network) -> str:
        if self.sim == SIM_LOOSE:
            self.sim = SIM_OK
        self._search(network)
        return f"I have taken the SIM card out and put it back in. The settings say that it is {self.sim} now."

    def _mode(self, verb: Verb, values: tuple[str, ...]) -> str:
        if verb is Verb.CHECK:
            return f"The network mode is {self.network_mode}."
        if not values:
            return f"Which network mode should I choose? I can choose {', '.join(SPEEDS)}."
        self.network_mode = values[0]
        return f"I have set the network mode to {self.network_mode}."

    def _permissions(self, verb: Verb, values: tuple[str, ...]) -> str:
        if verb in (Verb.CHECK, Verb.TOGGLE):
            shown = " and ".join(f"{one} is {_allowed(one in self.permissions)}" for one in PERMISSIONS)
            return f"In the permissions of the messaging app, {shown}."
        if not values:
            return f"Which permission do you mean? The messaging app has these: {' and '.join(PERMISSIONS)}."
        others = [one for one in self.permissions if one not in values]
        self.permissions = others if verb is Verb.OFF else [*others, *values]
        return f"For the messaging app, {' and '.join(values)} {_is(values)} {_allowed(verb is not Verb.OFF)} now."

    def _test_speed(self, network: Network) -> str:
        functions = self.functions(network)
        if not functions.data:
            return "The speed test failed, because there is no connection."
        return f"The speed test shows {self.speed():g} Mbit/s, which is {'fast' if functions.fast else 'slow'}."

    def _search(self, network: Network) -> None:
        """Search for a network, which a phone does only in some situations."""
        self.registered = network.active and not self.is_on(Feature.AIRPLANE_MODE)

    def _status(self, network: Network) -> str:
        """Describe the status bar."""
        if self.is_on(Feature.AIRPLANE_MODE):
            shown = ["airplane mode"]
        elif self.sim == SIM_OK:
            works = self.functions(network).service
            shown = [f"a {self.network_mode} signal" if works else "no service"]
            shown += [] if self.is_on(Feature.DATA) else ["mobile data off"]
        else:
            shown = ["no SIM card" if self.sim == SIM_LOOSE else "a locked SIM card"]
        shown += [f"the {feature} sign" for feature in (Feature.VPN, Feature.DATA_SAVER) if self.is_on(feature)]
        return f"The status bar shows {', '.join(shown)}."


def _capital(feature: Feature) -> str:
    return feature[0].upper() + feature[1:]


def _on(value: bool) -> str:
    return "on" if value else "off"


def _allowed(value: bool) -> str:
    return "allowed" if value else "not allowed"


def _is(values: tuple[str, ...]) -> str:
    return "is" if len(values) == 1 else "are"
