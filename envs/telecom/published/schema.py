"""Shape of the published files: the company's records, the customer's phone, and the tasks."""

from __future__ import annotations

import datetime
import json
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Signal: TypeAlias = Literal["none", "poor", "fair", "good", "excellent"]
Technology: TypeAlias = Literal["none", "2G", "3G", "4G", "5G"]
NetworkMode: TypeAlias = Literal["4g_5g_preferred", "4g_only", "3g_only", "2g_only"]
Connection: TypeAlias = Literal["connected", "searching", "no_service", "emergency_only"]
LineStatus: TypeAlias = Literal["Active", "Suspended", "Pending Activation", "Closed"]
RewardPart: TypeAlias = Literal["DB", "ENV_ASSERTION", "NL_ASSERTION", "ACTION", "COMMUNICATE"]
Requestor: TypeAlias = Literal["assistant", "user"]
MMSC_URL = "http://mms.carrier.com/mms/wapenc"
"""Default address for picture messages."""
DEFAULT_SIGNALS: dict[Technology, Signal] = {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"}


class PublishedRow(BaseModel):
    """A record; unknown fields are errors, as in tau2-bench."""

    model_config = ConfigDict(extra="forbid")


class PublishedAddress(PublishedRow):
    """A customer's address."""

    street: str
    city: str
    state: str
    zip_code: str


class PublishedPlan(PublishedRow):
    """A plan and its prices."""

    plan_id: str
    name: str
    data_limit_gb: float
    price_per_month: float
    data_refueling_price_per_gb: float


class PublishedDevice(PublishedRow):
    """A phone, router, tablet or watch."""

    device_id: str
    device_type: Literal["phone", "router", "tablet", "watch", "other"]
    model: str
    imei: str | None = None
    is_esim_capable: bool
    activated: bool = False
    activation_date: datetime.datetime | None = None
    last_esim_transfer_date: datetime.datetime | None = None


class PublishedLine(PublishedRow):
    """A line with its use of data."""

    line_id: str
    phone_number: str
    status: LineStatus = "Pending Activation"
    plan_id: str
    device_id: str | None = None
    data_used_gb: float = 0.0
    data_refueling_gb: float = 0.0
    roaming_enabled: bool = False
    contract_end_date: datetime.date | None = None
    last_plan_change_date: datetime.date | None = None
    last_sim_replacement_date: datetime.date | None = None
    suspension_start_date: datetime.date | None = None


class PublishedLineItem(PublishedRow):
    """A charge or a credit on a bill."""

    description: str
    amount: float
    date: datetime.date
    item_type: str


class PublishedBill(PublishedRow):
    """A bill with its items."""

    bill_id: str
    customer_id: str
    period_start: datetime.date
    period_end: datetime.date
    issue_date: datetime.date
    total_due: float
    due_date: datetime.date
    line_items: list[PublishedLineItem] = Field(default_factory=list)
    status: Literal["Draft", "Issued", "Awaiting Payment", "Paid", "Overdue", "Disputed"] = "Draft"


class PublishedPayment(PublishedRow):
    """A way in which a customer pays."""

    method_type: Literal["Credit Card", "Debit Card", "PayPal"]
    account_number_last_4: str
    expiration_date: str


class PublishedCustomerRow(PublishedRow):
    """A customer's profile."""

    customer_id: str
    full_name: str
    date_of_birth: str
    email: str
    phone_number: str
    address: PublishedAddress
    account_status: Literal["Active", "Suspended", "Pending Verification", "Closed"] = "Pending Verification"
    payment_methods: list[PublishedPayment] = Field(default_factory=list)
    line_ids: list[str] = Field(default_factory=list)
    bill_ids: list[str] = Field(default_factory=list)
    created_at: datetime.datetime | datetime.date = datetime.date(2025, 1, 1)
    last_extension_date: datetime.date | None = None
    goodwill_credit_used_this_year: float = 0.0


class CompanyFile(PublishedRow):
    """The file ``db.toml``."""

    plans: list[PublishedPlan] = Field(default_factory=list)
    customers: list[PublishedCustomerRow] = Field(default_factory=list)
    lines: list[PublishedLine] = Field(default_factory=list)
    bills: list[PublishedBill] = Field(default_factory=list)
    devices: list[PublishedDevice] = Field(default_factory=list)


class APNSettings(PublishedRow):
    """The access point that a phone uses. The customer's tool `set_apn_settings` takes such an object."""

    apn_name: Literal["internet", "broken"] = "internet"
    reset_at_reboot: bool = False
    mms_apn: str | None = "mms"
    mmsc_url: str | None = MMSC_URL
    mms_proxy: str | None = None
    mms_port: int | None = None


class VpnDetails(PublishedRow):
    """A connection of a VPN."""

    server_address: str | None = None
    protocol: str | None = None
    server_performance: Literal["unknown", "poor", "fair", "good", "excellent"] = "unknown"


class AppPermissions(PublishedRow):
    """Permissions of an app."""

    sms: bool = False
    storage: bool = False
    phone: bool = False
    network: bool = False


class AppStatus(PublishedRow):
    """An app of the phone."""

    app_name: str
    permissions: AppPermissions = Field(default_factory=AppPermissions)


def _default_apps() -> dict[str, AppStatus]:
    messaging, browser = AppPermissions(sms=True, storage=True, phone=True), AppPermissions(network=True, storage=True)
    return {
        "messaging": AppStatus(app_name="messaging", permissions=messaging),
        "browser": AppStatus(app_name="browser", permissions=browser),
    }


class PhoneRow(PublishedRow):
    """Settings and state of the customer's phone."""

    sim_card_status: Literal["active", "missing", "locked_pin", "locked_puk"] = "active"
    sim_card_missing: bool = False
    airplane_mode: bool = False
    network_signal_strength: Signal = "good"
    network_technology_connected: Technology = "5G"
    network_connection_status: Connection = "connected"
    battery_level: int = 80
    data_enabled: bool = True
    roaming_enabled: bool = False
    network_mode_preference: NetworkMode = "4g_5g_preferred"
    active_apn_settings: APNSettings = Field(default_factory=APNSettings)
    wifi_enabled: bool = False
    wifi_connected: bool = False
    wifi_ssid: str | None = None
    wifi_signal_strength: Signal = "none"
    wifi_calling_enabled: bool = False
    wifi_calling_mms_over_wifi: bool = False
    data_saver_mode: bool = False
    vpn_enabled_setting: bool = False
    vpn_connected: bool = False
    vpn_details: VpnDetails | None = None
    app_statuses: dict[str, AppStatus] = Field(default_factory=_default_apps)


class PaymentRequest(PublishedRow):
    """A bill that the customer is asked to pay."""

    bill_id: str
    amount_due: float
    paid: bool = False


class Surroundings(PublishedRow):
    """Place of the customer, and what the company allows the phone to do."""

    name: str | None = None
    phone_number: str | None = None
    is_abroad: bool = False
    roaming_allowed: bool = False
    signal_strength: dict[Technology, Signal] = Field(default_factory=lambda: dict(DEFAULT_SIGNALS))
    mobile_data_usage_exceeded: bool = False
    line_active: bool = True
    payment_request: PaymentRequest | None = None


class CustomerFile(PublishedRow):
    """The file ``user_db.toml``."""

    device: PhoneRow = Field(default_factory=PhoneRow)
    surroundings: Surroundings = Field(default_factory=Surroundings)


class FunctionCall(BaseModel):
    """A step of a task's start: a function of the company's system or of the phone."""

    env_type: Requestor
    func_name: str
    arguments: dict[str, Any]


class Assertion(FunctionCall):
    """A condition on the end of an episode."""

    assert_value: bool = True
    message: str | None = None


class GoldAction(BaseModel):
    """A tool call of the published solution."""

    requestor: Requestor = "assistant"
    name: str
    arguments: dict[str, Any]
    compare_args: list[str] | None = None


class Criteria(BaseModel):
    """Criteria of a task's reward."""

    actions: list[GoldAction] | None = None
    env_assertions: list[Assertion] | None = None
    communicate_info: list[str] | None = None
    reward_basis: list[RewardPart] = ["DB", "COMMUNICATE"]


class InitialState(BaseModel):
    """The start of a task."""

    initialization_data: dict[str, Any] | None = None
    initialization_actions: list[FunctionCall] | None = None
    message_history: list[Any] | None = None


class PublishedScenario(BaseModel):
    """Knowledge and goals of the customer."""

    persona: str | None = None
    instructions: str | dict[str, Any]


class TaskRow(BaseModel):
    """A task; fields that nothing here depends on are ignored."""

    id: str
    user_scenario: PublishedScenario
    ticket: str | None = None
    initial_state: InitialState | None = None
    evaluation_criteria: Criteria | None = None
    user_tools: list[str] | None = None


def to_plain(row: BaseModel) -> dict[str, Any]:
    """Return a record in JSON types, as tau2-bench shows it: dates as text, times as ``2025-01-31 10:00:00``."""
    plain: dict[str, Any] = json.loads(json.dumps(row.model_dump(), default=str))
    return plain
